"""Who knows the token reaches the store through door and gate; nobody else does, and nobody disturbs who does."""

import hmac
import os
import secrets
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.lab.hosts import Host, hosts
from tests.lab.proxy import proxy
from weft.errors import RendezvousError
from weft.launch import tunnel as gate_module
from weft.launch.rendezvous import new_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreServer
from weft.launch.tunnel import MAGIC, TunnelClient, TunnelServer

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
TOKEN = new_token()
CHALLENGE_BYTES = len(MAGIC) + 32
REQUEST_BYTES = 32 + 16 + 32  # nonce, name of the store, proof


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where sockets lie."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture
def store(folder: Path) -> Iterator[SocketStore]:
    """A store of host 0."""
    with StoreServer(folder / "store"):
        yield SocketStore(folder / "store")


def client(door: TunnelClient) -> SocketStore:
    return SocketStore(door.path, timedelta(seconds=20))


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
def gate() -> Iterator[TunnelServer]:
    with TunnelServer(LOOPBACK, 0, TOKEN) as gate:
        yield gate


@pytest.fixture
def is_reached(gate: TunnelServer, folder: Path) -> Iterator[Callable[[], bool]]:
    """A store that nobody may reach: tells whether somebody did."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "store"))
        listener.listen()
        gate.open("ranks", folder / "store")
        yield lambda: bool(select.select([listener], [], [], 0)[0])


def test_clients_use_the_store_as_their_own(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    gate.open("ranks", store.path)
    tokens = TOKEN, TOKEN.upper()
    with ExitStack() as doors:
        door, other = [
            doors.enter_context(TunnelClient(LOOPBACK, gate.port, token, "ranks", folder / f"door-{number}"))
            for number, token in enumerate(tokens)
        ]
        clients = [client(door), client(door), client(other)]
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


def test_connections_wait_for_no_delayed_acknowledgement(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    """Which take 40 ms each, where small packets are held back (Nagle's algorithm)."""
    gate.open("ranks", store.path)
    with TunnelClient(LOOPBACK, gate.port, TOKEN, "ranks", folder / "door") as door:
        seconds = []
        for _ in range(20):
            begin = time.monotonic()
            with closing(client(door)) as other:
                other.set("a", "1")
            seconds.append(time.monotonic() - begin)
    assert min(seconds) < 0.02


def test_a_door_leads_to_its_own_store(gate: TunnelServer, folder: Path) -> None:
    names = "board", "ranks"
    with ExitStack() as servers:
        for name in names:
            server = servers.enter_context(StoreServer(folder / name))
            SocketStore(server.path).set("name", name)
            gate.open(name, server.path)
        for name in names:
            with TunnelClient(LOOPBACK, gate.port, TOKEN, name, folder / "door") as door:
                assert client(door).get("name").decode() == name


def test_a_door_waits_for_gate_and_store(store: SocketStore, folder: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    gates: list[TunnelServer] = []
    store.set("a", "1")

    def come() -> None:
        time.sleep(0.3)
        gates.append(TunnelServer(LOOPBACK, port, TOKEN))
        time.sleep(0.3)
        gates[0].open("ranks", store.path)

    late = threading.Thread(target=come)
    late.start()
    with TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "door") as door:
        assert client(door).get("a") == b"1"
    late.join()
    gates[0].shut("ranks")
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: the store 'ranks' is not open there"):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "door", timeout=0.5)
    assert gates[0].refused == 0
    gates[0].close()
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: .*Connect call failed"):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "door", timeout=0.5)


def test_wrong_token(
    gate: TunnelServer, folder: Path, is_reached: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = new_token()
    for _ in range(5):
        with pytest.raises(RendezvousError, match="refused the token") as caught:
            TunnelClient(LOOPBACK, gate.port, wrong, "ranks", folder / "door")
        assert "WEFT_TOKEN" in str(caught.value.fix)
        assert TOKEN not in str(caught.value)
        assert wrong not in str(caught.value)
    until(lambda: gate.refused == 5)
    lines = [record.getMessage() for record in caplog.records if record.name == gate_module.__name__]
    where = f"{LOOPBACK} was refused at {LOOPBACK}:{gate.port}: wrong token"
    assert lines == [f"{where} (number {number})" for number in (1, 2, 4)]
    assert not is_reached()


@pytest.mark.parametrize("token", ["", "short", "ab" * 15, "no hexadecimal digits at all, but long enough"])
def test_weak_tokens_open_no_gate_and_no_door(token: str, folder: Path) -> None:
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        TunnelServer(LOOPBACK, 0, token)
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        TunnelClient(LOOPBACK, 1, token, "ranks", folder / "door")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "203.0.113.1"])
def test_a_gate_listens_on_one_address(address: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        TunnelServer(address, 0, TOKEN)
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
def test_garbage(garbage: bytes, gate: TunnelServer, is_reached: Callable[[], bool]) -> None:
    with call(gate.port) as connection:
        connection.sendall(garbage)
        answer = everything(connection)
    assert answer[: len(MAGIC)] == MAGIC
    assert answer[CHALLENGE_BYTES:] in (b"x", b"")  # the verdict is lost where unread bytes reset the connection
    until(lambda: gate.refused == 1)
    assert not is_reached()


def test_a_torch_client_without_a_door(gate: TunnelServer, is_reached: Callable[[], bool]) -> None:
    with pytest.raises(dist.DistError):
        dist.TCPStore(LOOPBACK, gate.port, is_master=False, timeout=timedelta(seconds=1))
    until(lambda: gate.refused > 0)
    assert not is_reached()


def test_who_leaves_without_a_proof(gate: TunnelServer, is_reached: Callable[[], bool]) -> None:
    call(gate.port).close()
    until(lambda: gate.refused == 1)
    assert not is_reached()


def test_who_is_slow_is_sent_away(
    gate: TunnelServer,
    is_reached: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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
    assert not is_reached()


def test_strangers_take_no_place_of_others(
    gate: TunnelServer, store: SocketStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "MAX_PENDING", 8)
    monkeypatch.setattr(gate_module, "HANDSHAKE_SECONDS", 60.0)
    store.set("a", "1")
    gate.open("ranks", store.path)
    with TunnelClient(LOOPBACK, gate.port, TOKEN, "ranks", folder / "door") as door:
        standing = client(door)
        assert standing.get("a") == b"1"
        strangers = [call(gate.port) for _ in range(20)]
        until(lambda: gate.refused == 12)  # the oldest
        assert all(len(everything(stranger)) == CHALLENGE_BYTES for stranger in strangers[:12])
        assert standing.get("a") == b"1"
        assert client(door).get("a") == b"1"
        for stranger in strangers:
            stranger.close()


def converse(gate: TunnelServer, folder: Path) -> dict[str, bytearray]:
    """One good proof, recorded: what the door sent, and what the gate sent."""
    with proxy(gate.port) as (port, kept):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "door").close()
        until(lambda: len(kept["gate"]) == CHALLENGE_BYTES + 1 + 32)
    return kept


def test_a_replay_is_refused_by_the_gate(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    gate.open("ranks", store.path)
    kept = converse(gate, folder)
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
def test_a_proof_is_for_all_of_the_conversation(
    change: dict[str, bytes], verdict: bytes, gate: TunnelServer, store: SocketStore
) -> None:
    gate.open("ranks", store.path)
    with call(gate.port) as connection:
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sent = {"nonce_of_door": secrets.token_bytes(32), "name": b"ranks".ljust(16, bytes(1))}
        said = {"token": TOKEN, "label": b"door", "nonce_of_gate": challenge[len(MAGIC) :], **sent, **change}
        text = b"".join(said[part] for part in ("label", "nonce_of_gate", "nonce_of_door", "name"))
        proof = hmac.digest(said["token"].encode(), text, "sha256")
        connection.sendall(sent["nonce_of_door"] + sent["name"] + proof)
        assert connection.recv(1) == verdict
    until(lambda: gate.refused == (verdict == b"x"))


def test_the_token_does_not_travel(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    gate.open("ranks", store.path)
    for sent in converse(gate, folder).values():
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


def test_a_false_gate_is_found_out(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    gate.open("ranks", store.path)
    kept = bytes(converse(gate, folder)["gate"])

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
            TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "door")


def test_the_end_of_the_gate_ends_connections(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    store.set("a", "1")
    gate.open("ranks", store.path)
    with TunnelClient(LOOPBACK, gate.port, TOKEN, "ranks", folder / "door") as door:
        lasting = client(door)
        assert lasting.get("a") == b"1"
        gate.close()
        gate.close()
        with pytest.raises(dist.DistNetworkError):
            lasting.get("a")
    assert store.get("a") == b"1"


FLOOD = """
import socket, sys, time
port, rate, end = int(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
begin, made, held = time.monotonic(), 0, []
while (now := time.monotonic()) < end:
    while made < (now - begin) * rate:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        held.append(connection)
        made += 1
        if len(held) > 500:
            held.pop(0).close()
    time.sleep(0.001)
print(made / (time.monotonic() - begin), flush=True)
"""


@pytest.mark.exclusive("a flood takes a core")
def test_hosts_join_under_a_flood_of_connections(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    """4,000 new ones a second, from the very address that the host has: the hardest case."""
    store.set("a", "1")
    gate.open("ranks", store.path)
    command = [sys.executable, "-c", FLOOD, str(gate.port), "4000", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        until(lambda: gate.refused > 1000)
        for number in range(5):
            begin = time.monotonic()
            with TunnelClient(LOOPBACK, gate.port, TOKEN, "ranks", folder / f"door-{number}") as door:
                assert client(door).get("a") == b"1"
            assert time.monotonic() - begin < 5
        assert flood.poll() is None, "the flood ended before the hosts had joined"
        assert flood.stdout
        rate = float(flood.stdout.read())
    assert rate > 1000  # what a machine that has other work makes of 4,000


# On emulated hosts.

HOST_0 = """
import sys
from weft.launch.tunnel import TunnelServer
from weft.launch.rendezvous import interface_address, read_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import StoreServer
with scratch_folder() as folder, StoreServer(folder / "store") as server:
    gate = TunnelServer(interface_address("eth0"), 29400, read_token(), silence_seconds=float(sys.argv[1]))
    gate.open("ranks", server.path)
    print(server.path, flush=True)
    sys.stdin.read()
"""
CALLER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from tempfile import mkdtemp
from pathlib import Path
from weft.launch.tunnel import TunnelClient
from weft.launch.rendezvous import read_token
from weft.launch.store import SocketStore
way = sys.argv[1], 29400, read_token(), "ranks", Path(mkdtemp(), "door")
door = TunnelClient(*way, timeout=5, silence_seconds=float(sys.argv[2]))
store = SocketStore(door.path, timedelta(seconds=60))
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
from pathlib import Path
from tempfile import mkdtemp
from weft.launch.tunnel import TunnelClient
from weft.launch.rendezvous import interface_address, interface_of, read_token
address, path, first, code = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if first:
    path = Path(mkdtemp(), "door")
    door = TunnelClient(address, 29400, read_token(), "ranks", path)
environment = os.environ | {
    "WEFT_STORE": str(path), "WORLD_SIZE": "4",
    "GLOO_SOCKET_IFNAME": interface_of(interface_address("eth0")),
}
del environment["WEFT_TOKEN"]
ranks = [
    subprocess.Popen([sys.executable, "-c", code], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank - first)})
    for rank in (first, first + 1)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
RANK = """
import torch, torch.distributed as dist
from weft.device.device import detect
from weft.launch.launcher import connect
connect(detect())
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
def two_hosts() -> Iterator[tuple[Host, Host, str]]:
    """Host 0 with gate and store, host 1, and where the store is on host 0."""
    with hosts(2) as (a, b):
        yield a, b, start(a, HOST_0, 2).stdout.readline().strip()


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


def test_the_store_is_reached_through_the_gate_only(two_hosts: tuple[Host, Host, str]) -> None:
    a, b, path = two_hosts
    outside = socket.inet_aton(a.address)[::-1].hex().upper()
    assert connections(a, "0A") == [(outside, 29400)]  # nothing else listens
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    refused = start(b, CALLER, a.address, 2, 1, token=new_token())
    assert "refused the token" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 1
    admitted = start(b, CALLER, a.address, 2, 1)
    assert admitted.communicate(timeout=60)[0].startswith("0 ")


def test_ranks_of_two_hosts_form_groups(two_hosts: tuple[Host, Host, str]) -> None:
    a, b, path = two_hosts
    launchers = [start(host, LAUNCHER, a.address, path, first, RANK) for host, first in ((a, 0), (b, 2))]
    errors = [launcher.communicate(timeout=120)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors


def test_a_link_that_breaks_for_a_second(two_hosts: tuple[Host, Host, str]) -> None:
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
def test_a_link_that_breaks_for_good(pause: float, two_hosts: tuple[Host, Host, str]) -> None:
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
