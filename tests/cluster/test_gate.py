"""Who knows the token reaches the store through door and gate; nobody else does, and nobody disturbs who does."""

import hmac
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.lab.hosts import Host, hosts
from weft.cluster import gate as gate_module
from weft.cluster.gate import MAGIC, Door, Gate
from weft.cluster.meeting import new_token
from weft.errors import RendezvousError

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
TOKEN = new_token()
CHALLENGE_BYTES = len(MAGIC) + 32
REQUEST_BYTES = 32 + 16 + 32  # nonce, name of the store, proof


def open_store() -> tuple[dist.TCPStore, int]:
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach()), port


def client(port: int, seconds: float = 20) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=seconds))


def call(port: int) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port))
    connection.settimeout(10)
    return connection


def everything(connection: socket.socket) -> bytes:
    """What arrives until the other side ends the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:  # it had not read all that was sent
        pass
    return data


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate(LOOPBACK, 0, TOKEN) as gate:
        yield gate


@pytest.fixture
def store_port(gate: Gate) -> Iterator[Callable[[], bool]]:
    """A store that nobody may reach: tells whether somebody did."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        gate.open("ranks", listener.getsockname()[1])
        yield lambda: bool(select.select([listener], [], [], 0)[0])


def test_clients_use_the_store_as_their_own(gate: Gate) -> None:
    store, port = open_store()
    gate.open("ranks", port)
    with Door(LOOPBACK, gate.port, TOKEN, "ranks") as door, Door(LOOPBACK, gate.port, TOKEN.upper(), "ranks") as other:
        clients = [client(door.port), client(door.port), client(other.port)]
        clients[0].set("a", "1")
        assert clients[1].get("a") == b"1"
        assert [one.add("count", 1) for one in clients] == [1, 2, 3]
        clients[2].set("large", "x" * 3_000_000)
        assert len(store.get("large")) == 3_000_000
        assert len(clients[0].get("large")) == 3_000_000
        waiter = threading.Thread(target=clients[0].wait, args=(["late"], timedelta(seconds=20)))
        waiter.start()
        clients[1].set("late", "")
        waiter.join()
        with pytest.raises(dist.DistStoreError):
            clients[0].wait(["never"], timedelta(seconds=0.1))
        assert clients[0].check(["late"])
        assert not clients[0].check(["never"])
    assert gate.refused == 0


def test_a_door_leads_to_its_own_store(gate: Gate) -> None:
    stores = {name: open_store() for name in ("board", "ranks")}
    for name, (store, port) in stores.items():
        store.set("name", name)
        gate.open(name, port)
    for name in stores:
        with Door(LOOPBACK, gate.port, TOKEN, name) as door:
            assert client(door.port).get("name").decode() == name


def test_a_door_waits_for_gate_and_store() -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    gates: list[Gate] = []
    store, store_port = open_store()
    store.set("a", "1")

    def come() -> None:
        time.sleep(0.3)
        gates.append(Gate(LOOPBACK, port, TOKEN))
        time.sleep(0.3)
        gates[0].open("ranks", store_port)

    late = threading.Thread(target=come)
    late.start()
    with Door(LOOPBACK, port, TOKEN, "ranks") as door:
        assert client(door.port).get("a") == b"1"
    late.join()
    gates[0].shut("ranks")
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: the store 'ranks' is not open there"):
        Door(LOOPBACK, port, TOKEN, "ranks", timeout=0.5)
    assert gates[0].refused == 0
    gates[0].close()
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: .*Connect call failed"):
        Door(LOOPBACK, port, TOKEN, "ranks", timeout=0.5)


def test_wrong_token(gate: Gate, store_port: Callable[[], bool], caplog: pytest.LogCaptureFixture) -> None:
    wrong = new_token()
    for _ in range(5):
        with pytest.raises(RendezvousError, match="refused the token") as caught:
            Door(LOOPBACK, gate.port, wrong, "ranks")
        assert "WEFT_TOKEN" in str(caught.value.fix)
        assert TOKEN not in str(caught.value)
        assert wrong not in str(caught.value)
    until(lambda: gate.refused == 5)
    lines = [record.getMessage() for record in caplog.records if record.name == gate_module.__name__]
    where = f"{LOOPBACK} was refused at {LOOPBACK}:{gate.port}: wrong token"
    assert lines == [f"{where} (number {number})" for number in (1, 2, 4)]
    assert not store_port()


