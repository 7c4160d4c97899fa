"""Authenticated TCP tunnel to the stores of host 0.

A store (`store`) listens at a Unix socket that only its user can reach. For a multi-host job, a tunnel server runs on host 0,
and a tunnel client on each other host:

    server = TunnelServer("10.0.0.1", 29400, token)                              # on host 0
    server.add_store("ranks", path_of_the_store)
    client = TunnelClient("10.0.0.1", 29400, token, "ranks", folder / "ranks")   # on another host; the folder is private
    SocketStore(client.path)                                                     # used like a store of this host

For each connection, client and server prove to each other that they know the token of the job. After this handshake the tunnel
forwards bytes. The messages of the handshake have a fixed length, and nothing in them is evaluated:

    server to client   magic, nonce of the server
    client to server   nonce of the client, name of the store (padded with zeros), HMAC("client" + both nonces + name)
    server to client   verdict; a refused client gets no further message
    (both)             with `encrypt`: TLS handshake (`tls`); all following bytes are encrypted
    server to client   HMAC("server" + verdict + both nonces + name)

The token is never sent, and a recorded handshake cannot be replayed, because the nonces are new each time. The magic tells
whether the server encrypts; a client with another setting of `encrypt` gives up. TLS starts after the proof of the client, so
that an unauthenticated client costs no TLS handshake. The TLS handshake ends before the proof of the server, which binds the
encrypted connection to this handshake: an attacker cannot connect the client of one store to the connection of another store.

Without `encrypt`, the bytes after the handshake are neither encrypted nor authenticated: the tunnel keeps out clients without
the token, but not an attacker who can read or change packets between the hosts. The connections of gloo and NCCL between ranks
do not use the tunnel.

A flood of connections cannot keep the hosts of the job out. An unauthenticated connection needs no task and no thread. The
number of unauthenticated connections is limited, both per address and in total, to a quarter of the file descriptors of this
process: the others are for the hosts of the job. At a limit, a new connection evicts the oldest one of the same address, or the
oldest one of the address with the most connections. A handshake takes milliseconds, so that a host of the job is not evicted.
"""

import asyncio
import hmac
import logging
import resource
import secrets
import socket
import ssl
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import RendezvousError
from weft.launch.rendezvous import TOKEN_VARIABLE, listen, token_key
from weft.launch.store import BACKLOG, listen_at
from weft.launch.tcp_proxy import Streams, TcpProxy, connect_unix, forward, set_keepalive
from weft.launch.tls import SERVER_NAME, make_context

LOOPBACK = "127.0.0.1"
MAGIC, MAGIC_TLS = b"weft-tcp-001", b"weft-tls-001"
NONCE_BYTES, NAME_BYTES, PROOF_BYTES = 32, 16, 32
FOUND, ABSENT, REFUSED = b"+", b"-", b"x"  # verdicts
REQUEST_BYTES = NONCE_BYTES + NAME_BYTES + PROOF_BYTES
HANDSHAKE_SECONDS = 5.0
MAX_PENDING, MAX_PENDING_PER_ADDRESS = 1024, 256  # unauthenticated connections
ACCEPT_BATCH = 64  # connections accepted before pending connections are read again
SWEEP_SECONDS = 0.25
MAX_COUNTED_ADDRESSES = 4096  # addresses with their own count of refusals
KEEPALIVE_TIMEOUT = 20.0
SEGMENT_BYTES = 536  # of TCP, which every path of IPv4 carries (RFC 879)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _PendingClient:
    """Connection of a client that has not authenticated yet."""

    connection: socket.socket
    address: str
    nonce: bytes
    """Nonce of the server for this connection."""
    accepted_at: float
    received: bytes = b""


