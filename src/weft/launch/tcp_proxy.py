"""Sockets that asyncio serves in a daemon thread: base of `StoreServer`, `TunnelServer` and `TunnelClient`."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Self

CHUNK_BYTES = 2**16
RETRY_SECONDS = 0.05

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """Listener whose connections an event loop in a daemon thread serves."""

    def __init__(self, listener: socket.socket):
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name=type(self).__name__, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, listener: socket.socket) -> None:
        server = self._loop.run_until_complete(self._listen(listener))
        self._loop.run_forever()
        if server:
            server.close()
        self._loop.run_until_complete(self._cancel_all())
        self._loop.close()
        listener.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the event loop closes the sockets of closed writers in its next iteration

    async def _listen(self, listener: socket.socket) -> asyncio.Server | None:
        raise NotImplementedError

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def set_keepalive(connection: socket.socket, timeout: float) -> None:
    """Let the kernel close a connection whose other host does not answer for `timeout` seconds; disable Nagle's algorithm."""
    probe_seconds = max(1, round(timeout / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only for sockets of getaddrinfo
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout * 1000))


async def connect_unix(path: Path) -> Streams:
    """Connect to a Unix socket. asyncio takes a full queue of its server for a connection, which then ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(str(path))
            except BlockingIOError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


async def forward(first: Streams, second: Streams) -> None:
    """Forward bytes in both directions until one side closes its connection."""
    await asyncio.gather(_pipe(first[0], second[1]), _pipe(second[0], first[1]))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # a lost side ends the connection, like a side that closes it
    except asyncio.CancelledError:
        writer.transport.abort()  # the loop is stopping: there is no time for the closing messages of TLS
        raise
    finally:
        writer.close()