@pytest.mark.parametrize("token", ["", "short", "ab" * 15, "no hexadecimal digits at all, but long enough"])
def test_weak_tokens_open_no_gate_and_no_door(token: str) -> None:
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        Gate(LOOPBACK, 0, token)
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        Door(LOOPBACK, 1, token, "ranks")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "203.0.113.1"])
def test_a_gate_listens_on_one_address(address: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        Gate(address, 0, TOKEN)
    assert "lo (127.0.0.1)" in str(caught.value.fix)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n".ljust(REQUEST_BYTES),
        bytes(REQUEST_BYTES),
        b"\xff" * 100_000,
        secrets.token_bytes(REQUEST_BYTES),
    ],
    ids=["http", "zeros", "long", "random"],
)
def test_garbage(garbage: bytes, gate: Gate, store_port: Callable[[], bool]) -> None:
    with call(gate.port) as connection:
        connection.sendall(garbage)
        answer = everything(connection)
    assert answer[: len(MAGIC)] == MAGIC
    assert answer[CHALLENGE_BYTES:] in (b"x", b"")  # the verdict is lost where unread bytes reset the connection
    until(lambda: gate.refused == 1)
    assert not store_port()


def test_a_torch_client_without_a_door(gate: Gate, store_port: Callable[[], bool]) -> None:
    with pytest.raises(dist.DistError):
        client(gate.port, seconds=1)
    until(lambda: gate.refused > 0)
    assert not store_port()


def test_who_leaves_without_a_proof(gate: Gate, store_port: Callable[[], bool]) -> None:
    call(gate.port).close()
    until(lambda: gate.refused == 1)
    assert not store_port()


def test_who_is_slow_is_sent_away(
    gate: Gate, store_port: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate_module, "HANDSHAKE_SECONDS", 0.5)
    with call(gate.port) as connection:
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012
            while time.monotonic() < start + 10:
                connection.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - start < 5
    assert gate.refused == 1
    assert "no proof within 0.5 s" in caplog.text
    assert not store_port()


def test_strangers_take_no_place_of_others(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_PENDING", 8)
    monkeypatch.setattr(gate_module, "HANDSHAKE_SECONDS", 60.0)
    store, port = open_store()
    store.set("a", "1")
    gate.open("ranks", port)
    with Door(LOOPBACK, gate.port, TOKEN, "ranks") as door:
        standing = client(door.port)
        strangers = [call(gate.port) for _ in range(20)]
        until(lambda: gate.refused == 12)  # the oldest
        assert all(len(everything(stranger)) == CHALLENGE_BYTES for stranger in strangers[:12])
        assert standing.get("a") == b"1"
        assert client(door.port).get("a") == b"1"
        for stranger in strangers:
            stranger.close()


@contextmanager
def recorder(port: int) -> Iterator[tuple[int, dict[str, bytearray]]]:
    """Passes connections on to a port and keeps what went each way."""
    kept = {"door": bytearray(), "gate": bytearray()}

    def pipe(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        while data := source.recv(65536):
            record += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        try:
            while True:
                here, there = listener.accept()[0], call(port)
                for arguments in ((here, there, kept["door"]), (there, here, kept["gate"])):
                    threading.Thread(target=pipe, args=arguments, daemon=True).start()
        except OSError:
            pass  # it is closed

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], kept
        listener.shutdown(socket.SHUT_RDWR)


def converse(gate: Gate) -> dict[str, bytearray]:
    """One good proof, recorded: what the door sent, and what the gate sent."""
    with recorder(gate.port) as (port, kept):
        Door(LOOPBACK, port, TOKEN, "ranks").close()
        until(lambda: len(kept["gate"]) == CHALLENGE_BYTES + 1 + 32)
    return kept


def test_a_replay_is_refused_by_the_gate(gate: Gate) -> None:
    _, port = open_store()
    gate.open("ranks", port)
    kept = converse(gate)
    assert len(kept["door"]) == REQUEST_BYTES
    with call(gate.port) as connection:
        connection.sendall(kept["door"])
        assert everything(connection)[CHALLENGE_BYTES:] == b"x"
    assert gate.refused == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, b"+"),
        ({"token": new_token()}, b"x"),
        ({"label": b"gate"}, b"x"),
        ({"nonce_of_gate": bytes(32)}, b"x"),
        ({"nonce_of_door": bytes(32)}, b"x"),
        ({"name": b"board".ljust(16, bytes(1))}, b"x"),
    ],
    ids=lambda change: "".join(change) if isinstance(change, dict) else "",
)
def test_a_proof_is_for_all_of_the_conversation(change: dict[str, bytes], verdict: bytes, gate: Gate) -> None:
    _, port = open_store()
    gate.open("ranks", port)
    with call(gate.port) as connection:
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sent = {"nonce_of_door": secrets.token_bytes(32), "name": b"ranks".ljust(16, bytes(1))}
        said = {"token": TOKEN, "label": b"door", "nonce_of_gate": challenge[len(MAGIC) :], **sent, **change}
        text = b"".join(said[part] for part in ("label", "nonce_of_gate", "nonce_of_door", "name"))
        proof = hmac.digest(said["token"].encode(), text, "sha256")
        connection.sendall(sent["nonce_of_door"] + sent["name"] + proof)
        assert connection.recv(1) == verdict
    until(lambda: gate.refused == (verdict == b"x"))


