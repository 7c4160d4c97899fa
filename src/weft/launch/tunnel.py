"""Bring a store of host 0 within reach of the other hosts of a job, and of nobody else.

A store (`store`) listens at a Unix socket that only this user can reach, and between hosts stand a gate on host 0 and a door
on each other host:

    gate = TunnelServer("10.0.0.1", 29400, token)                           # on host 0
    gate.open("ranks", path_of_the_store)
    door = TunnelClient("10.0.0.1", 29400, token, "ranks", folder / "ranks")  # on another host; the folder is private
    SocketStore(door.path)                                          # there: as if the store were on this host

For each connection anew, door and gate prove to each other that they know the token of the job; then bytes are passed on.
Messages of the proof have a fixed length, and nothing in them is evaluated:

    gate to door   magic, nonce of the gate
    door to gate   nonce of the door, name of the store (zeros behind), HMAC("door" + both nonces + name)
    gate to door   verdict; who is refused gets no more
    (both)         with `encrypt`: TLS handshake (`tls`); all that follows is encrypted
    gate to door   HMAC("gate" + verdict + both nonces + name)

The token never travels, and a recorded conversation is worth nothing, since nonces are new each time. The magic says whether
the gate encrypts, and a door that does otherwise gives up. TLS begins after the proof of the door, so that a stranger never
costs a handshake. It ends before the proof of the gate, which ties the encrypted connection to this conversation: nobody can
lead the door of one store to the connection of another.

Without `encrypt`, what follows the proof is neither encrypted nor signed: the gate keeps out strangers who reach the port, not
somebody who can read or change packets between the hosts. Connections of gloo and NCCL between ranks do not pass the gate.

Strangers cannot keep others out by their number either. Until it has proved itself a connection costs no task and no thread,
and of each address only so many are kept: one more pushes out the oldest of that address, and where there are too many in all,
the oldest of the address that has most. A proof takes milliseconds, so that those of the job's hosts are not among the oldest.
"""

import asyncio
import hmac
import logging
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
from weft.launch.tcp_proxy import Streams, TcpProxy, pass_on, watch
from weft.launch.tls import SERVER_NAME, make_context

LOOPBACK = "127.0.0.1"
MAGIC, MAGIC_TLS = b"weft-gate-01", b"weft-gate-s1"
NONCE_BYTES, NAME_BYTES, PROOF_BYTES = 32, 16, 32
FOUND, ABSENT, REFUSED = b"+", b"-", b"x"  # verdicts
REQUEST_BYTES = NONCE_BYTES + NAME_BYTES + PROOF_BYTES
HANDSHAKE_SECONDS = 5.0
MAX_PENDING, MAX_PENDING_OF_ONE = 1024, 256  # proofs under way: of all addresses, and of one
ACCEPTED_AT_ONCE = 64  # before those who wait are heard again
SWEEP_SECONDS = 0.25
MAX_STRANGERS = 4096  # addresses whose refusals are counted one by one
SILENCE_SECONDS = 20.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Visitor:
    """Somebody at the gate who has not proved anything yet."""

    connection: socket.socket
    address: str
    nonce: bytes
    """The gate's nonce for this visitor."""
    came: float
    said: bytes = b""


