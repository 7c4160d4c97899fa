"""TLS between door and gate: nobody reads what passes, changes it, or takes the place of either side."""

import hashlib
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.lab.proxy import answering, proxy
from tests.launch.test_tunnel import CHALLENGE_BYTES, LOOPBACK, REQUEST_BYTES, TOKEN, call, client, everything, until
from weft.errors import RendezvousError
from weft.launch import tls
from weft.launch import tunnel as gate_module
from weft.launch.rendezvous import new_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreServer
from weft.launch.tunnel import MAGIC_TLS, TunnelClient, TunnelServer

KNOWN = "the quick brown fox jumps over the lazy dog"
STRANGER = new_token()
NOT_THE_GATE = "not the gate of this job"


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture
def store(folder: Path) -> Iterator[SocketStore]:
    """The store "ranks" of host 0."""
    with StoreServer(folder / "store"):
        yield SocketStore(folder / "store")


def open_gate(stack: ExitStack, encrypt: bool, store: SocketStore) -> TunnelServer:
    gate = stack.enter_context(TunnelServer(LOOPBACK, 0, TOKEN, encrypt=encrypt))
    gate.open("ranks", store.path)
    return gate


@pytest.fixture
def gate(store: SocketStore) -> Iterator[TunnelServer]:
    with ExitStack() as stack:
        yield open_gate(stack, True, store)


def door_to(port: int, folder: Path, name: str = "ranks", **options: bool | float) -> TunnelClient:
    return TunnelClient(
        LOOPBACK, port, TOKEN, name, folder / f"door-{name}", **{"encrypt": True, "timeout": 5.0} | options
    )


