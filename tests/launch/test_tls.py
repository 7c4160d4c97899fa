"""TLS of the tunnel: nobody can read or change the data, or impersonate the client or the server."""

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
from tests.launch.test_tunnel import (
    CHALLENGE_BYTES,
    LOOPBACK,
    REQUEST_BYTES,
    TOKEN,
    connect_to,
    receive_all,
    store_client,
    until,
)
from weft.errors import RendezvousError
from weft.launch import tls
from weft.launch import tunnel as tunnel_module
from weft.launch.rendezvous import new_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore
from weft.launch.tunnel import MAGIC_TLS, TunnelClient, TunnelServer

KNOWN = "the quick brown fox jumps over the lazy dog"
OTHER_TOKEN = new_token()
NOT_THE_SERVER = "not the tunnel server of this job"


def start_server(stack: ExitStack, encrypt: bool, store: SocketStore) -> TunnelServer:
    server = stack.enter_context(TunnelServer(LOOPBACK, 0, TOKEN, encrypt=encrypt))
    server.add_store("ranks", store.path)
    return server


@pytest.fixture
def server(store: SocketStore) -> Iterator[TunnelServer]:
    with ExitStack() as stack:
        yield start_server(stack, True, store)


def client_of(port: int, folder: Path, name: str = "ranks", **options: bool | float) -> TunnelClient:
    return TunnelClient(
        LOOPBACK, port, TOKEN, name, folder / f"client-{name}", **{"encrypt": True, "timeout": 5.0} | options
    )