class TunnelServer(TcpProxy):
    """Listens on one address of host 0 and lets those who know the token reach the stores that are open.

    Each refused connection is counted in `refused`; the log says who it was, less and less often for the same address.

    Args:
        address: IPv4 address of one interface of this host.
        port: 0 takes a free one; `port` tells which.
        token: of `weft.launch.rendezvous.read_token`.
        encrypt: TLS 1.3 for all connections; doors must do the same.
        silence_seconds: a connection whose other host does not answer for that long is ended (TCP_USER_TIMEOUT and
            keepalive probes, so an idle connection to a host that is gone ends too).

    Raises:
        RendezvousError: the address stands for every interface, is not of this host, or its port is taken; or TLS needs a
            library that is not installed.
    """

    def __init__(
        self, address: str, port: int, token: str, *, encrypt: bool = False, silence_seconds: float = SILENCE_SECONDS
    ):
        self.refused = 0
        self._key = token_key(token, "the token of the gate")
        self._tls = make_context(token, server_side=True) if encrypt else None
        self._magic = MAGIC_TLS if encrypt else MAGIC
        self._stores: dict[bytes, Path] = {}
        self._pending: dict[str, dict[_Visitor, None]] = {}  # by address, in order of arrival
        self._strangers: Counter[str] = Counter()
        listener = listen(address, port)
        self.address, self.port = listener.getsockname()
        super().__init__(listener, silence_seconds)

    def open(self, name: str, path: Path) -> None:
        """Lead doors with this name to the Unix socket of a store on this host."""
        self._stores[_padded(name)] = path

    def shut(self, name: str) -> None:
        """Lead nobody there any more. Connections that stand go on."""
        del self._stores[_padded(name)]

    async def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._accept, listener)
        self._start(self._send_away_the_slow())

    def _accept(self, listener: socket.socket) -> None:
        """Called when somebody has come: greet them. No task is made, so that a flood of them costs little."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, (address, _) = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # this process has no file descriptor left
                self._push_out(self._greediest())
                return
            visitor = _Visitor(connection, address, secrets.token_bytes(NONCE_BYTES), time.monotonic())
            connection.setblocking(False)
            self._pending.setdefault(address, {})[visitor] = None
            self._loop.add_reader(connection, self._hear, visitor)
            if len(self._pending[address]) > MAX_PENDING_OF_ONE:
                self._push_out(address)
            elif sum(map(len, self._pending.values())) > MAX_PENDING:
                self._push_out(self._greediest())
            try:
                connection.send(self._magic + visitor.nonce)  # it fits into any buffer
            except OSError:
                self._refuse(visitor, "left without a proof")

    def _greediest(self) -> str | None:
        """The address that most of those who wait come from."""
        return max(self._pending, key=lambda address: len(self._pending[address]), default=None)

    def _push_out(self, address: str | None) -> None:
        if address is not None:
            self._refuse(next(iter(self._pending[address])), "pushed out by later ones")

    def _hear(self, visitor: _Visitor) -> None:
        """Called when a visitor has said something."""
        try:
            heard = visitor.connection.recv(REQUEST_BYTES - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            return self._refuse(visitor, "left without a proof")
        visitor.said += heard
        if len(visitor.said) < REQUEST_BYTES:
            return
        request, proof = visitor.said[:-PROOF_BYTES], visitor.said[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"door" + visitor.nonce + request)):
            return self._refuse(visitor, "wrong token", REFUSED)
        self._forget(visitor)
        self._start(self._lead(visitor, request))

    def _refuse(self, visitor: _Visitor, reason: str, verdict: bytes = b"") -> None:
        if visitor in self._pending.get(visitor.address, ()):
            self._forget(visitor)
            self._count(visitor.address, reason)
            with suppress(OSError):
                visitor.connection.send(verdict)
            visitor.connection.close()

    def _forget(self, visitor: _Visitor) -> None:
        """It waits no more."""
        self._loop.remove_reader(visitor.connection)
        mine = self._pending[visitor.address]
        del mine[visitor]
        if not mine:
            del self._pending[visitor.address]

    async def _send_away_the_slow(self) -> None:
        try:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                before = time.monotonic() - HANDSHAKE_SECONDS
                for visitors in list(self._pending.values()):
                    for visitor in [visitor for visitor in visitors if visitor.came < before]:
                        self._refuse(visitor, f"no proof within {HANDSHAKE_SECONDS:g} s")
        finally:
            for visitors in self._pending.values():
                for visitor in visitors:
                    visitor.connection.close()

    async def _lead(self, visitor: _Visitor, request: bytes) -> None:
        """Take somebody who has the token to the store that they ask for, if it is there."""
        try:
            store = await asyncio.open_unix_connection(self._stores[request[NONCE_BYTES:]])
        except (KeyError, OSError):
            store = None
        verdict = ABSENT if store is None else FOUND
        try:
            watch(visitor.connection, self._silence_seconds)
            visitor.connection.send(verdict)  # it fits into any buffer
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                streams = await self._accept_streams(visitor.connection)
        except OSError as error:  # TimeoutError and SSLError are two of them
            visitor.connection.close()
            if store is not None:
                store[1].close()
            return self._count(visitor.address, f"no connection after its proof: {error or 'no answer'}")
        streams[1].write(_proof(self._key, b"gate" + verdict + visitor.nonce + request))
        if store is None:
            streams[1].close()
        else:
            await pass_on(streams, store)

    async def _accept_streams(self, connection: socket.socket) -> Streams:
        """Streams of an accepted connection, after the TLS handshake if there is one; asyncio has them for clients only."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    def _count(self, peer: str, reason: str) -> None:
        self.refused += 1
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.clear()
        self._strangers[peer] += 1
        number = self._strangers[peer]
        if number & (number - 1) == 0:  # 1, 2, 4, 8 ...: nobody fills the log
            log.warning("%s was refused at %s:%d: %s (number %d)", peer, self.address, self.port, reason, number)


