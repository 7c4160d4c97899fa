"""Which ranks write the slices that several hold: each element once, and equally many."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from weft.checkpoint import shares as module
from weft.checkpoint.shares import UNKNOWN, boxes_of, digest, own_names, shares, table_of
from weft.checkpoint.slices import TensorSlice

Place = tuple[str, tuple[int, ...], tuple[int, ...]]


def random_ranks(seed: int, ranks: int) -> list[list[TensorSlice]]:
    """Slices of ranks in two stages: sharded, replicated and tied weights, counters, and rows in random places."""
    random = np.random.default_rng(seed)
    found: list[list[TensorSlice]] = [[] for _ in range(ranks)]
    for stage in range(2):
        members = [rank for rank in range(ranks) if rank % 2 == stage or seed % 3 == 0]
        for n in range(8):
            parts = int(random.integers(1, len(members) + 1))
            full = (1024, 600)
            moved = random.permutation(len(members)) if n == 7 else np.arange(len(members))
            for place, rank in zip(moved.tolist(), members, strict=True):
                part = place % parts  # ranks with the same part are replicas
                first, last = (1024 * end // parts for end in (part, part + 1))
                tensor = torch.empty(last - first, 600, device="meta")
                found[rank].append(TensorSlice(f"weights/{stage}.{n}", tensor, (first, 0), full))
                found[rank].append(TensorSlice(f"step/{stage}.{n}", torch.empty((), device="meta"), (), ()))
    for slices in found:
        slices.append(TensorSlice("weights/tied", torch.empty(1024, 600, device="meta"), (0, 0), (1024, 600)))
        slices.append(TensorSlice("buffers/inv_freq", torch.empty(32, device="meta"), (0,), (32,)))
    return found


def divided(found: list[list[TensorSlice]]) -> list[list[TensorSlice]]:
    """Shares of all ranks, as `divide` has them."""
    boxes = [boxes_of(slices) for slices in found]
    tables = np.stack([table_of(each, max(map(len, boxes))) for each in boxes])
    told = np.stack([own_names(each, tables, rank) for rank, each in enumerate(boxes)])
    assert ((told != UNKNOWN).sum(0) == 1).all()  # one rank tells each name
    return [shares(s, b, tables, told.max(0), r) for r, (s, b) in enumerate(zip(found, boxes, strict=True))]


def place_of(item: TensorSlice) -> Place:
    return item.name, item.offset, tuple(item.tensor.shape)


@pytest.mark.parametrize("seed", range(12))
def test_shares_are_those_of_a_comparison_of_all_slices(seed: int) -> None:
    """Reference: the ranks that hold each slice, from the slices of all ranks."""
    found = random_ranks(seed, 6)
    holders: dict[Place, list[int]] = {}
    for rank, slices in enumerate(found):
        for item in slices:
            holders.setdefault(place_of(item), []).append(rank)
    expected: list[list[Place]] = [[] for _ in found]
    for (name, offset, shape), ranks in holders.items():
        rows = shape[0] if shape else 1
        count = max(1, min(len(ranks), rows, math.ceil(4 * math.prod(shape) / module.MIN_SHARE_BYTES)))
        for index in range(count):
            rank = ranks[(index - digest(f"{name} {offset} {shape}")) % len(ranks)]
            first, last = (rows * end // count for end in (index, index + 1))
            whole = (name, offset, shape)
            part = (name, (offset[0] + first, *offset[1:]), (last - first, *shape[1:])) if count > 1 else whole
            expected[rank].append(part)
    shares_of_ranks = divided(found)
    assert [sorted(map(place_of, each)) for each in shares_of_ranks] == [sorted(each) for each in expected]
    written = Counter[str]()
    for item in (item for each in shares_of_ranks for item in each):
        written[item.name] += item.tensor.numel()
    assert written == {item.name: math.prod(item.full_shape) for slices in found for item in slices}


def test_many_tensors_of_a_few_shapes_take_a_few_lines() -> None:
    tensors = [torch.empty(8, 4, device="meta"), torch.empty(4, device="meta")]
    slices = [TensorSlice(str(n), tensors[n % 2], (8, 0)[: 2 - n % 2], (64, 4)[n % 2 :]) for n in range(1000)]
    boxes = boxes_of(slices)
    assert len(table_of(boxes, len(boxes))) == 2
    assert sorted(map(len, boxes.values())) == [500, 500]
