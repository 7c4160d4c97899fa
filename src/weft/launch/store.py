"""A store of keys for the processes of a job, which no other user of the host reaches.

    server = StoreServer(folder / "store")      # in the launcher; the folder is private
    store = SocketStore(folder / "store")       # in each process: what torch.distributed takes for a Store

torch's TCPStore answers everybody who can open a connection to its port, which on one host are all its users. This one listens
at a Unix socket: who may reach it is decided by the permissions of its folder. Between hosts its connections pass `gate`.

A request is one byte that names what is wanted, then fields; an answer is fields. Fields are a count, then each with its length
before it (`struct` ">I"). Who asks for a key that is not there yet gets the answer when it is.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LARGEST = 2**30  # bytes of a field, and number of fields: no more is read
STORE_VARIABLE = "WEFT_STORE"  # in the environment of ranks: the path of the socket
LONGEST_PATH = 107  # bytes, of the address of a Unix socket
SET, ADD, COMPARE_SET, CHECK, WAIT, GET, DELETE, COUNT = range(8)
BACKLOG = 4096
FOUND, LATE = b"+", b"-"


class StoreServer:
    """Holds the keys, and serves them in a daemon thread.

    Args:
        path: of the socket that it makes; in a folder that only this user can enter.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path):
        self.path = path
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        listener = listen_at(path)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="StoreServer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, listener: socket.socket) -> None:
        server = self._loop.run_until_complete(asyncio.start_unix_server(self._accept, sock=listener))
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets of closed writers are closed in the next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind = (await reader.readexactly(1))[0]
                writer.write(_packed(await self._answer(kind, await _read_fields(reader))))
                await writer.drain()
        except (OSError, EOFError, ValueError, IndexError):
            pass  # it has gone, or says what no client says
        finally:
            writer.close()

    async def _answer(self, kind: int, fields: list[bytes]) -> list[bytes]:
        values = self._values
        if kind == SET:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                self._put(key, value)
            return []
        if kind == ADD:
            key, amount = fields
            self._put(key, b"%d" % (int(values.get(key, b"0")) + int(amount)))
            return [values[key]]
        if kind == COMPARE_SET:  # as torch's: a key that is not there counts as one without a value
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                self._put(key, desired)
            return [values.get(key, expected)]
        if kind == CHECK:
            return [FOUND if all(key in values for key in fields) else LATE]
        if kind == DELETE:
            return [FOUND if values.pop(fields[0], None) is not None else LATE]
        if kind == COUNT:
            return [b"%d" % len(values)]
        seconds, *keys = fields
        try:
            async with asyncio.timeout(float(seconds)):
                for key in keys:
                    await self._wait(key)
        except TimeoutError:
            return [LATE]
        return [FOUND] if kind == WAIT else [FOUND, *(values[key] for key in keys)]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

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
    """The store behind a Unix socket, for one process and all its threads. Its methods mean what those of torch's Store do.

    Args:
        path: of the socket.
        timeout: how long `get` and `wait` wait.

    Every method raises dist.DistNetworkError when the server has gone; `get` and `wait` raise dist.DistStoreError when a key
    does not come in time.
    """

    def __init__(self, path: Path, timeout: timedelta = timedelta(seconds=300)):
        super().__init__()
        self.path = path
        self.set_timeout(timeout)
        self._idle: list[socket.socket] = []  # a call takes a connection of its own: another may wait for long
        self._idle.append(self._connect())

    def close(self) -> None:
        """End the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def clone(self) -> "SocketStore":
        """Another client of the same server."""
        return SocketStore(self.path, self._patience)

    @property
    def _patience(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined] # the stubs lack it

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._ask(SET, [key, value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give keys values, all at once."""
        self._ask(SET, [text for pair in zip(keys, values, strict=True) for text in pair])

    def get(self, key: str) -> bytes:
        """The value of a key, when there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, when all have one."""
        return self._await(GET, keys, self._patience)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins as 0; the sum."""
        return int(self._ask(ADD, [key, str(amount)])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Give a key a value if it has the one that is expected, or none and "" is; the value that it has then."""
        return self._ask(COMPARE_SET, [key, expected, desired])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return self._ask(CHECK, keys)[0] == FOUND

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys have a value."""
        self._await(WAIT, keys, timeout or self._patience)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._ask(DELETE, [key])[0] == FOUND

    def num_keys(self) -> int:
        """How many keys have a value."""
        return int(self._ask(COUNT, [])[0])

    def has_extended_api(self) -> bool:
        """Whether there are multi_get and multi_set; torch asks."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # as torch's C++ calls them

    def _await(self, kind: int, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        status, *values = self._ask(kind, [str(timeout.total_seconds()), *keys])
        if status != FOUND:
            raise dist.DistStoreError(f"{', '.join(keys)} did not come within {timeout.total_seconds():g} s")
        return values

    def _ask(self, kind: int, fields: Iterable[str | bytes]) -> list[bytes]:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except IndexError:  # another thread took the last one
            connection = self._connect()
        try:
            texts = [field.encode() if isinstance(field, str) else bytes(field) for field in fields]
            connection.sendall(bytes([kind]) + _packed(texts))
            answer = _receive_fields(connection)
        except BaseException as error:
            connection.close()  # an answer may be on its way
            if isinstance(error, OSError | EOFError):
                raise dist.DistNetworkError(f"the store at {self.path} has gone: {error or 'no answer'}") from None
            raise
        self._idle.append(connection)
        return answer

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.path))
        except OSError as error:
            connection.close()
            raise dist.DistNetworkError(f"no store at {self.path}: {error.strerror}") from None
        return connection


class StoreRendezvous(StaticTCPRendezvous):
    """Where torch's elastic agents meet: at a store that is there already.

    Args:
        path: of its socket on this host.
        rank, world_size: number of this agent, and how many there are.
        seconds: that one waits for another.
    """

    def __init__(self, path: Path, rank: int, world_size: int, seconds: float):
        super().__init__("localhost", 0, rank, world_size, run_id="weft", timeout=int(seconds))  # nothing listens there
        self.path = path
        self._store = SocketStore(path, timedelta(seconds=seconds))


def listen_at(path: Path) -> socket.socket:
    """A listening Unix socket at a path that is free.

    Raises:
        OSError: it cannot be made; where the path is too long, its words name the way out.
    """
    if len(str(path).encode()) > LONGEST_PATH:
        raise OSError(
            f"{path} has more than {LONGEST_PATH} bytes, too many for a socket: set TMPDIR to a shorter folder"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _packed(fields: Sequence[bytes]) -> bytes:
    pieces = [struct.pack(">I", len(fields))]
    for field in fields:
        pieces += struct.pack(">I", len(field)), field
    return b"".join(pieces)


def _number(data: bytes) -> int:
    (number,) = struct.unpack(">I", data)
    if number > LARGEST:
        raise ValueError(number)
    return int(number)


async def _read_fields(reader: asyncio.StreamReader) -> list[bytes]:
    count = _number(await reader.readexactly(4))
    return [await reader.readexactly(_number(await reader.readexactly(4))) for _ in range(count)]


def _receive_fields(connection: Any) -> list[bytes]:
    return [_receive(connection, _number(_receive(connection, 4))) for _ in range(_number(_receive(connection, 4)))]


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if not (size := connection.recv_into(view)):
            raise EOFError("it ended the connection")
        view = view[size:]
    return bytes(data)