class TunnelClient(TcpProxy):
    """Listens at a Unix socket of this host, and leads every connection through the gate to one store of host 0.

    It is there when the way has been proven once: it waits for the gate and the store.

    Args:
        address, port: of the gate.
        token: the same as the gate's.
        name: of the store, as host 0 calls it.
        path: of the socket that it makes, in a folder that only this user can enter.
        timeout: seconds to wait for gate and store, at the start and for every connection later.
        encrypt: the same as the gate's.
        silence_seconds: as for `TunnelServer`. After a break that is shorter everything goes on; a longer one ends the
            connections on both hosts, and who used them gets an error.

    Raises:
        RendezvousError: the token or `encrypt` is not the gate's, something else listens there, there was no way within
            `timeout`, or TLS needs a library that is not installed.
        OSError: the socket cannot be made.
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
        silence_seconds: float = SILENCE_SECONDS,
    ):
        self._gate, self._timeout, self.path = (address, port), timeout, path
        self._key, self._name = token_key(token, "the token of the door"), _padded(name)
        self._tls = make_context(token, server_side=False) if encrypt else None
        super().__init__(listen_at(path), silence_seconds)
        try:
            asyncio.run_coroutine_threadsafe(self._prove(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """As of `TcpProxy`; the socket goes too."""
        super().close()
        self.path.unlink(missing_ok=True)

    async def _prove(self) -> None:
        (await self._reach())[1].close()

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_unix_server(
            lambda reader, writer: self._start(self._serve(reader, writer)), sock=listener
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gate = await self._reach()
        except RendezvousError as error:
            log.warning("%s", error)
            writer.close()
        else:
            await pass_on((reader, writer), gate)

    async def _reach(self) -> Streams:
        """A connection to the store, tried again until it stands: a link may be down for a moment, a gate not up yet."""
        meet = "{}:{}".format(*self._gate)
        end, pause = self._loop.time() + self._timeout, 0.05
        while True:
            try:
                async with asyncio.timeout(min(HANDSHAKE_SECONDS, max(0.1, end - self._loop.time()))):
                    return await self._dial(meet)
            except (OSError, EOFError) as error:  # TimeoutError is one of the first
                if self._loop.time() + pause > end:
                    raise RendezvousError(
                        f"no way to host 0 within {self._timeout:g} s: {error or 'no answer'}",
                        where=meet,
                        rule="host 0 listens at this address and has the store open",
                        fix="start host 0; check the address, the port and the firewall",
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _dial(self, meet: str) -> Streams:
        """One attempt. OSError, EOFError: not now; RendezvousError: never."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, self._gate)
            watch(connection, self._silence_seconds)
            nonce, request, verdict = await self._prove_token(connection, meet)
        except BaseException:
            connection.close()
            raise
        try:
            name = SERVER_NAME if self._tls else None
            reader, writer = await asyncio.open_connection(sock=connection, ssl=self._tls, server_hostname=name)
        except ssl.SSLError as error:
            raise _no_gate(meet, error) from None
        try:
            proof = await reader.readexactly(PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(self._key, b"gate" + verdict + nonce + request)):
                raise _no_gate(meet)
            if verdict != FOUND:
                raise ConnectionRefusedError(f"the store {self._name.rstrip(bytes(1)).decode()!r} is not open there")
            return reader, writer
        except ssl.SSLError as error:  # in TLS 1.3 a server refuses a client's certificate after the client's handshake
            writer.close()
            raise _no_gate(meet, error) from None
        except BaseException:
            writer.close()
            raise

    async def _prove_token(self, connection: socket.socket, meet: str) -> tuple[bytes, bytes, bytes]:
        """Say the proof of the door; nonce of the gate, request of the door, and verdict of the gate."""
        magic = await self._receive(connection, len(MAGIC))
        if magic != (MAGIC_TLS if self._tls else MAGIC):
            raise _other_encryption(meet, self._tls is not None) if magic in (MAGIC, MAGIC_TLS) else _no_gate(meet)
        nonce = await self._receive(connection, NONCE_BYTES)
        request = secrets.token_bytes(NONCE_BYTES) + self._name
        await self._loop.sock_sendall(connection, request + _proof(self._key, b"door" + nonce + request))
        verdict = await self._receive(connection, 1)
        if verdict == REFUSED:
            raise RendezvousError(
                "the gate of host 0 refused the token of this host",
                where=meet,
                rule="all hosts of a job have the same token",
                fix=f"give every host the same {TOKEN_VARIABLE} or token file",
            )
        return nonce, request, verdict

    async def _receive(self, connection: socket.socket, count: int) -> bytes:
        """Exactly so many bytes: what follows may be TLS. EOFError: there are fewer."""
        data = b""
        while len(data) < count:
            if not (part := await self._loop.sock_recv(connection, count - len(data))):
                raise EOFError("the gate ended the connection")
            data += part
        return data


def _padded(name: str) -> bytes:
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"the name of a store has at most {NAME_BYTES} bytes: {name!r}")
    return name.encode().ljust(NAME_BYTES, b"\0")


def _proof(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _no_gate(meet: str, error: ssl.SSLError | None = None) -> RendezvousError:
    return RendezvousError(
        "what listens there is not the gate of this job" + (f": {error}" if error else ""),
        where=meet,
        rule="the gate proves that it knows the token",
        fix="check the address and port of host 0",
    )


def _other_encryption(meet: str, encrypt: bool) -> RendezvousError:
    return RendezvousError(
        f"this host has cluster.encrypt = {str(encrypt).lower()}, host 0 has {str(not encrypt).lower()}",
        where=meet,
        rule="all hosts of a job encrypt their connections, or none does",
        fix="set cluster.encrypt to the same on all hosts",
    )