def test_a_store_is_used_through_tls(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    with client_of(server.port, folder) as client:
        first, second = store_client(client), store_client(client)
        first.set("a", "1")
        assert second.get("a") == b"1"
        first.set("large", "x" * 10_000_000)
        assert store.get("large") == second.get("large") == b"x" * 10_000_000
        waiter = threading.Thread(target=first.wait, args=(["late"],))
        waiter.start()
        second.set("late", "")
        waiter.join()
    assert server.refused == 0


def test_a_client_waits_for_the_store(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    opens = threading.Timer(0.5, server.add_store, ("late", store.path))
    opens.start()
    client_of(server.port, folder, "late").close()
    server.remove_store("late")
    with pytest.raises(RendezvousError, match="it does not serve the store 'late'"):
        client_of(server.port, folder, "late", timeout=0.5)
    assert server.refused == 0


@pytest.mark.parametrize("ends", ["server", "client"])
def test_closing_one_side_closes_connections_at_once(ends: str, server: TunnelServer, folder: Path) -> None:
    with client_of(server.port, folder) as client:
        remote_store = store_client(client)
        remote_store.set("a", "1")
        (server if ends == "server" else client).close()
        with pytest.raises(dist.DistNetworkError):
            remote_store.get("a")


@pytest.mark.must("fault: Somebody listens between the hosts")
@pytest.mark.parametrize("encrypt", [False, True])
def test_data_on_the_wire_is_encrypted(encrypt: bool, store: SocketStore, folder: Path) -> None:
    with ExitStack() as stack:
        server = start_server(stack, encrypt, store)
        port, kept = stack.enter_context(proxy(server.port))
        client = stack.enter_context(client_of(port, folder, encrypt=encrypt))
        store_client(client).set("fox", KNOWN)
        assert store_client(client).get("fox") == KNOWN.encode()
        for sent in kept.values():
            assert (KNOWN.encode() in sent) is not encrypt


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("sender", ["client", "server"])
def test_a_changed_byte_breaks_the_connection_and_never_the_data(
    sender: str, encrypt: bool, store: SocketStore, folder: Path
) -> None:
    def flip(sent_by: str, position: int, data: bytes) -> bytes:
        offset = 500_000 - position
        if sent_by == sender and 0 <= offset < len(data):
            data = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        return data

    value = b"x" * 1_000_000
    store.set("sent by the server", value)
    with ExitStack() as stack:
        server = start_server(stack, encrypt, store)
        port, _ = stack.enter_context(proxy(server.port, flip))
        remote_store = store_client(stack.enter_context(client_of(port, folder, encrypt=encrypt)))
        arrived = b""
        with pytest.raises(dist.DistNetworkError) if encrypt else nullcontext():
            if sender == "client":
                remote_store.set("sent by the client", value)
                arrived = store.get("sent by the client")
            else:
                arrived = remote_store.get("sent by the server")
        assert len(arrived) == (0 if encrypt else len(value))
        assert arrived != value
        assert store.check(["sent by the client"]) is (sender == "client" and not encrypt)


def request(operation: int, *fields: bytes) -> bytes:
    """Encoded request of a store client."""
    return bytes([operation]) + struct.pack(">I", len(fields)) + b"".join(struct.pack(">I", len(f)) + f for f in fields)


@pytest.mark.parametrize("encrypt", [False, True])
def test_bytes_inserted_after_the_proof_do_not_reach_the_store(encrypt: bool, store: SocketStore, folder: Path) -> None:
    def insert(sender: str, position: int, data: bytes) -> bytes:
        ends = sender == "client" and position + len(data) == REQUEST_BYTES
        return data + request(0, b"inserted", b"1") if ends else data

    with ExitStack() as stack:
        server = start_server(stack, encrypt, store)
        port, _ = stack.enter_context(proxy(server.port, insert))
        if encrypt:
            with pytest.raises(RendezvousError):
                client_of(port, folder, timeout=0.5)
            assert server.refused
            assert not store.check(["inserted"])
        else:
            stack.enter_context(client_of(port, folder, encrypt=False))
            until(lambda: store.check(["inserted"]))


def relay_proof(client: socket.socket, server: socket.socket) -> None:
    """Forward a valid proof of the client and the verdict of the server, as a man in the middle can."""
    client.sendall(server.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
    server.sendall(client.recv(REQUEST_BYTES, socket.MSG_WAITALL))
    client.sendall(server.recv(1, socket.MSG_WAITALL))


@pytest.mark.parametrize("has_certificate", [True, False])
def test_a_man_in_the_middle_is_refused_by_both_sides(
    has_certificate: bool, server: TunnelServer, folder: Path
) -> None:
    """The attacker forwards the proof, then uses TLS with a certificate of another token, or as a client without one."""
    received: list[bytes | str] = []
    as_server = tls.make_context(OTHER_TOKEN, server_side=True)
    as_server.verify_mode = ssl.CERT_NONE
    as_client = (
        tls.make_context(OTHER_TOKEN, server_side=False) if has_certificate else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    as_client.check_hostname, as_client.verify_mode = False, ssl.CERT_NONE

    def intercept(client: socket.socket) -> None:
        with connect_to(server.port) as upstream:
            relay_proof(client, upstream)
            try:
                with as_client.wrap_socket(upstream) as encrypted:
                    encrypted.sendall(request(0, b"inserted", b"1"))
                    received.append(encrypted.recv(100))
            except OSError as error:
                received.append(str(error))
            try:
                with as_server.wrap_socket(client, server_side=True) as encrypted:
                    received.append(encrypted.recv(100))
            except OSError as error:
                received.append(str(error))

    with answering(intercept) as port, pytest.raises(RendezvousError, match=NOT_THE_SERVER) as caught:
        client_of(port, folder)
    assert "certificate verify failed" in str(caught.value)
    until(lambda: len(received) == 2)
    assert not [data for data in received if isinstance(data, bytes) and data]
    assert server.refused == 1


def test_connections_of_two_clients_cannot_be_swapped(server: TunnelServer, store: SocketStore, folder: Path) -> None:
    """Two clients prove their token; then each is connected to the TLS connection of the other client."""
    waiting: dict[bytes, tuple[socket.socket, socket.socket]] = {}
    both = threading.Barrier(2)

    def swap(client: socket.socket) -> None:
        upstream = connect_to(server.port)
        relay_proof(client, upstream)
        index = both.wait()
        waiting[b"%d" % index] = client, upstream
        both.wait()
        other = waiting[b"%d" % (1 - index)][1]
        threading.Thread(target=forward, args=(client, other), daemon=True).start()
        forward(other, client)

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def fails(name: str) -> str:
        with pytest.raises(RendezvousError) as caught:
            client_of(port, folder, name)
        return str(caught.value)

    server.add_store("membership", store.path)
    with answering(swap) as port, ThreadPoolExecutor() as pool:
        assert all(NOT_THE_SERVER in error for error in pool.map(fails, ["membership", "ranks"]))
    assert store.num_keys() == 0


@pytest.mark.parametrize("here", [False, True])
def test_encryption_on_one_side_only_is_refused(here: bool, store: SocketStore, folder: Path) -> None:
    with ExitStack() as stack:
        server = start_server(stack, not here, store)
        with pytest.raises(RendezvousError) as caught:
            client_of(server.port, folder, encrypt=here)
        assert caught.value.what == (
            f"this host has cluster.encrypt = {str(here).lower()}, host 0 has {str(not here).lower()}"
        )
        assert caught.value.fix == "set cluster.encrypt to the same value on all hosts"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("here", [False, True])
def test_a_changed_magic_does_not_disable_encryption(
    here: bool, store: SocketStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A man in the middle changes the magic to what the client expects: neither side adopts the other's setting."""
    monkeypatch.setattr(tunnel_module, "HANDSHAKE_SECONDS", 0.5)

    def change_magic(sender: str, position: int, data: bytes) -> bytes:
        wanted = MAGIC_TLS if here else tunnel_module.MAGIC
        return wanted + data[len(wanted) :] if sender == "server" and position == 0 else data

    with ExitStack() as stack:
        server = start_server(stack, not here, store)
        port, _ = stack.enter_context(proxy(server.port, change_magic))
        with pytest.raises(RendezvousError):
            client_of(port, folder, encrypt=here, timeout=1.0)


def test_unauthenticated_clients_cost_no_tls_handshake(server: TunnelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    handshakes: list[object] = []
    monkeypatch.setattr(TunnelServer, "_accept_streams", lambda *arguments: handshakes.append(arguments))
    with connect_to(server.port) as connection:
        connection.sendall(bytes(REQUEST_BYTES))
        answer = receive_all(connection)
    assert answer[: len(MAGIC_TLS)] == MAGIC_TLS
    assert answer[CHALLENGE_BYTES:] == b"x"
    until(lambda: server.refused == 1)
    assert not handshakes


def test_an_authenticated_but_silent_client_is_refused(
    server: TunnelServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_module, "HANDSHAKE_SECONDS", 0.3)

    def stay_silent(client: socket.socket) -> None:
        with connect_to(server.port) as upstream:
            relay_proof(client, upstream)
            assert receive_all(upstream) == b""

    with answering(stay_silent) as port, pytest.raises(RendezvousError, match="host 0 could not be reached"):
        client_of(port, folder, timeout=0.5)
    until(lambda: server.refused > 0)


def test_the_certificate_is_a_function_of_the_token() -> None:
    token = "0123456789abcdef" * 4
    pem = tls.derive_identity(token, "launchers")
    assert pem == tls.derive_identity(token.upper(), "launchers")
    others = tls.derive_identity(new_token(), "launchers"), tls.derive_identity(token, "ranks")
    certificate, *other_certificates = (der(text) for text in (pem, *others))
    assert certificate not in other_certificates
    # Hosts with other versions of the libraries must derive the same certificate.
    assert hashlib.sha256(certificate).hexdigest() == "df9432fd21245b7cd29ff43a13eebea16b8e96f63921a744e23d1587116381bc"


def der(pem: bytes) -> bytes:
    text = pem.decode()
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :])


def test_the_key_file_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []

    @contextmanager
    def recording_scratch_folder() -> Iterator[Path]:
        with scratch_folder() as folder:
            yield folder
            used.extend(folder.iterdir())

    monkeypatch.setattr(tls, "scratch_folder", recording_scratch_folder)
    tls.make_context(TOKEN, server_side=True)
    assert "launchers.pem" in {path.name for path in used}
    assert not [path for path in used if path.exists()]


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_missing_cryptography_library_is_an_error(side: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(RendezvousError, match="cryptography is not installed") as caught:
        TunnelServer(LOOPBACK, 0, TOKEN, encrypt=True) if side == "server" else client_of(1, folder)
    assert 'pip install "weft-train[encrypt]"' in str(caught.value.fix)
    assert not list(folder.glob("client*"))


def test_gloo_without_tls_gets_no_key(folder: Path) -> None:
    variables = tls.gloo_variables(TOKEN, folder, "lo")
    assert bool(variables) is (folder / "ranks.pem").exists()


def test_gloo_with_tls_gets_its_own_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "PROBE", "import os; assert os.environ['GLOO_DEVICE_TRANSPORT'] == 'TCP_TLS'")
    variables = tls.gloo_variables(TOKEN, folder, "lo")
    assert variables.pop("GLOO_DEVICE_TRANSPORT") == "TCP_TLS"
    assert set(variables) == {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}" for name in ("PKEY", "CERT", "CA_FILE")}
    (file,) = set(variables.values())
    assert Path(file).read_bytes() == tls.derive_identity(TOKEN, "ranks")
    first, second = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
        for context in contexts:  # like the contexts of gloo
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.load_verify_locations(file)
            context.load_cert_chain(file)
        server = pool.submit(contexts[0].wrap_socket, first, server_side=True)
        with contexts[1].wrap_socket(second) as client_side, server.result() as server_side:
            client_side.sendall(b"a")
            assert server_side.recv(1) == b"a"
