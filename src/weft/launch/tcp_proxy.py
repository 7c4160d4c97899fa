"""Forwarding of connections, by asyncio in a daemon thread: what `Gate` and `Door` share."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Self

CHUNK_BYTES = 2**16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """Base of `Gate` and `Door`: a listener and its connections, served by an event loop in a daemon thread."""

    def __init__(self, listener: socket.socket, silence_seconds: float):
        self._silence_seconds = silence_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name=type(self).__name__, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to listen, and end all connections. A second call does nothing."""
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
        self._loop.run_until_complete(self._end_all())
        self._loop.close()
        listener.close()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets of closed writers are closed in the next turn

    async def _listen(self, listener: socket.socket) -> asyncio.Server | None:
        raise NotImplementedError

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def watch(connection: socket.socket, silence_seconds: float) -> None:
    """Let the kernel end a connection when the other host is silent, and send small messages at once."""
    probe_seconds = max(1, round(silence_seconds / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so for sockets of getaddrinfo only
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_seconds * 1000))


async def pass_on(one: Streams, other: Streams) -> None:
    """Pass bytes on in both directions, until one side ends."""
    await asyncio.gather(_pipe(one[0], other[1]), _pipe(other[0], one[1]))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # a side that is lost ends the connection, as one that leaves
    except asyncio.CancelledError:
        writer.transport.abort()  # the loop ends now; TLS would still say goodbye
        raise
    finally:
        writer.close()