class TunnelServer(TcpProxy):
    """Tunnel server: listens at one address of host 0 and connects authenticated clients to the stores of this host.

    `refused` counts the refused connections. The log names their addresses, at a decreasing rate for each address.

    Args:
        address: IPv4 address of one interface of this host.
        port: port to listen at; with 0 the system chooses one, see the attribute `port`.
        token: token of the job; see `weft.launch.rendezvous.read_token`.
        encrypt: use TLS 1.3 for all connections; clients must have the same setting.
        keepalive_timeout: seconds without an answer of the other host after which a connection is closed. Uses
            TCP_USER_TIMEOUT and keepalive probes, so that an idle connection to a lost host is closed too.

    Raises:
        RendezvousError: the address means every interface or belongs to another host, the port is in use, or TLS needs a
            library that is not installed.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        encrypt: bool = False,
        keepalive_timeout: float = KEEPALIVE_TIMEOUT,
    ):
        self.refused = 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._descriptors = 2**20 if limit == resource.RLIM_INFINITY else limit
        self._key = token_key(token, "token of the tunnel server")
        self._tls = make_context(token, server_side=True) if encrypt else None
        self._magic = MAGIC_TLS if encrypt else MAGIC
        self._stores: dict[bytes, Path] = {}
        self._pending: dict[str, dict[_PendingClient, None]] = {}  # by address, in order of arrival
        self._refusals: Counter[str] = Counter()  # by address
        listener = listen(address, port)
        # Messages between launchers are short. Where a switch drops long packets, launchers can still report the failure.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        self.address, self.port = listener.getsockname()
        self._keepalive_timeout = keepalive_timeout
        super().__init__(listener)

    def add_store(self, name: str, path: Path) -> None:
        """Accept clients for a store of this host, which listens at the Unix socket `path`."""
        self._stores[_padded(name)] = path

    def remove_store(self, name: str) -> None:
        """Accept no more clients for a store. Existing connections stay open."""
        del self._stores[_padded(name)]

    async def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._accept, listener)
        self._start(self._refuse_slow_clients())

    def _accept(self, listener: socket.socket) -> None:
        """Accept new connections and send them the magic and a nonce. Creates no task, so that a flood is cheap."""
        for _ in range(ACCEPT_BATCH):
            try:
                connection, (address, _) = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # this process has no file descriptor left
                self._evict_oldest(self._busiest_address())
                return
            client = _PendingClient(connection, address, secrets.token_bytes(NONCE_BYTES), time.monotonic())
            connection.setblocking(False)
            self._pending.setdefault(address, {})[client] = None
            self._loop.add_reader(connection, self._receive, client)
            if len(self._pending[address]) > MAX_PENDING_PER_ADDRESS:
                self._evict_oldest(address)
            elif sum(map(len, self._pending.values())) > min(MAX_PENDING, self._descriptors // 4):
                self._evict_oldest(self._busiest_address())
            try:
                connection.send(self._magic + client.nonce)  # fits into any socket buffer
            except OSError:
                self._refuse(client, "closed without a proof")

    def _busiest_address(self) -> str | None:
        """Address with the most pending connections."""
        return max(self._pending, key=lambda address: len(self._pending[address]), default=None)

    def _evict_oldest(self, address: str | None) -> None:
        if address is not None:
            self._refuse(next(iter(self._pending[address])), "evicted by newer connections")

    def _receive(self, client: _PendingClient) -> None:
        """Read from a pending connection; check its proof when the request is complete."""
        try:
            data = client.connection.recv(REQUEST_BYTES - len(client.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._refuse(client, "closed without a proof")
        client.received += data
        if len(client.received) < REQUEST_BYTES:
            return
        request, proof = client.received[:-PROOF_BYTES], client.received[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"client" + client.nonce + request)):
            return self._refuse(client, "wrong token", REFUSED)
        self._remove_pending(client)
        self._start(self._serve(client, request))

    def _refuse(self, client: _PendingClient, reason: str, verdict: bytes = b"") -> None:
        if client in self._pending.get(client.address, ()):
            self._remove_pending(client)
            self._count_refusal(client.address, reason)
            with suppress(OSError):
                client.connection.send(verdict)
            client.connection.close()

    def _remove_pending(self, client: _PendingClient) -> None:
        self._loop.remove_reader(client.connection)
        of_address = self._pending[client.address]
        del of_address[client]
        if not of_address:
            del self._pending[client.address]

    async def _refuse_slow_clients(self) -> None:
        try:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                before = time.monotonic() - HANDSHAKE_SECONDS
                for clients in list(self._pending.values()):
                    for client in [client for client in clients if client.accepted_at < before]:
                        self._refuse(client, f"no proof within {HANDSHAKE_SECONDS:g} s")
        finally:
            for clients in self._pending.values():
                for client in clients:
                    client.connection.close()

    async def _serve(self, client: _PendingClient, request: bytes) -> None:
        """Connect an authenticated client to the store that it requests, if that store exists."""
        try:
            store = await connect_unix(self._stores[request[NONCE_BYTES:]])
        except (KeyError, OSError):
            store = None
        verdict = ABSENT if store is None else FOUND
        try:
            set_keepalive(client.connection, self._keepalive_timeout)
            client.connection.send(verdict)  # fits into any socket buffer
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                streams = await self._accept_streams(client.connection)
        except OSError as error:  # includes TimeoutError and SSLError
            client.connection.close()
            if store is not None:
                store[1].close()
            return self._count_refusal(client.address, f"no connection after its proof: {error or 'no answer'}")
        streams[1].write(_proof(self._key, b"server" + verdict + client.nonce + request))
        if store is None:
            streams[1].close()
        else:
            await forward(streams, store)

    async def _accept_streams(self, connection: socket.socket) -> Streams:
        """Streams of an accepted connection, after the TLS handshake if any. asyncio has such a function only for clients."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    def _count_refusal(self, peer: str, reason: str) -> None:
        self.refused += 1
        if len(self._refusals) >= MAX_COUNTED_ADDRESSES:
            self._refusals.clear()
        self._refusals[peer] += 1
        count = self._refusals[peer]
        if count & (count - 1) == 0:  # 1, 2, 4, 8 ...: the log cannot be flooded
            log.warning(
                "refused a connection from %s at %s:%d: %s (refusal %d)", peer, self.address, self.port, reason, count
            )


