"""Tunnel: only hosts with the token reach the store, and nobody can disturb their connections."""

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
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist

from tests.lab.commands import ForkedCommand, completed, start_function
from tests.lab.hosts import Host, hosts
from tests.lab.proxy import proxy
from weft.device.detect import detect
from weft.errors import RendezvousError
from weft.launch import tunnel as tunnel_module
from weft.launch.rank_entry import connect
from weft.launch.rendezvous import interface_address, interface_of, new_token, read_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreServer
from weft.launch.tunnel import MAGIC, TunnelClient, TunnelServer

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
TOKEN = new_token()
CHALLENGE_BYTES = len(MAGIC) + 32
REQUEST_BYTES = 32 + 16 + 32  # nonce, name of the store, proof


def store_client(client: TunnelClient) -> SocketStore:
    return SocketStore(client.path, timedelta(seconds=20))


def connect_to(port: int) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port))
    connection.settimeout(10)
    return connection


def receive_all(connection: socket.socket) -> bytes:
    """Bytes received until the other side closes the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:  # it had not read all bytes sent to it
        pass
    return data


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[TunnelServer]:
    with TunnelServer(LOOPBACK, 0, TOKEN) as server:
        yield server


@pytest.fixture
def is_reached(server: TunnelServer, folder: Path) -> Iterator[Callable[[], bool]]:
    """Store that no client may reach; the returned function tells whether one did."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "store"))
        listener.listen()
        server.add_store("ranks", folder / "store")
        yield lambda: bool(select.select([listener], [], [], 0)[0])


def test_clients_use_the_store_through_the_tunnel(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    server.add_store("ranks", store.path)
    tokens = TOKEN, TOKEN.upper()
    with ExitStack() as stack:
        first, second = [
            stack.enter_context(TunnelClient(LOOPBACK, server.port, token, "ranks", folder / f"client-{index}"))
            for index, token in enumerate(tokens)
        ]
        clients = [store_client(first), store_client(first), store_client(second)]
        clients[0].set("a", "1")
        assert clients[1].get("a") == b"1"
        assert [client.add("count", 1) for client in clients] == [1, 2, 3]
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
    assert server.refused == 0


def test_connections_wait_for_no_delayed_acknowledgement(
    server: TunnelServer, store: SocketStore, folder: Path
) -> None:
    """A delayed acknowledgement costs 40 ms if small packets are held back (Nagle's algorithm)."""
    server.add_store("ranks", store.path)
    with TunnelClient(LOOPBACK, server.port, TOKEN, "ranks", folder / "client") as client:
        seconds = []
        for _ in range(20):
            begin = time.monotonic()
            with closing(store_client(client)) as other:
                other.set("a", "1")
            seconds.append(time.monotonic() - begin)
    assert min(seconds) < 0.02


def test_a_client_connects_to_the_store_of_its_name(server: TunnelServer, folder: Path) -> None:
    names = "membership", "ranks"
    with ExitStack() as stack:
        for name in names:
            store_server = stack.enter_context(StoreServer(folder / name))
            SocketStore(store_server.path).set("name", name)
            server.add_store(name, store_server.path)
        for name in names:
            with TunnelClient(LOOPBACK, server.port, TOKEN, name, folder / "client") as client:
                assert store_client(client).get("name").decode() == name


def test_a_client_waits_for_server_and_store(store: SocketStore, folder: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    servers: list[TunnelServer] = []
    store.set("a", "1")

    def start_late() -> None:
        time.sleep(0.3)
        servers.append(TunnelServer(LOOPBACK, port, TOKEN))
        time.sleep(0.3)
        servers[0].add_store("ranks", store.path)

    late = threading.Thread(target=start_late)
    late.start()
    with TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "client") as client:
        assert store_client(client).get("a") == b"1"
    late.join()
    servers[0].remove_store("ranks")
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: it does not serve the store 'ranks'"):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "client", timeout=0.5)
    assert servers[0].refused == 0
    servers[0].close()
    with pytest.raises(RendezvousError, match=r"within 0\.5 s: .*Connect call failed"):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "client", timeout=0.5)


