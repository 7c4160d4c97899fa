"""Costs of a job that grow with the number of its ranks, by simulation: no process group, synthetic reports and clients.

    export PYTHONPATH=.                              # in the root of a checkout
    python benchmarks/scale.py                       # every part at 64 to 10,240 ranks
    python benchmarks/scale.py checkpoint 128 1024   # one part, at some numbers of ranks

Each part calls the functions that a run calls, with what the ranks of such a job would send. Printed are seconds of CPU of
the one process that does the work, bytes, peak memory that it allocated, and the exponent with which each grows.
"""

import json
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.figures import Figures
from benchmarks.scale_start import membership, start
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
from weft.checkpoint.shares import Boxes, box_digest, boxes_of, digest, own_names, shares, table_of
from weft.checkpoint.slices import TensorSlice
from weft.device.cpu import Cpu
from weft.job import Job
from weft.precision.scaling import LossScale

RANKS = (64, 256, 1024, 4096, 10240)
Shape = tuple[int, ...]


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


def slices_of(rank: int, ranks: int) -> list[TensorSlice]:
    """Slices of weights, moments and step counters that a rank holds."""
    found = [TensorSlice(f"step/{name}", torch.empty((), device="meta"), (), ()) for name in weights_of_70b()]
    for name, (shape, split) in weights_of_70b().items():
        if box := box_of(shape, split, rank % TP, rank // TP, ranks // TP):
            part = torch.empty(box[1], device="meta")
            found += [
                TensorSlice(f"{kind}/{name}", part, box[0], shape) for kind in ("weights", "exp_avg", "exp_avg_sq")
            ]
    return found


def sharing(ranks: int, figures: Figures) -> None:
    """Which of the ranks that hold a slice writes it: what a rank receives, and its computation."""
    rank, names = ranks // 2, dict[tuple[Shape, int | None], list[int]]()
    for name, fact in weights_of_70b().items():
        names.setdefault(fact, []).extend(digest(f"{kind}/{name}") for kind in ("weights", "exp_avg", "exp_avg_sq"))
    sets = {fact: np.sort(found) for fact, found in names.items()}
    slices = slices_of(rank, ranks)
    counters = {box: found for box, found in boxes_of(slices).items() if box == box_digest((), ())}

    def boxes(other: int) -> Boxes:
        held: dict[int, list[np.ndarray]] = {}
        for fact, found in sets.items():
            if box := box_of(*fact, other % TP, other // TP, ranks // TP):
                held.setdefault(box_digest(*box), []).append(found)
        return counters | {
            box: found[0] if len(found) == 1 else np.sort(np.concatenate(found)) for box, found in held.items()
        }

    assert table_of(boxes(rank), 20).sum() == table_of(boxes_of(slices), 20).sum()
    every = [boxes(other) for other in range(ranks)]
    most = max(map(len, every))
    tables = np.stack([table_of(each, most) for each in every])
    owners = np.unique(np.unique(tables[:, :, 1], return_index=True)[1] // most)  # the others tell no names
    told = np.max([own_names(every[other], tables, other) for other in owners.tolist()], 0)
    figures.add("slices that a rank holds", ranks, len(slices))
    figures.add("a rank receives: MB", ranks, (tables.nbytes + told.nbytes) / 1e6)
    figures.time(
        "a rank finds its shares", ranks, lambda: shares(slices, boxes_of(slices), tables, told, rank), memory=True
    )


PARTS: dict[str, Callable[[int, Figures], None]] = {
    "start": start,
    "membership": membership,
    "checkpoint": checkpoint,
    "sharing": sharing,
}


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
