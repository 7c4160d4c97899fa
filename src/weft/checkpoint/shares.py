"""Which of the ranks that hold the same slice writes it.

    box     offset and shape of a slice          most tensors of a rank have the box of many others
    set     names of the tensors with that box   the ranks of a pipeline stage have the same sets

Each rank sends a line for each of its boxes, with a digest of the set, and one rank sends the names in each set: a few hundred
bytes a rank, where digests of all slices would be 177 MB on each of 10,240 ranks of a Llama of 70B.
"""

import hashlib
import math

import numpy as np
import torch
import torch.distributed as dist

from weft.checkpoint.slices import TensorSlice
from weft.comm.few_rounds import gather_rows, largest

MIN_SHARE_BYTES = 2**20  # ranks that hold the same slice divide it into shares of at least this size
UNKNOWN = -(2**63)

Boxes = dict[int, np.ndarray]
"""Sorted digests of the names of the tensors of which a rank holds a slice, int64 [tensors], by the digest of its box."""


def divide(slices: list[TensorSlice]) -> list[TensorSlice]:
    """Divide the writing of slices among the ranks that hold them; returns the share of this rank. Collective.

    Each slice is written exactly once. n ranks that hold the same slice write 1/n of it each, along its first dim. A small
    slice is written by a single rank; small slices are spread over the ranks.

    Args:
        slices: slices that this rank holds.
    """
    boxes, rank, group = boxes_of(slices), dist.get_rank(), dist.group.WORLD
    assert group is not None, "there is no process group"
    (most,) = largest([max(1, len(boxes))], group)
    tables = gather_rows(torch.from_numpy(table_of(boxes, most).ravel()), group).view(-1, most, 3).numpy()
    names = largest(own_names(boxes, tables, rank).tolist(), group)
    return shares(slices, boxes, tables, np.array(names, np.int64), rank)


def boxes_of(slices: list[TensorSlice]) -> Boxes:
    """Boxes of the slices of a rank."""
    found: dict[int, list[int]] = {}
    for item in slices:
        found.setdefault(box_digest(item.offset, tuple(item.tensor.shape)), []).append(digest(item.name))
    return {box: np.sort(np.array(names, np.int64)) for box, names in found.items()}


def table_of(boxes: Boxes, lines: int) -> np.ndarray:
    """Digest of each box, digest of its set of names, and their number, int64 [lines, 3]; the last lines are zeros."""
    table = np.zeros((lines, 3), np.int64)
    for line, (box, names) in enumerate(boxes.items()):
        table[line] = box, _set_digest(names), len(names)
    return table


def own_names(boxes: Boxes, tables: np.ndarray, rank: int) -> np.ndarray:
    """Names in all sets, one set after another, int64; `UNKNOWN` are those in sets that an earlier rank has, or other ranks.

    Args:
        boxes: boxes of this rank.
        tables: tables of all ranks, int64 [ranks, lines, 3].
        rank: this rank.
    """
    own = {_set_digest(names): names for names in boxes.values()}
    sets, first, ends = _sets(tables)
    result = np.full(int(ends[-1]), UNKNOWN)
    for name, line, part in zip(sets.tolist(), first.tolist(), np.split(result, ends[:-1]), strict=True):
        if line // tables.shape[1] == rank and len(part):
            part[:] = own[name]
    return result


def shares(
    slices: list[TensorSlice], boxes: Boxes, tables: np.ndarray, names: np.ndarray, rank: int
) -> list[TensorSlice]:
    """Parts of its slices that a rank writes.

    Args:
        slices: slices of this rank.
        boxes, tables, rank: as of `own_names`.
        names: names in all sets, from all ranks.
    """
    sets, _, ends = _sets(tables)
    names_of = dict(zip(sets.tolist(), np.split(names, ends[:-1]), strict=True))
    ranks, lines = np.nonzero(np.isin(tables[:, :, 0], [*boxes]) & (tables[:, :, 2] > 0))
    found = tables[ranks, lines]
    holders: dict[tuple[int, int], tuple[int, int]] = {}  # number of those before this rank, and of all
    for box, own in boxes.items():
        here = found[:, 0] == box
        others, place = np.unique(found[here, 1], return_inverse=True)
        has = np.stack([np.isin(own, names_of[other]) for other in others.tolist()])[place]  # [ranks, names]
        counts = has[ranks[here] < rank].sum(0).tolist(), has.sum(0).tolist()
        holders |= {(box, name): count for name, count in zip(own.tolist(), zip(*counts, strict=True), strict=True)}
    return [
        share
        for item in slices
        for share in _share(item, *holders[box_digest(item.offset, tuple(item.tensor.shape)), digest(item.name)])
    ]


def box_digest(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Digest of an offset and a shape."""
    return digest(f"{offset} {shape}")


def digest(text: str) -> int:
    """Digest of 64 bits, with sign."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _set_digest(names: np.ndarray) -> int:
    return digest(names.tobytes().hex())


def _sets(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Digests of all sets of names, the first line of each, and the ends of the sets one after another."""
    lines = tables.reshape(-1, 3)
    sets, first = np.unique(lines[:, 1], return_index=True)
    return sets, first, np.cumsum(lines[first, 2])


def _share(item: TensorSlice, before: int, holders: int) -> list[TensorSlice]:
    """Part of a slice that a rank writes, after `before` of its holders; empty if other ranks write it."""
    tensor = item.tensor
    rows = tensor.shape[0] if tensor.ndim else 1
    num_shares = max(1, min(holders, rows, math.ceil(tensor.nbytes / MIN_SHARE_BYTES)))
    key = digest(f"{item.name} {item.offset} {tuple(tensor.shape)}")  # it spreads small slices over their holders
    index = (before + key) % holders
    if index >= num_shares:
        return []
    if num_shares == 1:
        return [item]
    start, stop = rows * index // num_shares, rows * (index + 1) // num_shares
    offset = (item.offset[0] + start, *item.offset[1:])
    return [item._replace(tensor=tensor[start:stop], offset=offset)]