class TunnelClient(TcpProxy):
    """Tunnel client: listens at a Unix socket of this host, and forwards each connection to one store of host 0.

    The constructor waits until the server is up and has the store, and until one handshake has succeeded.

    Args:
        address, port: endpoint of the server.
        token: token of the job, as on the server.
        name: name of the store on the server.
        path: path of the Unix socket to create, in a folder that only this user can enter.
        timeout: seconds to wait for the server and the store, in the constructor and for every later connection.
        encrypt: use TLS 1.3, as on the server.
        keepalive_timeout: as for `TunnelServer`. Connections survive a shorter interruption of the network. A longer one closes
            the connections on both hosts, and their users get an error.

    Raises:
        RendezvousError: the token or `encrypt` differs from the server, another program listens at the address, the server
            could not be reached within `timeout`, or TLS needs a library that is not installed.
        OSError: the Unix socket cannot be created.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        name: str,
        path: Path,
        *,
        timeout: float = 60.0,
        encrypt: bool = False,
        keepalive_timeout: float = KEEPALIVE_TIMEOUT,
    ):
        self._server, self._timeout, self.path = (address, port), timeout, path
        self._key, self._name = token_key(token, "token of the tunnel client"), _padded(name)
        self._tls = make_context(token, server_side=False) if encrypt else None
        self._keepalive_timeout = keepalive_timeout
        super().__init__(listen_at(path))
        try:
            asyncio.run_coroutine_threadsafe(self._check_connection(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the tunnel and remove the Unix socket."""
        super().close()
        self.path.unlink(missing_ok=True)

    async def _check_connection(self) -> None:
        (await self._connect())[1].close()

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_unix_server(
            lambda reader, writer: self._start(self._serve(reader, writer)), sock=listener, backlog=BACKLOG
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await self._connect()
        except RendezvousError as error:
            log.warning("%s", error)
            writer.close()
        else:
            await forward((reader, writer), server)

    async def _connect(self) -> Streams:
        """Connect to the store. Retries until the timeout, because the network or the server may not be up yet."""
        endpoint = "{}:{}".format(*self._server)
        end, pause = self._loop.time() + self._timeout, 0.05
        while True:
            try:
                async with asyncio.timeout(min(HANDSHAKE_SECONDS, max(0.1, end - self._loop.time()))):
                    return await self._try_connect(endpoint)
            except (OSError, EOFError) as error:  # OSError includes TimeoutError
                if self._loop.time() + pause > end:
                    raise RendezvousError(
                        f"host 0 could not be reached within {self._timeout:g} s: {error or 'no answer'}",
                        where=endpoint,
                        rule="host 0 listens at this address and serves the store",
                        fix="start host 0; check the address, the port and the firewall",
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _try_connect(self, endpoint: str) -> Streams:
        """Try once to connect to the store.

        Raises:
            OSError, EOFError: the attempt failed; a later one may succeed.
            RendezvousError: no attempt can succeed.
        """
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, self._server)
            set_keepalive(connection, self._keepalive_timeout)
            nonce, request, verdict = await self._prove_token(connection, endpoint)
        except BaseException:
            connection.close()
            raise
        try:
            name = SERVER_NAME if self._tls else None
            reader, writer = await asyncio.open_connection(sock=connection, ssl=self._tls, server_hostname=name)
        except ssl.SSLError as error:
            raise _wrong_server(endpoint, error) from None
        try:
            proof = await reader.readexactly(PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(self._key, b"server" + verdict + nonce + request)):
                raise _wrong_server(endpoint)
            if verdict != FOUND:
                raise ConnectionRefusedError(f"it does not serve the store {self._name.rstrip(bytes(1)).decode()!r}")
            return reader, writer
        except ssl.SSLError as error:  # in TLS 1.3 a server refuses a client's certificate after the client's handshake
            writer.close()
            raise _wrong_server(endpoint, error) from None
        except BaseException:
            writer.close()
            raise

    async def _prove_token(self, connection: socket.socket, endpoint: str) -> tuple[bytes, bytes, bytes]:
        """Send the proof of the client; returns the server's nonce, the client's request and the server's verdict."""
        magic = await self._receive(connection, len(MAGIC))
        if magic != (MAGIC_TLS if self._tls else MAGIC):
            if magic in (MAGIC, MAGIC_TLS):
                raise _encryption_mismatch(endpoint, self._tls is not None)
            raise _wrong_server(endpoint)
        nonce = await self._receive(connection, NONCE_BYTES)
        request = secrets.token_bytes(NONCE_BYTES) + self._name
        await self._loop.sock_sendall(connection, request + _proof(self._key, b"client" + nonce + request))
        verdict = await self._receive(connection, 1)
        if verdict == REFUSED:
            raise RendezvousError(
                "host 0 refused the token of this host",
                where=endpoint,
                rule="all hosts of a job have the same token",
                fix=f"give every host the same {TOKEN_VARIABLE} or token file",
            )
        return nonce, request, verdict

    async def _receive(self, connection: socket.socket, count: int) -> bytes:
        """Receive exactly `count` bytes: the following bytes may belong to TLS.

        Raises:
            EOFError: the connection ended before.
        """
        data = b""
        while len(data) < count:
            if not (part := await self._loop.sock_recv(connection, count - len(data))):
                raise EOFError("the server closed the connection")
            data += part
        return data


def _padded(name: str) -> bytes:
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"the name of a store has at most {NAME_BYTES} bytes: {name!r}")
    return name.encode().ljust(NAME_BYTES, b"\0")


def _proof(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _wrong_server(endpoint: str, error: ssl.SSLError | None = None) -> RendezvousError:
    return RendezvousError(
        "the server at this address is not the tunnel server of this job" + (f": {error}" if error else ""),
        where=endpoint,
        rule="the tunnel server proves that it knows the token",
        fix="check the address and port of host 0",
    )


def _encryption_mismatch(endpoint: str, encrypt: bool) -> RendezvousError:
    return RendezvousError(
        f"this host has cluster.encrypt = {str(encrypt).lower()}, host 0 has {str(not encrypt).lower()}",
        where=endpoint,
        rule="all hosts of a job have the same setting of cluster.encrypt",
        fix="set cluster.encrypt to the same value on all hosts",
    )
