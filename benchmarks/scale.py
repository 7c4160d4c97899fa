"""Costs of a job that grow with the number of its ranks, by simulation: no process group, synthetic reports and clients.

    python benchmarks/scale.py                       # every part at 64 to 10,240 ranks
    python benchmarks/scale.py checkpoint 128 1024   # one part, at some numbers of ranks

Each part calls the functions that a run calls, with what the ranks of such a job would send. Printed are seconds of CPU of
the one process that does the work, bytes, peak memory that it allocated, and the exponent with which each grows.
"""

import asyncio
import json
import math
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import Process, Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from weft.checkpoint.layouts import Box, RankTable
from weft.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Position,
    TensorEntry,
    file_name,
    read_manifest,
    write_manifest,
)
from weft.checkpoint.reports import Reports
from weft.checkpoint.restore import Reader
from weft.device.cpu import Cpu
from weft.job import Job
from weft.launch.host_record import HostRecord
from weft.launch.membership import HOSTS_PER_SECOND
from weft.launch.store import CHANGES, COMPARE_SET, GET, SET, WAIT, SocketStore, StoreServer, encode_fields, read_fields
from weft.launch.tcp_proxy import connect_unix
from weft.precision.scaling import LossScale

RANKS = (64, 256, 1024, 4096, 10240)
Shape = tuple[int, ...]