def test_a_wrong_token_is_refused(
    server: TunnelServer, folder: Path, is_reached: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = new_token()
    for _ in range(5):
        with pytest.raises(RendezvousError, match="refused the token") as caught:
            TunnelClient(LOOPBACK, server.port, wrong, "ranks", folder / "client")
        assert "WEFT_TOKEN" in str(caught.value.fix)
        assert TOKEN not in str(caught.value)
        assert wrong not in str(caught.value)
    until(lambda: server.refused == 5)
    lines = [record.getMessage() for record in caplog.records if record.name == tunnel_module.__name__]
    where = f"refused a connection from {LOOPBACK} at {LOOPBACK}:{server.port}: wrong token"
    assert lines == [f"{where} (refusal {count})" for count in (1, 2, 4)]
    assert not is_reached()


@pytest.mark.parametrize("token", ["", "short", "ab" * 15, "no hexadecimal digits at all, but long enough"])
def test_weak_tokens_are_refused_by_server_and_client(token: str, folder: Path) -> None:
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        TunnelServer(LOOPBACK, 0, token)
    with pytest.raises(RendezvousError, match="hexadecimal digits"):
        TunnelClient(LOOPBACK, 1, token, "ranks", folder / "client")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "203.0.113.1"])
def test_a_server_listens_on_one_address(address: str) -> None:
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
def test_garbage_is_refused(garbage: bytes, server: TunnelServer, is_reached: Callable[[], bool]) -> None:
    with connect_to(server.port) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):  # refused while the rest was being sent
            connection.sendall(garbage)
        answer = receive_all(connection)
    is_reset = not answer and len(garbage) > REQUEST_BYTES  # which can also lose the answer
    assert is_reset or answer[: len(MAGIC)] == MAGIC
    assert answer[CHALLENGE_BYTES:] in (b"x", b"")  # the verdict is lost where unread bytes reset the connection
    until(lambda: server.refused == 1)
    assert not is_reached()


def test_a_torch_client_without_a_tunnel_is_refused(server: TunnelServer, is_reached: Callable[[], bool]) -> None:
    with pytest.raises(dist.DistError):
        dist.TCPStore(LOOPBACK, server.port, is_master=False, timeout=timedelta(seconds=1))
    until(lambda: server.refused > 0)
    assert not is_reached()


def test_a_connection_closed_without_a_proof_is_counted(server: TunnelServer, is_reached: Callable[[], bool]) -> None:
    connect_to(server.port).close()
    until(lambda: server.refused == 1)
    assert not is_reached()


def test_a_slow_client_is_refused(
    server: TunnelServer,
    is_reached: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tunnel_module, "HANDSHAKE_SECONDS", 0.5)
    with connect_to(server.port) as connection:
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012
            while time.monotonic() < start + 10:
                connection.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - start < 5
    assert server.refused == 1
    assert "no proof within 0.5 s" in caplog.text
    assert not is_reached()


@pytest.mark.must("fault: Thousands of strangers connect to the tunnel of host 0")
def test_unauthenticated_connections_do_not_displace_hosts(
    server: TunnelServer, store: SocketStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_module, "MAX_PENDING", 8)
    monkeypatch.setattr(tunnel_module, "HANDSHAKE_SECONDS", 60.0)
    store.set("a", "1")
    server.add_store("ranks", store.path)
    with TunnelClient(LOOPBACK, server.port, TOKEN, "ranks", folder / "client") as client:
        connected = store_client(client)
        assert connected.get("a") == b"1"
        unauthenticated = [connect_to(server.port) for _ in range(20)]
        until(lambda: server.refused == 12)  # the oldest
        assert all(len(receive_all(connection)) == CHALLENGE_BYTES for connection in unauthenticated[:12])
        assert connected.get("a") == b"1"
        assert store_client(client).get("a") == b"1"
        for connection in unauthenticated:
            connection.close()


