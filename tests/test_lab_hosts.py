"""Emulated hosts: isolation, link failures, and cleanup."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import Host, hosts, namespaces, remove_leftovers

# Echo server; its first line of output means that it listens.
ECHO = """
import socket, sys, threading
def answer(connection):
    for line in connection.makefile("rb"):
        connection.sendall(line)
listener = socket.create_server((sys.argv[1], 5000))
print("listens", flush=True)
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""
# Sends 0, 1, 2 and so on, and prints each reply with its time.
STREAM = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
answers = connection.makefile("rb")
for number in range(int(sys.argv[2])):
    connection.sendall(b"%d\\n" % number)
    assert int(answers.readline()) == number
    print(number, time.monotonic(), flush=True)
    time.sleep(0.02)
"""
# Sends bytes, waits for their echo, and prints the seconds.
BULK = """
import socket, sys, time
connection, size = socket.create_connection((sys.argv[1], 5000)), int(sys.argv[2])
connection.sendall(b"x" * 999 + b"\\n"); connection.recv(1000, socket.MSG_WAITALL)  # uses up the burst
start = time.monotonic()
connection.sendall(b"x" * (size - 1) + b"\\n")
assert connection.recv(size, socket.MSG_WAITALL).endswith(b"\\n")
print(time.monotonic() - start)
"""


def echo(host: Host, address: str) -> None:
    server = host.start([sys.executable, "-c", ECHO, address], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"listens\n"


def stream(host: Host, address: str, number: int) -> subprocess.Popen[str]:
    return host.start([sys.executable, "-c", STREAM, address, str(number)], stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Host]]:
    with hosts(2) as made:
        echo(made[0], made[0].address)
        yield made


def test_hosts_reach_each_other_and_have_separate_loopbacks(pair: list[Host]) -> None:
    a, b = pair
    assert stream(b, a.address, 3).wait(10) == 0
    assert stream(a, a.address, 3).wait(10) == 0
    echo(b, "127.0.0.1")
    assert stream(b, "127.0.0.1", 3).wait(10) == 0
    refused = a.start([sys.executable, "-c", STREAM, "127.0.0.1", "1"], stderr=subprocess.PIPE, text=True)
    assert "Connection refused" in refused.communicate(timeout=10)[1]


def test_the_machine_itself_is_not_on_their_network(pair: list[Host]) -> None:
    with socket.socket() as outside:
        outside.settimeout(0.5)
        try:  # a gateway of the machine may answer for any address, but not with an echo
            outside.connect((pair[0].address, 5000))
            outside.sendall(b"hello\n")
            answer = outside.recv(6)
        except OSError:
            answer = b""
    assert answer != b"hello\n"


def test_link_fails_and_recovers(pair: list[Host]) -> None:
    a, b = pair
    client = stream(b, a.address, 150)
    assert client.stdout.readline()
    b.unplug()
    down = time.monotonic()
    time.sleep(1)
    up = time.monotonic()
    b.plug()
    times = [float(line.split()[1]) for line in client.stdout]
    assert client.wait() == 0
    assert len(times) == 149
    assert not [moment for moment in times if down + 0.3 < moment < up]
    assert any(moment > up for moment in times)


@pytest.mark.parametrize("which", [0, 1])
def test_no_packet_passes_a_link_that_is_down(which: int, pair: list[Host]) -> None:
    pair[which].unplug()
    try:
        code = f"import socket; socket.create_connection(({pair[0].address!r}, 5000), timeout=1)"
        attempt = pair[1].start([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        error = attempt.communicate(timeout=10)[1]
        assert "TimeoutError" in error or "No route to host" in error
    finally:
        pair[which].plug()
    assert stream(pair[1], pair[0].address, 1).wait(10) == 0


@pytest.mark.exclusive("measures the rate of a link")
def test_rate_limit_of_a_link() -> None:
    size, rate = 1_000_000, 20_000_000
    with hosts(2, rate=rate) as (a, b):
        echo(a, a.address)
        client = b.start([sys.executable, "-c", BULK, a.address, str(size)], stdout=subprocess.PIPE, text=True)
        seconds = float(client.communicate(timeout=30)[0])
    one_way = size * 8 / rate  # the full line is sent before its echo arrives
    assert 0.9 * 2 * one_way < seconds < 5 * 2 * one_way


def test_cleanup_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), hosts(2) as (a, b):  # noqa: PT012
        names = {a.namespace, b.namespace, a.bridge}
        assert names <= set(namespaces())
        process = a.start(["sleep", "60"])
        _ = 1 / 0
    assert process.returncode == -signal.SIGKILL
    assert not names & set(namespaces())


def test_leftovers_of_a_killed_run_are_removed_by_the_next() -> None:
    code = """
import sys, time
from tests.lab.hosts import hosts
with hosts(1) as (host,):
    print(host.namespace, host.bridge, host.start(["sleep", "60"]).pid, flush=True)
    time.sleep(60)
"""
    root = Path(__file__).parents[1]
    with hosts(1) as (mine,):  # skips if hosts are unavailable
        run = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
        *names, sleeper = run.stdout.readline().split()
        run.kill()
        run.wait()
        assert set(names) <= set(namespaces())
        remove_leftovers()
        assert not set(names) & set(namespaces())
        assert mine.namespace in namespaces()
    end = time.monotonic() + 10
    while Path("/proc", sleeper, "exe").exists():
        assert time.monotonic() < end, "the process in the namespace still runs"
        time.sleep(0.01)
