"""Latency and bandwidth of requests to the store of host 0 through the tunnel, with TLS beside without, taking turns.

python benchmarks/encryption.py [--repeats 9]

Host 0 (tunnel servers and store) is a separate process; both processes are on this machine, connected over loopback.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import typer
from peers.figures import ratios, spread
from rich.console import Console
from rich.table import Table

from weft.device.cpu import Cpu
from weft.launch.rendezvous import new_token
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore
from weft.launch.tunnel import LOOPBACK, TunnelClient

LARGE = b"x" * 16_000_000
SMALL_REQUESTS, CONNECTIONS = 300, 20  # per repeat
HOST_0 = """
import sys
from weft.launch.tunnel import LOOPBACK, TunnelServer
from weft.launch.scratch import scratch_folder
from weft.launch.store import StoreServer
with scratch_folder() as folder, StoreServer(folder / "store") as server:
    servers = [TunnelServer(LOOPBACK, 0, sys.argv[1], encrypt=encrypt) for encrypt in (False, True)]
    for tunnel in servers:
        tunnel.add_store("ranks", server.path)
    print(*(tunnel.port for tunnel in servers), flush=True)
    sys.stdin.read()
"""


def seconds_of(action: Callable[[], object], count: int) -> float:
    """Mean seconds of one call, over `count` calls."""
    begin = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - begin) / count


def connect(store: SocketStore) -> None:
    """Make a new connection through the tunnel, and use it once."""
    clone = store.clone()
    clone.set("small", "x")
    clone.close()


def turn(store: SocketStore) -> dict[str, float]:
    """Run one repeat; return the seconds of each operation."""
    store.set("large", LARGE)
    return {
        "set 100 bytes": seconds_of(lambda: store.set("small", b"x" * 100), SMALL_REQUESTS),
        "get 100 bytes": seconds_of(lambda: store.get("small"), SMALL_REQUESTS),
        "new connection, set": seconds_of(lambda: connect(store), CONNECTIONS),
        "set 16 MB": seconds_of(lambda: store.set("large", LARGE), 3),
        "get 16 MB": seconds_of(lambda: store.get("large"), 3),
    }


def cell(name: str, seconds: list[float]) -> str:
    """Table cell: MB/s of large values, latency of small ones."""
    if "MB" in name:
        return spread([len(LARGE) / 1e6 / second for second in seconds], ".0f") + " MB/s"
    return spread([second * 1e6 for second in seconds], ".0f") + " us"


def main(repeats: Annotated[int, typer.Option(min=1, help="Turns per side.")] = 9) -> None:
    """Start host 0 and print the table."""
    token = new_token()
    with ExitStack() as stack:
        host_0 = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", HOST_0, token], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        assert host_0.stdout
        ports = map(int, host_0.stdout.readline().split())
        folder = stack.enter_context(scratch_folder())
        stores = []
        for encrypt, port in zip((False, True), ports, strict=True):
            client = TunnelClient(LOOPBACK, port, token, "ranks", folder / f"client-{port}", encrypt=encrypt)
            stores.append(SocketStore(stack.enter_context(client).path))
        turns = [[turn(store) for store in stores] for _ in range(repeats + 1)][1:]  # the first turn warms up
        host_0.communicate()
    table = Table(
        "request",
        "plain: median (min-max)",
        "TLS 1.3",
        "TLS / plain, time",
        title=f"{Cpu().name}: {Cpu().instruction_set}",
    )
    for name in turns[0][0]:
        plain, encrypted = ([pair[side][name] for pair in turns] for side in (0, 1))
        table.add_row(name, cell(name, plain), cell(name, encrypted), spread(ratios(encrypted, plain), ".2f"))
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
