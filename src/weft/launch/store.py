"""Key-value store for the processes of a job, as a torch.distributed Store on a Unix socket.

    server = StoreServer(folder / "store")      # in the launcher; the folder is private
    store = SocketStore(folder / "store")       # in each process: a torch.distributed.Store

torch's TCPStore serves every process that can connect to its port, on a single host the processes of all users. This store
listens at a Unix socket, so that the permissions of its folder control the access. Between hosts, `tunnel` forwards the
connections.

Protocol: a request is one byte (the operation) and a list of fields; a response is a list of fields. A list of fields is
encoded as the number of fields, followed by each field with its length before it (`struct` ">I"). The response to a request
for a missing key is sent when the key is set. `changes` is a further request: it waits for new values of any keys, and tells
which callers have been silent, so that the traffic of many hosts that watch each other grows with their number.
"""

import asyncio
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from weft.launch.tcp_proxy import TcpProxy

MAX_LENGTH = 2**30  # maximum bytes of a field, and maximum number of fields
STORE_VARIABLE = "WEFT_STORE"  # environment variable of ranks: path of the socket
MAX_PATH_BYTES = 107  # maximum length of the address of a Unix socket
SET, ADD, COMPARE_SET, CHECK, WAIT, GET, DELETE, COUNT, TIME, CHANGES = range(10)
BATCH_SECONDS = 0.0005  # for each caller of `changes`: news of many hosts at about the same time are sent together
BACKLOG = 4096
FOUND, LATE = b"+", b"-"


