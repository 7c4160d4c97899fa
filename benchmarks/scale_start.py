"""Parts of `scale.py`: what the start of a job, and the watch over its hosts, cost the store of host 0."""

import asyncio
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import Process, Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figures
from weft.launch.agent import POLL_SECONDS
from weft.launch.attempt import AttemptSpec
from weft.launch.host_record import HostRecord
from weft.launch.host_reports import HostReports
from weft.launch.membership import EMPTY, HOSTS_PER_SECOND, MembershipStore
from weft.launch.store import CHANGES, COMPARE_SET, GET, SET, WAIT, SocketStore, StoreServer, encode_fields, read_fields
from weft.launch.tcp_proxy import connect_unix

FAILURE = "rank 41 was killed by SIGKILL"


def _fake_hosts(path: Path, hosts: Sequence[int], total: int, seconds: float, heard: Any) -> None:
    """Launchers of some hosts, as far as the store of host 0 sees them: each waits for changes again and again.

    Puts into a queue the time at which the last of them has heard of the failure of a host.
    """
    known: list[float] = []

    async def host(index: int) -> None:
        reader, writer = await connect_unix(path)
        interval, version = max(1.0, total / HOSTS_PER_SECOND), 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for operation, fields in (
                [(COMPARE_SET, [f"host-{index}", EMPTY, record(index)])] if version == 0 else []
            ) + [(CHANGES, [f"host-{index}", str(version), str(interval)])]:
                writer.write(bytes([operation]) + encode_fields([field.encode() for field in fields]))
                answer = await read_fields(reader)
            version = json.loads(answer[0])[0]
            if FAILURE.encode() in zlib.decompress(answer[1]):
                known.append(time.monotonic())
        writer.close()

    async def all_hosts() -> None:
        await asyncio.gather(*map(host, hosts))

    asyncio.run(all_hosts())
    heard.put((len(known), max(known)))


def record(host: int, report: str | None = None) -> str:
    """Record of a host, as long as that of a launcher."""
    name = f"gpu-node-{host:05}.cluster.example"
    return json.dumps(asdict(HostRecord(f"{host:016x}", name, 4_000_000, 8, report=report)))


def membership(ranks: int, figures: Figures) -> None:
    """Core and traffic of host 0 for the hosts of a job, 8 ranks each: while all join, afterwards, and after a failure.

    Host 0 is a real launcher's watch, which looks at all hosts ten times a second.
    """
    hosts, seconds, heard = ranks // 8, 30.0, Queue()
    with TemporaryDirectory() as folder, MeasuredStore(Path(folder, "store")) as server:
        own = MembershipStore.join(
            SocketStore(server.path), host=0, hosts=hosts, ranks=8, min_hosts=1, last_call=0.0, interval=1.0
        )
        watch = HostReports(own, 0, hosts)
        watch._spec = AttemptSpec(0, [(host, 8) for host in range(hosts)])
        processes = [
            Process(target=_fake_hosts, args=(server.path, range(1 + n, hosts, 2), hosts, seconds, heard))
            for n in range(2)
        ]
        for process in processes:
            process.start()
        before = server.bytes
        time.sleep(10)
        figures.add("joining, host 0: MB", ranks, (server.bytes - before) / 1e6)
        assert len(own.host_states()) == hosts
        before, cpu, end = server.bytes, time.process_time(), time.monotonic() + 10
        while time.monotonic() < end:
            assert watch.remote_failure() is None
            time.sleep(POLL_SECONDS)
        figures.add("host 0: % of a core", ranks, (time.process_time() - cpu) * 10)
        figures.add("host 0: MB/s", ranks, (server.bytes - before) / 1e7)
        begin = time.monotonic()
        SocketStore(server.path).set("host-5", record(5, FAILURE))
        counts, times = zip(*(heard.get() for _ in processes), strict=True)
        assert sum(counts) == hosts - 1, counts
        figures.add("a failure is known on all hosts: s", ranks, max(times) - begin)
        for process in processes:
            process.join()
        own.leave(timeout=0.0)


class MeasuredStore(StoreServer):
    """Store that counts requests, and the bytes of requests and answers."""

    bytes = requests = 0

    async def _respond(self, operation: int, fields: list[bytes]) -> list[bytes]:
        answer = await super()._respond(operation, fields)
        self.bytes += sum(len(field) + 4 for field in (*fields, *answer))
        self.requests += 1
        return answer


# Start

GROUPS = 10  # groups of NCCL or HCCL of a rank, each with an id that its first rank sets


def _fake_ranks(path: Path, ranks: Sequence[int], total: int) -> None:
    """Ranks of accelerators, as far as the store sees their start: addresses of gloo, which connects lazily, and ids of groups.

    Collectives of gloo of log2(ranks) rounds connect a rank to as many others on either side.
    """
    distances = [2**n for n in range(max(1, (total - 1).bit_length()))]

    async def rank(index: int) -> None:
        reader, writer = await connect_unix(path)

        async def ask(operation: int, *fields: str) -> None:
            writer.write(bytes([operation]) + encode_fields([field.encode() for field in fields]))
            await read_fields(reader)

        await ask(SET, f"gloo/{index}", "x" * 200)
        for distance in distances:
            for peer in ((index + distance) % total, (index - distance) % total):
                await ask(WAIT, "600", f"gloo/{peer}")
                await ask(GET, "600", f"gloo/{peer}")
        for group in range(GROUPS):
            leader = index - index % 8
            if index == leader:
                await ask(SET, f"id/{group}/{leader}", "x" * 128)
            await ask(GET, "600", f"id/{group}/{leader}")
        writer.close()

    async def all_ranks() -> None:
        await asyncio.gather(*map(rank, ranks))

    asyncio.run(all_ranks())


def start(ranks: int, figures: Figures) -> None:
    """Seconds of the store of host 0 until all ranks have met; the ranks are two processes of this machine."""
    with TemporaryDirectory() as folder, MeasuredStore(Path(folder, "store")) as server:
        processes = [Process(target=_fake_ranks, args=(server.path, range(n, ranks, 2), ranks)) for n in range(2)]
        begin, cpu = time.monotonic(), time.process_time()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        figures.add("all ranks have met: s", ranks, time.monotonic() - begin)
        figures.add("store of host 0: s of a core", ranks, time.process_time() - cpu)
        figures.add("store of host 0: MB", ranks, server.bytes / 1e6)
        figures.add("store of host 0: requests", ranks, server.requests)
