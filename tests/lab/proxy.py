"""A TCP proxy that records what passes, and may change it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LOOPBACK = "127.0.0.1"
Change = Callable[[str, int, bytes], bytes]


def unchanged(sender: str, position: int, data: bytes) -> bytes:
    return data


@contextmanager
def proxy(port: int, change: Change = unchanged) -> Iterator[tuple[int, dict[str, bytearray]]]:
    """A proxy to a port: its own port, and what the door and the gate have sent.

    Args:
        change: of the sender ("door" or "gate"), the position of the first byte in its connection, and the bytes.
    """
    kept = {"door": bytearray(), "gate": bytearray()}

    def pipe(source: socket.socket, target: socket.socket, sender: str) -> None:
        position = 0
        with suppress(OSError):
            while data := source.recv(65536):
                kept[sender] += data
                target.sendall(change(sender, position, data))
                position += len(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def relay(here: socket.socket) -> None:
        there = socket.create_connection((LOOPBACK, port))
        both = [threading.Thread(target=pipe, args=ends) for ends in ((here, there, "door"), (there, here, "gate"))]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        there.close()

    with answering(relay) as own_port:
        yield own_port, kept


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which a function answers each connection, in a thread of its own."""

    def run(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    def serve() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(target=run, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