class StoreServer(TcpProxy):
    """Server of the store, in a daemon thread.

    Args:
        path: path of the socket to create, in a folder that only this user can enter.

    Raises:
        OSError: the socket cannot be created.
    """

    def __init__(self, path: Path):
        self.path = path
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}
        self._version = 0
        self._versions: dict[bytes, int] = {}  # of the newest value of each key, in their order
        self._calls: dict[str, float] = {}  # time of the last call of `changes` by each caller, in their order
        self._payloads: dict[int, bytes] = {}  # new values since a version
        self._news = asyncio.Event()  # replaced when it is set
        super().__init__(listen_at(path))

    def close(self) -> None:
        """Close all connections and remove the socket. A second call does nothing."""
        if self._thread.is_alive():
            super().close()
            self.path.unlink(missing_ok=True)

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_unix_server(
            lambda reader, writer: self._start(self._serve(reader, writer)), sock=listener, backlog=BACKLOG
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                operation = (await reader.readexactly(1))[0]
                response = await self._respond(operation, await read_fields(reader))
                writer.write(encode_fields(response))
                await writer.drain()
        except (OSError, EOFError, ValueError, IndexError):
            pass  # the client has disconnected or sent an invalid request
        finally:
            writer.close()

    async def _respond(self, operation: int, fields: list[bytes]) -> list[bytes]:
        values = self._values
        if operation == SET:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                self._put(key, value)
            return []
        if operation == ADD:
            key, amount = fields
            self._put(key, b"%d" % (int(values.get(key, b"0")) + int(amount)))
            return [values[key]]
        if operation == COMPARE_SET:  # as in torch: a missing key compares equal to an empty value
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                self._put(key, desired)
            return [values.get(key, expected)]
        if operation == CHECK:
            return [FOUND if all(key in values for key in fields) else LATE]
        if operation == DELETE:
            return [FOUND if values.pop(fields[0], None) is not None else LATE]
        if operation == COUNT:
            return [b"%d" % len(values)]
        if operation == TIME:
            return [repr(time.time()).encode()]
        if operation == CHANGES:
            return await self._changes(fields[0].decode(), int(fields[1]), float(fields[2]))
        seconds, *keys = fields
        try:
            async with asyncio.timeout(float(seconds)):
                for key in keys:
                    await self._wait(key)
        except TimeoutError:
            return [LATE]
        return [FOUND] if operation == WAIT else [FOUND, *(values[key] for key in keys)]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._version += 1
        self._versions.pop(key, None)
        self._versions[key] = self._version
        self._payloads.clear()
        self._news.set()
        self._news = asyncio.Event()
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _changes(self, caller: str, since: int, seconds: float) -> list[bytes]:
        self._calls.pop(caller, None)
        self._calls[caller] = began = self._loop.time()
        news = self._news
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._version == since:
                    await news.wait()
                    news = self._news
        if self._version > since > 0:
            await asyncio.sleep(BATCH_SECONDS * len(self._calls))
        ages: dict[str, float] = {}
        now = self._loop.time()
        for other, called in self._calls.items():  # the longest silent ones first
            if now - called <= 2 * seconds:
                break
            ages[other] = now - called
        if since not in self._payloads:
            values = {}
            for key in reversed(self._versions):
                if self._versions[key] <= since:
                    break
                values[key.decode()] = self._values[key].decode()
            self._payloads[since] = zlib.compress(json.dumps(values).encode(), 1)
        answer = [self._version, now - began, ages]
        return [json.dumps(answer).encode(), self._payloads[since]]

    async def _wait(self, key: bytes) -> None:
        while key not in self._values:
            waiter = self._loop.create_future()
            self._waiting.setdefault(key, set()).add(waiter)
            try:
                await waiter
            finally:
                if waiters := self._waiting.get(key):
                    waiters.discard(waiter)


class SocketStore(dist.Store):
    """Client of a `StoreServer`, with the interface of torch.distributed.Store. Thread-safe.

    Args:
        path: path of the socket.
        timeout: timeout of `get` and `wait`.

    Every method raises dist.DistNetworkError when the server is gone. `get` and `wait` raise dist.DistStoreError when a key is
    not set within the timeout.
    """

    def __init__(self, path: Path, timeout: timedelta = timedelta(seconds=300)):
        super().__init__()
        self.path = path
        self.set_timeout(timeout)
        self._idle: list[socket.socket] = []  # each call uses its own connection, because another call may block
        self._idle.append(self._connect())

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def clone(self) -> "SocketStore":
        """Create another client of the same server."""
        return SocketStore(self.path, self._default_timeout)

    @property
    def _default_timeout(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined] # missing in the stubs

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._request(SET, [key, value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys atomically."""
        self._request(SET, [text for pair in zip(keys, values, strict=True) for text in pair])

    def get(self, key: str) -> bytes:
        """Wait until a key is set; returns its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are set; returns their values."""
        return self._request_keys(GET, keys, self._default_timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to an integer value, which starts at 0; returns the sum."""
        return int(self._request(ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key to `desired` if its value is `expected` ("" also matches a missing key); returns the value of the key."""
        return self._request(COMPARE_SET, [key, expected, desired])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are set."""
        return self._request(CHECK, keys)[0] == FOUND

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._request_keys(WAIT, keys, timeout or self._default_timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; True if it was set."""
        return self._request(DELETE, [key])[0] == FOUND

    def num_keys(self) -> int:
        """Number of keys that are set."""
        return int(self._request(COUNT, [])[0])

    def server_time(self) -> float:
        """Clock of the server's host, in seconds since 1970."""
        return float(self._request(TIME, [])[0])

    def changes(self, caller: str, since: int, seconds: float) -> tuple[int, float, dict[str, float], dict[str, str]]:
        """Wait until keys have new values. Each call is a sign of life of its caller.

        Args:
            caller: name of the caller.
            since: version of the last answer; 0 for the values of all keys.
            seconds: maximum wait.

        Returns:
            version: version of this answer.
            waited: seconds for which the server has waited.
            ages: seconds since the last call of each caller that has not called for twice `seconds`.
            values: new values by key, which must be texts.
        """
        answer, payload = self._request(CHANGES, [caller, str(since), repr(seconds)])
        version, waited, ages = json.loads(answer)
        return version, waited, ages, json.loads(zlib.decompress(payload))

    def has_extended_api(self) -> bool:
        """True: the store has multi_get and multi_set. Called by torch."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # names that torch's C++ code calls

    def _request_keys(self, operation: int, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        status, *values = self._request(operation, [str(timeout.total_seconds()), *keys])
        if status != FOUND:
            raise dist.DistStoreError(f"{', '.join(keys)} not set within {timeout.total_seconds():g} s")
        return values

    def _request(self, operation: int, fields: Iterable[str | bytes]) -> list[bytes]:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except IndexError:  # another thread took the last one
            connection = self._connect()
        try:
            texts = [field.encode() if isinstance(field, str) else bytes(field) for field in fields]
            connection.sendall(bytes([operation]) + encode_fields(texts))
            response = _receive_fields(connection)
        except BaseException as error:
            connection.close()  # a late response must not be read by the next request
            if isinstance(error, OSError | EOFError):
                raise dist.DistNetworkError(f"the store at {self.path} is gone: {error or 'no answer'}") from None
            raise
        self._idle.append(connection)
        return response

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            raise dist.DistNetworkError(f"no store at {self.path}: {error.strerror}") from None
        return connection


class StoreRendezvous(StaticTCPRendezvous):
    """Static rendezvous of torch's elastic agents at an existing store.

    Args:
        path: path of the store's socket on this host.
        rank, world_size: index of this agent, and number of agents.
        seconds: timeout for the other agents.
    """

    def __init__(self, path: Path, rank: int, world_size: int, seconds: float):
        # The address is not used.
        super().__init__("localhost", 0, rank, world_size, run_id="weft", timeout=int(seconds))
        self.path = path
        self._store = SocketStore(path, timedelta(seconds=seconds))


def listen_at(path: Path) -> socket.socket:
    """Create a listening Unix socket at an unused path.

    Raises:
        OSError: the socket cannot be created. If the path is too long, the message names the fix.
    """
    if len(str(path).encode()) > MAX_PATH_BYTES:
        raise OSError(
            f"{path} is longer than {MAX_PATH_BYTES} bytes, the limit of a Unix socket: set TMPDIR to a shorter path"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def encode_fields(fields: Sequence[bytes]) -> bytes:
    """Fields as the protocol sends them."""
    parts = [struct.pack(">I", len(fields))]
    for field in fields:
        parts += struct.pack(">I", len(field)), field
    return b"".join(parts)


def _decode_length(data: bytes) -> int:
    (length,) = struct.unpack(">I", data)
    if length > MAX_LENGTH:
        raise ValueError(length)
    return int(length)


async def read_fields(reader: asyncio.StreamReader) -> list[bytes]:
    """Read the fields of a request or response.

    Raises:
        EOFError: the connection has ended.
        ValueError: a length is above `MAX_LENGTH`.
    """
    count = _decode_length(await reader.readexactly(4))
    return [await reader.readexactly(_decode_length(await reader.readexactly(4))) for _ in range(count)]


def _receive_fields(connection: Any) -> list[bytes]:
    return [
        _receive(connection, _decode_length(_receive(connection, 4)))
        for _ in range(_decode_length(_receive(connection, 4)))
    ]


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if not (size := connection.recv_into(view)):
            raise EOFError("the server closed the connection")
        view = view[size:]
    return bytes(data)