def test_a_store_is_used_through_tls(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    with door_to(gate.port, folder) as door:
        ours, other = client(door), client(door)
        ours.set("a", "1")
        assert other.get("a") == b"1"
        ours.set("large", "x" * 10_000_000)
        assert store.get("large") == other.get("large") == b"x" * 10_000_000
        waiter = threading.Thread(target=ours.wait, args=(["late"],))
        waiter.start()
        other.set("late", "")
        waiter.join()
    assert gate.refused == 0


def test_a_door_waits_until_the_store_is_open(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    opens = threading.Timer(0.5, gate.open, ("late", store.path))
    opens.start()
    door_to(gate.port, folder, "late").close()
    gate.shut("late")
    with pytest.raises(RendezvousError, match="the store 'late' is not open there"):
        door_to(gate.port, folder, "late", timeout=0.5)
    assert gate.refused == 0


@pytest.mark.parametrize("ends", ["gate", "door"])
def test_the_end_of_one_side_ends_connections_at_once(ends: str, gate: TunnelServer, folder: Path) -> None:
    with door_to(gate.port, folder) as door:
        ours = client(door)
        ours.set("a", "1")
        (gate if ends == "gate" else door).close()
        with pytest.raises(dist.DistNetworkError):
            ours.get("a")


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_seen_on_the_wire(encrypt: bool, store: SocketStore, folder: Path) -> None:
    with ExitStack() as stack:
        gate = open_gate(stack, encrypt, store)
        port, kept = stack.enter_context(proxy(gate.port))
        door = stack.enter_context(door_to(port, folder, encrypt=encrypt))
        client(door).set("fox", KNOWN)
        assert client(door).get("fox") == KNOWN.encode()
        for sent in kept.values():
            assert (KNOWN.encode() in sent) is not encrypt


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("sender", ["door", "gate"])
def test_a_changed_byte_breaks_the_connection_and_never_the_data(
    sender: str, encrypt: bool, store: SocketStore, folder: Path
) -> None:
    def flip(sent_by: str, position: int, data: bytes) -> bytes:
        place = 500_000 - position
        if sent_by == sender and 0 <= place < len(data):
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    value = b"x" * 1_000_000
    store.set("sent by the gate", value)
    with ExitStack() as stack:
        gate = open_gate(stack, encrypt, store)
        port, _ = stack.enter_context(proxy(gate.port, flip))
        ours = client(stack.enter_context(door_to(port, folder, encrypt=encrypt)))
        arrived = b""
        with pytest.raises(dist.DistNetworkError) if encrypt else nullcontext():
            if sender == "door":
                ours.set("sent by the door", value)
                arrived = store.get("sent by the door")
            else:
                arrived = ours.get("sent by the gate")
        assert len(arrived) == (0 if encrypt else len(value))
        assert arrived != value
        assert store.check(["sent by the door"]) is (sender == "door" and not encrypt)


def request(kind: int, *fields: bytes) -> bytes:
    """A request as the store's clients send it."""
    return bytes([kind]) + struct.pack(">I", len(fields)) + b"".join(struct.pack(">I", len(f)) + f for f in fields)


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_inserted_after_the_proof_does_not_reach_the_store(
    encrypt: bool, store: SocketStore, folder: Path
) -> None:
    def insert(sender: str, position: int, data: bytes) -> bytes:
        ends = sender == "door" and position + len(data) == REQUEST_BYTES
        return data + request(0, b"inserted", b"1") if ends else data

    with ExitStack() as stack:
        gate = open_gate(stack, encrypt, store)
        port, _ = stack.enter_context(proxy(gate.port, insert))
        if encrypt:
            with pytest.raises(RendezvousError):
                door_to(port, folder, timeout=0.5)
            assert gate.refused
            assert not store.check(["inserted"])
        else:
            stack.enter_context(door_to(port, folder, encrypt=False))
            until(lambda: store.check(["inserted"]))


def relay_proof(door: socket.socket, gate: socket.socket) -> None:
    """Pass on a true proof of the door and the verdict of the gate, as somebody between them can."""
    door.sendall(gate.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
    gate.sendall(door.recv(REQUEST_BYTES, socket.MSG_WAITALL))
    door.sendall(gate.recv(1, socket.MSG_WAITALL))


@pytest.mark.parametrize("has_certificate", [True, False])
def test_a_man_in_the_middle_is_refused_on_both_sides(has_certificate: bool, gate: TunnelServer, folder: Path) -> None:
    """He has relayed the proof, and speaks TLS with a certificate of another token, or as a client with none."""
    heard: list[bytes | str] = []
    as_gate = tls.make_context(STRANGER, server_side=True)
    as_gate.verify_mode = ssl.CERT_NONE
    as_door = (
        tls.make_context(STRANGER, server_side=False) if has_certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    as_door.check_hostname, as_door.verify_mode = False, ssl.CERT_NONE

    def intercept(door: socket.socket) -> None:
        with call(gate.port) as there:
            relay_proof(door, there)
            try:
                with as_door.wrap_socket(there) as encrypted:
                    encrypted.sendall(request(0, b"inserted", b"1"))
                    heard.append(encrypted.recv(100))
            except OSError as error:
                heard.append(str(error))
            try:
                with as_gate.wrap_socket(door, server_side=True) as encrypted:
                    heard.append(encrypted.recv(100))
            except OSError as error:
                heard.append(str(error))

    with answering(intercept) as port, pytest.raises(RendezvousError, match=NOT_THE_GATE) as caught:
        door_to(port, folder)
    assert "certificate verify failed" in str(caught.value)
    until(lambda: len(heard) == 2)
    assert not [said for said in heard if isinstance(said, bytes) and said]
    assert gate.refused == 1


def test_connections_cannot_be_exchanged(gate: TunnelServer, store: SocketStore, folder: Path) -> None:
    """The doors of two stores prove themselves; then each is led to the connection of the other, whose TLS is true."""
    waiting: dict[bytes, tuple[socket.socket, socket.socket]] = {}
    both = threading.Barrier(2)

    def exchange(door: socket.socket) -> None:
        there = call(gate.port)
        relay_proof(door, there)
        number = both.wait()
        waiting[b"%d" % number] = door, there
        both.wait()
        other = waiting[b"%d" % (1 - number)][1]
        threading.Thread(target=pump, args=(door, other), daemon=True).start()
        pump(other, door)

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def fails(name: str) -> str:
        with pytest.raises(RendezvousError) as caught:
            door_to(port, folder, name)
        return str(caught.value)

    gate.open("board", store.path)
    with answering(exchange) as port, ThreadPoolExecutor() as pool:
        assert all(NOT_THE_GATE in error for error in pool.map(fails, ["board", "ranks"]))
    assert store.num_keys() == 0


@pytest.mark.parametrize("here", [False, True])
def test_encryption_on_one_side_only_is_refused(here: bool, store: SocketStore, folder: Path) -> None:
    with ExitStack() as stack:
        gate = open_gate(stack, not here, store)
        with pytest.raises(RendezvousError) as caught:
            door_to(gate.port, folder, encrypt=here)
        assert caught.value.what == (
            f"this host has cluster.encrypt = {str(here).lower()}, host 0 has {str(not here).lower()}"
        )
        assert caught.value.fix == "set cluster.encrypt to the same on all hosts"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("here", [False, True])
def test_a_changed_greeting_does_not_switch_encryption_off(
    here: bool, store: SocketStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody in between makes the gate's greeting fit the door: neither side goes on in the way of the other."""
    monkeypatch.setattr(gate_module, "HANDSHAKE_SECONDS", 0.5)

    def greet(sender: str, position: int, data: bytes) -> bytes:
        wanted = MAGIC_TLS if here else gate_module.MAGIC
        return wanted + data[len(wanted) :] if sender == "gate" and position == 0 else data

    with ExitStack() as stack:
        gate = open_gate(stack, not here, store)
        port, _ = stack.enter_context(proxy(gate.port, greet))
        with pytest.raises(RendezvousError):
            door_to(port, folder, encrypt=here, timeout=1.0)


def test_strangers_cost_no_handshake(gate: TunnelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    handshakes: list[object] = []
    monkeypatch.setattr(TunnelServer, "_accept_streams", lambda *arguments: handshakes.append(arguments))
    with call(gate.port) as connection:
        connection.sendall(bytes(REQUEST_BYTES))
        answer = everything(connection)
    assert answer[: len(MAGIC_TLS)] == MAGIC_TLS
    assert answer[CHALLENGE_BYTES:] == b"x"
    until(lambda: gate.refused == 1)
    assert not handshakes


def test_who_has_proved_himself_and_is_silent_is_sent_away(
    gate: TunnelServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "HANDSHAKE_SECONDS", 0.3)

    def stay_silent(door: socket.socket) -> None:
        with call(gate.port) as there:
            relay_proof(door, there)
            assert everything(there) == b""

    with answering(stay_silent) as port, pytest.raises(RendezvousError, match="no way to host 0"):
        door_to(port, folder, timeout=0.5)
    until(lambda: gate.refused > 0)


def test_the_certificate_follows_from_the_token() -> None:
    token = "0123456789abcdef" * 4
    pem = tls.derive_identity(token, "launchers")
    assert pem == tls.derive_identity(token.upper(), "launchers")
    others = tls.derive_identity(new_token(), "launchers"), tls.derive_identity(token, "ranks")
    certificate, *other_certificates = (der(text) for text in (pem, *others))
    assert certificate not in other_certificates
    # Hosts may have other versions of Weft's libraries, and must derive the same certificate.
    assert hashlib.sha256(certificate).hexdigest() == "df9432fd21245b7cd29ff43a13eebea16b8e96f63921a744e23d1587116381bc"


def der(pem: bytes) -> bytes:
    text = pem.decode()
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :])


def test_the_key_does_not_stay_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []

    @contextmanager
    def noted_folder() -> Iterator[Path]:
        with scratch_folder() as folder:
            yield folder
            used.extend(folder.iterdir())

    monkeypatch.setattr(tls, "scratch_folder", noted_folder)
    tls.make_context(TOKEN, server_side=True)
    assert "launchers.pem" in {path.name for path in used}
    assert not [path for path in used if path.exists()]


@pytest.mark.parametrize("side", ["gate", "door"])
def test_a_missing_library_is_named(side: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(RendezvousError, match="cryptography is not installed") as caught:
        TunnelServer(LOOPBACK, 0, TOKEN, encrypt=True) if side == "gate" else door_to(1, folder)
    assert 'pip install "weft-train[encrypt]"' in str(caught.value.fix)
    assert not list(folder.glob("door*"))


def test_gloo_gets_no_key_where_it_has_no_tls(folder: Path) -> None:
    variables = tls.gloo_variables(TOKEN, folder, "lo")
    assert bool(variables) is (folder / "ranks.pem").exists()


def test_gloo_with_tls_gets_a_key_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "PROBE", "import os; assert os.environ['GLOO_DEVICE_TRANSPORT'] == 'TCP_TLS'")
    variables = tls.gloo_variables(TOKEN, folder, "lo")
    assert variables.pop("GLOO_DEVICE_TRANSPORT") == "TCP_TLS"
    assert set(variables) == {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}" for name in ("PKEY", "CERT", "CA_FILE")}
    (file,) = set(variables.values())
    assert Path(file).read_bytes() == tls.derive_identity(TOKEN, "ranks")
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
        for context in contexts:  # as gloo makes them
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.load_verify_locations(file)
            context.load_cert_chain(file)
        server = pool.submit(contexts[0].wrap_socket, ours, server_side=True)
        with contexts[1].wrap_socket(theirs) as client_side, server.result() as server_side:
            client_side.sendall(b"a")
            assert server_side.recv(1) == b"a"