def test_the_token_does_not_travel(gate: Gate) -> None:
    _, port = open_store()
    gate.open("ranks", port)
    for sent in converse(gate).values():
        assert bytes.fromhex(TOKEN) not in sent
        assert TOKEN.encode() not in sent.lower()


def false_gate(answer: Callable[[socket.socket], None]) -> tuple[socket.socket, int]:
    """Listens as a gate would, and answers every connection with a function."""
    listener = socket.create_server((LOOPBACK, 0))

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return listener, listener.getsockname()[1]


def test_a_false_gate_is_found_out(gate: Gate) -> None:
    _, port = open_store()
    gate.open("ranks", port)
    kept = bytes(converse(gate)["gate"])

    def replay(connection: socket.socket) -> None:
        connection.sendall(kept)
        connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)

    def mirror(connection: socket.socket) -> None:
        """The proof of the door, sent back as that of the gate."""
        connection.sendall(MAGIC + bytes(32))
        connection.sendall(b"+" + connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)[48:])

    def other(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.org ESMTP\r\n".ljust(44))

    for answer in (replay, mirror, other):
        listener, port = false_gate(answer)
        with closing(listener), pytest.raises(RendezvousError, match="not the gate of this job"):
            Door(LOOPBACK, port, TOKEN, "ranks")


def test_the_end_of_the_gate_ends_connections(gate: Gate) -> None:
    store, port = open_store()
    store.set("a", "1")
    gate.open("ranks", port)
    with Door(LOOPBACK, gate.port, TOKEN, "ranks") as door:
        lasting = client(door.port)
        assert lasting.get("a") == b"1"
        gate.close()
        gate.close()
        with pytest.raises(dist.DistNetworkError):
            lasting.get("a")
    assert store.get("a") == b"1"


# On emulated hosts.

HOST_0 = """
import socket, sys
import torch.distributed as dist
from weft.cluster.gate import Gate
from weft.cluster.meeting import interface_address, read_token
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
gate = Gate(interface_address("eth0"), 29400, read_token(), silence_seconds=float(sys.argv[1]))
gate.open("ranks", port)
print(port, flush=True)
sys.stdin.read()
"""
CALLER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from weft.cluster.gate import Door
from weft.cluster.meeting import read_token
door = Door(sys.argv[1], 29400, read_token(), "ranks", timeout=5, silence_seconds=float(sys.argv[2]))
store = dist.TCPStore("127.0.0.1", door.port, is_master=False, timeout=timedelta(seconds=60))
for number in range(int(sys.argv[3])):
    start = time.monotonic()
    try:
        store.set(f"key-{number}", str(number))
        assert store.get(f"key-{number}") == str(number).encode()
    except dist.DistError as error:
        sys.exit(f"{type(error).__name__} after {time.monotonic() - start} s")
    print(number, time.monotonic(), flush=True)
    time.sleep(0.02)
"""
# The launcher of a host: it has the token, and starts ranks that have none.
LAUNCHER = """
import os, subprocess, sys
from weft.cluster.gate import Door
from weft.cluster.meeting import interface_address, interface_of, read_token
address, store_port, first, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
door = Door(address, 29400, read_token(), "ranks") if first else None
environment = os.environ | {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(door.port if door else store_port), "WORLD_SIZE": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    "GLOO_SOCKET_IFNAME": interface_of(interface_address("eth0")),
}
del environment["WEFT_TOKEN"]
ranks = [
    subprocess.Popen([sys.executable, "-c", code], env=environment | {"RANK": str(rank)})
    for rank in (first, first + 1)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), 10.0 ** dist.get_rank())
