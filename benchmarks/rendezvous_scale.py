"""Load of the launchers of many hosts on the store of host 0 under torch's dynamic rendezvous; for Weft's see `scale.py`.

    python benchmarks/rendezvous_scale.py [--hosts 64,256,1024] [--seconds 12]

One value with all hosts is in a C++ TCPStore: each host reads it once a second, as the agent does, and writes its keep-alive
every 5 s by compare_set, again and again until no other host was faster. Threads of four processes play the hosts; the server
is a process of its own, whose processor time is read. No ranks run. A host also unpickles the value each time it reads it: the
last column has the milliseconds of one such read, which the threads leave out.
"""

import os
import pickle
import random
import resource
import signal
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from weft.launch.tunnel import LOOPBACK

PROCESSES = 4  # of clients
CONNECTIONS = 64  # of a process to torch's store, shared by its hosts: each waits for the name of its address
WARM_UP = 3.0  # seconds
KEEP_ALIVE = 5.0  # seconds between two keep-alives of torch
PORT = 29600
PROCESSES_OF = get_context("fork")


def torch_state(count: int) -> bytes:
    """State of a rendezvous of some hosts, as its backend writes it."""
    state = _RendezvousState()
    for index in range(count):
        node = _NodeDesc(f"node{index:04d}.cluster.example", 100000 + index, 0)
        state.participants[node], state.last_heartbeats[node] = index, datetime.now(UTC)
    return b64encode(pickle.dumps(state))


def torch_host(count: int, index: int, size: int, store: dist.Store) -> Callable[[], tuple[int, int]]:
    """One second of a host of torch: returns its bytes, and its tries to write a keep-alive."""
    due = time.monotonic() + random.random() * KEEP_ALIVE
    slot = index * (size // count)

    def second() -> tuple[int, int]:
        nonlocal due
        value, moved, tries = store.get("state"), size, 0
        while time.monotonic() > due:
            own = value[:slot] + b"%08d" % random.randrange(10**8) + value[slot + 8 :]
            value = store.compare_set("state", value.decode(), own.decode())
            moved, tries = moved + 3 * size, tries + 1
            if value == own:
                due = time.monotonic() + KEEP_ALIVE
        return moved, tries

    return second


def clients(count: int, share: int, seconds: float, barrier: Any, results: Any) -> None:
    """Process of clients: hosts `share`, `share` + PROCESSES ..., and their reads, bytes, tries and slowest turn."""

    mine, size = range(share, count, PROCESSES), len(torch_state(count))
    stores = [dist.TCPStore(LOOPBACK, PORT, is_master=False, wait_for_workers=False) for _ in mine[:CONNECTIONS]]
    hosts = [torch_host(count, index, size, stores[number % CONNECTIONS]) for number, index in enumerate(mine)]
    barrier.wait()
    begin = time.monotonic() + WARM_UP
    found, under_way = list[tuple[float, int, int, float]](), dict[int, float]()

    def live(number: int, second: Callable[[], tuple[int, int]]) -> None:
        time.sleep(random.random())
        while True:
            under_way[number] = now = time.monotonic()
            moved, tries = second()
            took = time.monotonic() - now
            found.append((now + took, moved, tries, took))
            del under_way[number]
            time.sleep(max(0.0, 1.0 - took))

    for number, host in enumerate(hosts):
        threading.Thread(target=live, args=(number, host), daemon=True).start()
    time.sleep(WARM_UP + seconds)
    end = time.monotonic()
    rows = [row for row in list(found) if begin < row[0]]
    slowest = max([row[3] for row in rows] + [end - start for start in list(under_way.values())])
    results.put((len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows), slowest))
    os._exit(0)  # without the teardown of many connections


def serve(count: int, ready: Any) -> None:
    """Server of a store, until it is killed."""
    server = dist.TCPStore(LOOPBACK, PORT, is_master=True, wait_for_workers=False)
    server.set("state", torch_state(count).decode())
    ready.set()
    signal.pause()


def read_milliseconds(count: int) -> float:
    """Milliseconds for which a host parses what it has read."""
    state = torch_state(count)
    begin = time.thread_time()
    pickle.loads(b64decode(state))
    return (time.thread_time() - begin) * 1000


def cpu_seconds(pid: int | None) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, seconds: float) -> tuple[str, ...]:
    """Measure with some hosts; returns a row of the table."""
    ready = PROCESSES_OF.Event()
    barrier, results = PROCESSES_OF.Barrier(PROCESSES + 1), PROCESSES_OF.SimpleQueue()
    server = PROCESSES_OF.Process(target=serve, args=(count, ready))
    server.start()
    ready.wait()
    for share in range(PROCESSES):
        PROCESSES_OF.Process(target=clients, args=(count, share, seconds, barrier, results)).start()
    barrier.wait()
    time.sleep(WARM_UP)
    before = cpu_seconds(server.pid)
    time.sleep(seconds)
    core = (cpu_seconds(server.pid) - before) / seconds
    rows = [results.get() for _ in range(PROCESSES)]
    server.kill()
    server.join()
    reads, moved, tries = (sum(row[k] for row in rows) / seconds for k in range(3))
    size = len(torch_state(count))
    cells = f"{reads / count:.0%}", f"{moved / 1e6:.1f}", f"{core:.2f}", f"{tries:.0f} for {count / KEEP_ALIVE:.0f}"
    slowest = max(row[3] for row in rows)
    return str(count), f"{size / 1e3:.0f}", *cells, f"{slowest:.1f}", f"{read_milliseconds(count):.1f}"


def main(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts.")] = "64,256,1024",
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 12.0,
) -> None:
    """Print a row for each number of hosts."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a server has a connection for each host
    table = Table("hosts", "kB of a read", "reads done of those due", "MB/s", "cores of the server")
    for title in ("tries to write a second", "slowest turn, s", "ms to parse a read"):
        table.add_column(title)
    for count in map(int, hosts.split(",")):
        table.add_row(*measure(count, seconds))
        print(*(list(column.cells)[-1] for column in table.columns), sep="  ", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