class Figures:
    """Figures of a part by number of ranks."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, float]] = {}

    def add(self, name: str, ranks: int, value: float) -> None:
        """Record a figure."""
        self.rows.setdefault(name, {})[ranks] = value

    def time(self, name: str, ranks: int, call: Callable[[], Any], memory: bool = False) -> Any:
        """Call a function, record its seconds of CPU, and with `memory` the peak of what it allocates in a second call."""
        begin = time.process_time()
        value = call()
        self.add(f"{name}: s", ranks, time.process_time() - begin)
        if memory:
            tracemalloc.start()
            call()
            self.add(f"{name}: peak MB", ranks, tracemalloc.get_traced_memory()[1] / 1e6)
            tracemalloc.stop()
        return value

    def print(self, title: str) -> None:
        """Print a table with the exponent of growth between the two largest numbers of ranks."""
        columns = sorted({ranks for row in self.rows.values() for ranks in row})
        print(f"{title:46}" + "".join(f"{ranks:>10,}" for ranks in columns) + "   grows as")
        for name, row in self.rows.items():
            texts = "".join(f"{row[ranks]:>10.3g}" if ranks in row else f"{'':>10}" for ranks in columns)
            known = [ranks for ranks in columns if row.get(ranks)][-2:]
            grows = ""
            if len(known) == 2:
                grows = f"ranks^{math.log(row[known[1]] / row[known[0]]) / math.log(known[1] / known[0]):.1f}"
            print(f"  {name:44}{texts}   {grows}")


# Checkpoints of a Llama of 70B under tp = 8 and ZeRO-3 over all other ranks: norms alone are held more than once.

TP = 8
BLOCK: dict[str, tuple[Shape, int | None]] = {
    "self_attn.q_proj": ((8192, 8192), 0),
    "self_attn.k_proj": ((1024, 8192), 0),
    "self_attn.v_proj": ((1024, 8192), 0),
    "self_attn.o_proj": ((8192, 8192), 1),
    "mlp.gate_proj": ((28672, 8192), 0),
    "mlp.up_proj": ((28672, 8192), 0),
    "mlp.down_proj": ((8192, 28672), 1),
    "input_layernorm": ((8192,), None),
    "post_attention_layernorm": ((8192,), None),
}
"""Shape of the weights of a block, and the dim that tensor parallelism splits."""
ENDS: dict[str, tuple[Shape, int | None]] = {
    "model.embed_tokens.weight": ((128256, 8192), 0),
    "model.norm.weight": ((8192,), None),
    "lm_head.weight": ((128256, 8192), 0),
}


def weights_of_70b() -> dict[str, tuple[Shape, int | None]]:
    """Shape and split dim of each weight."""
    return {f"model.layers.{n}.{name}.weight": fact for n in range(80) for name, fact in BLOCK.items()} | ENDS


def box_of(shape: Shape, split: int | None, tp: int, dp: int, degree: int) -> Box | None:
    """Part of a weight that a rank holds: its part under tp, and of that the chunk of FSDP2 along the first dim."""
    offset, size = [0] * len(shape), list(shape)
    if split is not None:
        size[split] //= TP
        offset[split] = tp * size[split]
    chunk = math.ceil(size[0] / degree)
    first, last = min(dp * chunk, size[0]), min((dp + 1) * chunk, size[0])
    offset[0], size[0] = offset[0] + first, last - first
    return (tuple(offset), tuple(size)) if first < last else None


def tables_of(ranks: int) -> list[RankTable]:
    """Tables of what each rank writes: weights, both moments and step counters."""
    weights, degree = weights_of_70b(), ranks // TP
    held = [
        (f"{kind}/{w}", "F32", fact[0]) for kind in ("weights", "exp_avg", "exp_avg_sq") for w, fact in weights.items()
    ]
    names = json.dumps(held + [(f"step/{name}", "F32", ()) for name in weights])
    facts = [*dict.fromkeys(weights.values())]
    kind_of = np.array([1 + facts.index(fact) for fact in weights.values()] * 3)
    alike = np.isin(kind_of, [1 + n for n, (_, split) in enumerate(facts) if split is None])
    hashes = np.array([zlib.crc32(name.encode()) for name, _, _ in held])
    counters = np.array([zlib.crc32(name.encode()) % ranks for name in weights])
    tables = []
    for rank in range(ranks):
        dp, tp = divmod(rank, TP)
        boxes = [box_of(*fact, tp, dp, degree) for fact in facts]
        # One of the tp ranks writes the same part of a norm; one of all ranks writes a step counter.
        kinds = np.where(alike & ((hashes + dp) % TP != tp), 0, kind_of)
        kinds = np.concatenate([kinds, np.where(counters == rank, len(facts) + 1, 0)]).astype(np.int32)
        found = [[], *([box] if box else [] for box in boxes), [((), ())]]
        own = [(f"rng/{rank:05d}/{kind}", "U8", (5056,)) for kind in ("cpu", "python", "device")]
        tables.append(RankTable(names, found, kinds, own))
    return tables


class CountedStore:
    """Store in memory that counts its requests and their bytes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = self.bytes = 0

    def _count(self, *texts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        """As in torch."""
        self._count(key, value)
        self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        """As in torch."""
        self._count(key)
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """As in torch."""
        self._count(*keys)
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        """As in torch."""
        self._count(key)
        return self.values.pop(key, None) is not None

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As in torch."""
        values = [self.values[key] for key in keys]
        self._count(*keys, *values)
        return values


def commit(reports: Reports, index: int, ranks: int, folder: Path) -> Manifest:
    """Commit of a checkpoint by rank 0, in its writing thread, once all files are written."""
    found, merged = reports.collect(index)
    own = {name: TensorEntry(dtype=dtype, shape=shape, file=n) for name, (dtype, shape, n) in merged.own.items()}
    manifest = Manifest(
        position=Position(step=index, next_batch=index, loss_scale=LossScale()),
        world_size=ranks,
        job=Job().model_dump(mode="json"),
        versions={},
        files={file_name(rank): FileEntry(**report["file"]) for rank, report in enumerate(found)},
        tensors={name: TensorEntry(**entry._asdict()) for name, entry in merged.tensors.items()} | own,
        layouts=tuple(merged.layouts),
    )
    write_manifest(manifest, folder)
    return manifest


def read_slices(folder: Path, rank: int, ranks: int) -> int:
    """Find the slices of a rank, in a checkpoint of this size, as a resumed run does; returns the number of files."""
    manifest, files = read_manifest(folder, share=(rank, ranks)), set[str]()
    with Reader(folder, manifest) as reader:
        for name, (shape, split) in weights_of_70b().items():
            if box := box_of(shape, split, rank % TP, rank // TP, ranks // TP):
                for kind in ("weights", "exp_avg", "exp_avg_sq"):
                    files |= reader.files_of(f"{kind}/{name}", *box)
    return len(files)


def checkpoint(ranks: int, figures: Figures) -> None:
    """Reports, manifest, and the search for slices."""
    store, tables = CountedStore(), tables_of(ranks)
    senders = [Reports(store, "snapshot", rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    reader = Reports(store, "snapshot", 0, ranks)  # type: ignore[arg-type]
    with TemporaryDirectory() as name:
        for index, which in enumerate(("first checkpoint", "next checkpoints")):
            store.requests = store.bytes = 0
            for sender, table in zip(senders, tables, strict=True):
                if index == 0:
                    sender.describe(table)
                sender.send(index, file={"bytes": 10**12, "blake3": "0" * 64}, host=f"host-{sender.rank // 8}")
            figures.time(
                f"{which}, rank 0", ranks, lambda i=index: commit(reader, i, ranks, Path(name)), memory=index == 1
            )
            figures.add(f"{which}, store: requests a rank", ranks, store.requests / ranks)
            figures.add(f"{which}, store: MB", ranks, store.bytes / 1e6)
        figures.add("manifest: MB", ranks, (Path(name) / "manifest.json").stat().st_size / 1e6)
        figures.time("a rank finds its slices", ranks, lambda: read_slices(Path(name), ranks // 2, ranks), memory=True)


# Membership

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
            for operation, fields in ([(COMPARE_SET, [f"host-{index}", "", record(index)])] if version == 0 else []) + [
                (CHANGES, [f"host-{index}", str(version), str(interval)])
            ]:
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
    """Core and traffic of host 0 for the hosts of a job, 8 ranks each: while all join, afterwards, and after a failure."""
    hosts, seconds, heard = ranks // 8, 30.0, Queue()
    with TemporaryDirectory() as folder, MeasuredStore(Path(folder, "store")) as server:
        processes = [
            Process(target=_fake_hosts, args=(server.path, range(n, hosts, 2), hosts, seconds, heard)) for n in range(2)
        ]
        for process in processes:
            process.start()
        before = server.bytes
        time.sleep(10)
        figures.add("joining, host 0: MB", ranks, (server.bytes - before) / 1e6)
        before, cpu = server.bytes, time.process_time()
        time.sleep(10)
        figures.add("host 0: % of a core", ranks, (time.process_time() - cpu) * 10)
        figures.add("host 0: MB/s", ranks, (server.bytes - before) / 1e7)
        begin = time.monotonic()
        SocketStore(server.path).set("host-5", record(5, FAILURE))
        counts, times = zip(*(heard.get() for _ in processes), strict=True)
        assert sum(counts) == hosts, counts
        figures.add("a failure is known on all hosts: s", ranks, max(times) - begin)
        for process in processes:
            process.join()


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


PARTS: dict[str, Callable[[int, Figures], None]] = {"start": start, "membership": membership, "checkpoint": checkpoint}


def main(arguments: Sequence[str]) -> None:
    """Run the parts that are named, or all."""
    chosen = [name for name in arguments if name in PARTS] or list(PARTS)
    ranks = [int(text) for text in arguments if text.isdigit()] or RANKS
    print(f"{Cpu().name}: {Cpu().instruction_set}")
    for name in chosen:
        figures = Figures()
        for count in ranks:
            PARTS[name](count, figures)
        figures.print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