dist.all_reduce(x)
assert x.unique().tolist() == [1111.0], x
group = dist.new_group([1, 2])
if dist.get_rank() in (1, 2):
    dist.all_reduce(x, group=group)
    assert x.unique().tolist() == [2222.0], x
dist.barrier()
dist.destroy_process_group()
"""


def start(host: Host, code: str, *arguments: object, token: str = TOKEN) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WEFT_TOKEN": token}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return host.start(argv, env=environment, text=True, **pipes)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Host, Host, int]]:
    """Host 0 with gate and store, host 1, and the port of the store on host 0's loopback."""
    with hosts(2) as (a, b):
        yield a, b, int(start(a, HOST_0, 2).stdout.readline())


def connections(host: Host, state: str) -> list[tuple[str, int]]:
    """Local address and port of the TCP sockets of a host that are in a state of /proc/net/tcp."""
    listed = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in listed.stdout.splitlines() if "local_address" not in line]
    return [(row[1].split(":")[0], int(row[1].split(":")[1], 16)) for row in rows if row[3] == state]


def test_the_store_is_reached_through_the_gate_only(two_hosts: tuple[Host, Host, int]) -> None:
    a, b, port = two_hosts
    loopback, outside = "0100007F", socket.inet_aton(a.address)[::-1].hex().upper()
    assert sorted(connections(a, "0A")) == sorted([(loopback, port), (outside, 29400)])
    direct = start(b, f"import socket; socket.create_connection(({a.address!r}, {port}), 5)")
    assert "Connection refused" in direct.communicate(timeout=20)[1]
    refused = start(b, CALLER, a.address, 2, 1, token=new_token())
    assert "refused the token" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 1
    admitted = start(b, CALLER, a.address, 2, 1)
    assert admitted.communicate(timeout=60)[0].startswith("0 ")


def test_ranks_of_two_hosts_form_groups(two_hosts: tuple[Host, Host, int]) -> None:
    a, b, port = two_hosts
    launchers = [start(host, LAUNCHER, a.address, port, first, RANK) for host, first in ((a, 0), (b, 2))]
    errors = [launcher.communicate(timeout=120)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors


def test_a_link_that_breaks_for_a_second(two_hosts: tuple[Host, Host, int]) -> None:
    a, b, _ = two_hosts
    caller = start(b, CALLER, a.address, 5, 100)
    assert caller.stdout.readline()
    b.unplug()
    down = time.monotonic()
    time.sleep(1)
    b.plug()
    times = [float(line.split()[1]) for line in caller.stdout]
    assert caller.wait() == 0, caller.stderr.read()
    assert len(times) == 99
    assert max(times) > down + 1
    assert not [moment for moment in times if down + 0.3 < moment < down + 1]


@pytest.mark.parametrize("pause", [0.02, 60], ids=["in a request", "idle"])
def test_a_link_that_breaks_for_good(pause: float, two_hosts: tuple[Host, Host, int]) -> None:
    a, b, _ = two_hosts
    caller = start(b, CALLER.replace("sleep(0.02)", f"sleep({pause})"), a.address, 2, 10_000)
    assert caller.stdout.readline()
    outside = socket.inet_aton(a.address)[::-1].hex().upper()
    assert outside in dict(connections(a, "01"))
    b.unplug()
    try:
        if pause < 1:
            assert "DistNetworkError after" in caller.communicate(timeout=20)[1]
        until(lambda: outside not in dict(connections(a, "01")), 20)  # the gate
        until(lambda: not connections(b, "01"), 20)  # the door and its caller
    finally:
        caller.kill()
        b.plug()
