"""TCP proxy that records the bytes it forwards, and may change them."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LOOPBACK = "127.0.0.1"
Change = Callable[[str, int, bytes], bytes]


def unchanged(sender: str, offset: int, data: bytes) -> bytes:
    return data


@contextmanager
def proxy(port: int, change: Change = unchanged) -> Iterator[tuple[int, dict[str, bytearray]]]:
    """Proxy to a port; yields its own port, and the recorded bytes of the tunnel client and the tunnel server.

    Args:
        port: port to forward to.
        change: function of the sender ("client" or "server"), the offset of the first byte in its connection, and the bytes;
            returns the bytes to forward.
    """
    recorded = {"client": bytearray(), "server": bytearray()}

    def pipe(source: socket.socket, target: socket.socket, sender: str) -> None:
        offset = 0
        with suppress(OSError):
            while data := source.recv(65536):
                recorded[sender] += data
                target.sendall(change(sender, offset, data))
                offset += len(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def forward(client: socket.socket) -> None:
        server = socket.create_connection((LOOPBACK, port))
        threads = [
            threading.Thread(target=pipe, args=ends)
            for ends in ((client, server, "client"), (server, client, "server"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()

    with answering(forward) as own_port:
        yield own_port, recorded


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Port at which a function answers each connection, in a separate thread."""

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