def test_silent_connections_leave_most_file_descriptors_to_the_hosts_of_the_job(
    store: SocketStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with 1,024 file descriptors, as most systems give it, and strangers at many addresses."""
    monkeypatch.setattr(tunnel_module.resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(tunnel_module, "HANDSHAKE_SECONDS", 60.0)
    with TunnelServer(LOOPBACK, 0, TOKEN) as server:
        server.add_store("ranks", store.path)
        before = len(os.listdir("/proc/self/fd"))
        sources = [(f"127.0.0.{2 + index % 200}", 0) for index in range(400)]
        silent = [socket.create_connection((LOOPBACK, server.port), source_address=source) for source in sources]
        until(lambda: server.refused == 400 - 256)
        assert len(os.listdir("/proc/self/fd")) - before <= 400 + 256 + 8  # both ends are in this process
        with TunnelClient(LOOPBACK, server.port, TOKEN, "ranks", folder / "client") as client:
            assert store_client(client).set("a", "1") is None
        for connection in silent:
            connection.close()


def record_handshake(server: TunnelServer, folder: Path) -> dict[str, bytearray]:
    """Record one successful handshake: bytes sent by the client, and bytes sent by the server."""
    with proxy(server.port) as (port, kept):
        TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "client").close()
        until(lambda: len(kept["server"]) == CHALLENGE_BYTES + 1 + 32)
    return kept


def test_a_replayed_handshake_is_refused(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    server.add_store("ranks", store.path)
    kept = record_handshake(server, folder)
    assert len(kept["client"]) == REQUEST_BYTES
    with connect_to(server.port) as connection:
        connection.sendall(kept["client"])
        assert receive_all(connection)[CHALLENGE_BYTES:] == b"x"
    assert server.refused == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, b"+"),
        ({"token": new_token()}, b"x"),
        ({"label": b"server"}, b"x"),
        ({"server_nonce": bytes(32)}, b"x"),
        ({"client_nonce": bytes(32)}, b"x"),
        ({"name": b"membership".ljust(16, bytes(1))}, b"x"),
    ],
    ids=lambda change: "".join(change) if isinstance(change, dict) else "",
)
def test_a_proof_covers_the_whole_handshake(
    change: dict[str, bytes], verdict: bytes, server: TunnelServer, store: SocketStore
) -> None:
    server.add_store("ranks", store.path)
    with connect_to(server.port) as connection:
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sent = {"client_nonce": secrets.token_bytes(32), "name": b"ranks".ljust(16, bytes(1))}
        signed = {"token": TOKEN, "label": b"client", "server_nonce": challenge[len(MAGIC) :], **sent, **change}
        text = b"".join(signed[part] for part in ("label", "server_nonce", "client_nonce", "name"))
        proof = hmac.digest(signed["token"].encode(), text, "sha256")
        connection.sendall(sent["client_nonce"] + sent["name"] + proof)
        assert connection.recv(1) == verdict
    until(lambda: server.refused == (verdict == b"x"))


def test_the_token_is_never_sent(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    server.add_store("ranks", store.path)
    for sent in record_handshake(server, folder).values():
        assert bytes.fromhex(TOKEN) not in sent
        assert TOKEN.encode() not in sent.lower()


def false_server(answer: Callable[[socket.socket], None]) -> tuple[socket.socket, int]:
    """Listen like a tunnel server, and answer every connection with a function."""
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


def test_a_false_server_is_detected(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    server.add_store("ranks", store.path)
    kept = bytes(record_handshake(server, folder)["server"])

    def replay(connection: socket.socket) -> None:
        connection.sendall(kept)
        connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)

    def mirror(connection: socket.socket) -> None:
        """Send the proof of the client back as the proof of the server."""
        connection.sendall(MAGIC + bytes(32))
        connection.sendall(b"+" + connection.recv(REQUEST_BYTES, socket.MSG_WAITALL)[48:])

    def other(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.org ESMTP\r\n".ljust(44))

    for answer in (replay, mirror, other):
        listener, port = false_server(answer)
        with closing(listener), pytest.raises(RendezvousError, match="not the tunnel server of this job"):
            TunnelClient(LOOPBACK, port, TOKEN, "ranks", folder / "client")


def test_closing_the_server_closes_connections(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    store.set("a", "1")
    server.add_store("ranks", store.path)
    with TunnelClient(LOOPBACK, server.port, TOKEN, "ranks", folder / "client") as client:
        lasting = store_client(client)
        assert lasting.get("a") == b"1"
        server.close()
        server.close()
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
def test_hosts_join_under_a_flood_of_connections(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    """4,000 new connections per second from the address of the host itself: the hardest case."""
    store.set("a", "1")
    server.add_store("ranks", store.path)
    command = [sys.executable, "-c", FLOOD, str(server.port), "4000", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        until(lambda: server.refused > 1000)
        for index in range(5):
            begin = time.monotonic()
            with TunnelClient(LOOPBACK, server.port, TOKEN, "ranks", folder / f"client-{index}") as client:
                assert store_client(client).get("a") == b"1"
            assert time.monotonic() - begin < 5
        assert flood.poll() is None, "the flood ended before the hosts had joined"
        assert flood.stdout
        rate = float(flood.stdout.read())
    assert rate > 1000  # a busy machine does not reach 4,000


# On emulated hosts.


def serve_store(keepalive_timeout: float) -> None:
    """Host 0: serve a store through the tunnel, and print its path."""
    with scratch_folder() as folder, StoreServer(folder / "store") as server:
        tunnel_server = TunnelServer(
            interface_address("eth0"), 29400, read_token(), keepalive_timeout=keepalive_timeout
        )
        tunnel_server.add_store("ranks", server.path)
        print(server.path)
        threading.Event().wait()


def call_store(address: str, keepalive_timeout: float, count: int, pause: float) -> None:
    """Host 1: use the store some times, and print when."""
    endpoint = address, 29400, read_token(), "ranks", Path(mkdtemp(), "client")
    client = TunnelClient(*endpoint, timeout=5, keepalive_timeout=keepalive_timeout)
    store = SocketStore(client.path, timedelta(seconds=60))
    for index in range(count):
        start = time.monotonic()
        try:
            store.set(f"key-{index}", str(index))
            assert store.get(f"key-{index}") == str(index).encode()
        except dist.DistError as error:
            sys.exit(f"{type(error).__name__} after {time.monotonic() - start} s")
        print(index, time.monotonic())
        time.sleep(pause)


def launch_ranks(address: str, path: Path, first: int) -> None:
    """Launcher of a host: it has the token, and starts two ranks without the token."""
    if first:
        path = Path(mkdtemp(), "client")
        client = TunnelClient(address, 29400, read_token(), "ranks", path)
    environment = {name: value for name, value in os.environ.items() if name != "WEFT_TOKEN"} | {
        "WEFT_STORE": str(path),
        "WORLD_SIZE": "4",
        "GLOO_SOCKET_IFNAME": interface_of(interface_address("eth0")),
    }
    ranks = [
        start_function(["rank"], form_groups, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank - first)})
        for rank in (first, first + 1)
    ]
    ended = [completed(rank) for rank in ranks]
    if first:
        client.close()
    assert [rank.returncode for rank in ended] == [0, 0], ended


def form_groups() -> None:
    """Rank: sum over all ranks, and over two ranks of different hosts."""
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


def start(host: Host, function: Callable[..., None], *arguments: object, token: str = TOKEN) -> ForkedCommand:
    return host.fork([function.__name__], partial(function, *arguments), env=os.environ | {"WEFT_TOKEN": token})


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Host, Host, str]]:
    """Host 0 with tunnel server and store, host 1, and the path of the store on host 0."""
    with hosts(2) as (a, b):
        server = start(a, serve_store, 2.0)
        until(lambda: server.output.endswith("\n"))
        yield a, b, server.output.strip()


def connections(host: Host, state: str) -> list[tuple[str, int]]:
    """Local addresses and ports of the TCP sockets of a host in one state of /proc/net/tcp."""
    listed = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in listed.stdout.splitlines() if "local_address" not in line]
    return [(row[1].split(":")[0], int(row[1].split(":")[1], 16)) for row in rows if row[3] == state]


def test_the_store_is_reachable_only_through_the_tunnel(two_hosts: tuple[Host, Host, str]) -> None:
    a, b, path = two_hosts
    outside = socket.inet_aton(a.address)[::-1].hex().upper()
    assert connections(a, "0A") == [(outside, 29400)]  # nothing else listens
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    refused = start(b, call_store, a.address, 2.0, 1, 0.02, token=new_token())
    assert "refused the token" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 1
    admitted = start(b, call_store, a.address, 2.0, 1, 0.02)
    assert admitted.communicate(timeout=60)[0].startswith("0 ")


def test_ranks_of_two_hosts_form_process_groups(two_hosts: tuple[Host, Host, str]) -> None:
    a, b, path = two_hosts
    launchers = [start(host, launch_ranks, a.address, Path(path), first) for host, first in ((a, 0), (b, 2))]
    errors = [launcher.communicate(timeout=120)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors


def test_connections_survive_a_short_network_interruption(two_hosts: tuple[Host, Host, str]) -> None:
    a, b, _ = two_hosts
    caller = start(b, call_store, a.address, 5.0, 100, 0.02)
    until(lambda: bool(caller.output))
    b.unplug()
    down = time.monotonic()
    time.sleep(1)
    b.plug()
    printed, errors = caller.communicate()
    assert caller.returncode == 0, errors
    times = [float(line.split()[1]) for line in printed.splitlines()]
    assert len(times) == 100
    assert max(times) > down + 1
    assert not [moment for moment in times if down + 0.3 < moment < down + 1]


@pytest.mark.parametrize("pause", [0.02, 60], ids=["in a request", "idle"])
def test_connections_are_closed_after_a_long_network_interruption(
    pause: float, two_hosts: tuple[Host, Host, str]
) -> None:
    a, b, _ = two_hosts
    caller = start(b, call_store, a.address, 2.0, 10_000, pause)
    until(lambda: bool(caller.output))
    outside = socket.inet_aton(a.address)[::-1].hex().upper()
    assert outside in dict(connections(a, "01"))
    b.unplug()
    try:
        if pause < 1:
            assert "DistNetworkError after" in caller.communicate(timeout=20)[1]
        until(lambda: outside not in dict(connections(a, "01")), 20)  # the server
        until(lambda: not connections(b, "01"), 20)  # the client and its caller
    finally:
        caller.kill()
        b.plug()
