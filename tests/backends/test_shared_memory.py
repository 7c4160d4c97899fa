"""Shared-memory collectives equal those of gloo, report mismatches between ranks, and leave no open files."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.lab.pool import run_ranks
from weft.backends.hierarchical import register_backend
from weft.backends.shared_memory import SLAB_BYTES, SLOT_BYTES, SharedMemoryGroup, share_memory
from weft.errors import CommunicationError

FLOATS = [torch.float32, torch.bfloat16, torch.float64]
LARGE = SLOT_BYTES // 4 + 12  # more float32 elements than fit a slot, and not a multiple of the slot size


def numbers(rank: int, count: int, dtype: torch.dtype, steps: int = 1) -> Tensor:
    """Integer values, so that sums are exact in any order; a view of every `steps`-th element of a longer tensor."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.empty(count * steps, dtype=dtype)[::steps]
    return values.copy_(torch.randint(-9, 9, (count,), generator=generator))


def results(group: Any, rank: int, ranks: int, count: int, dtype: torch.dtype, steps: int) -> list[Tensor]:
    """Results of all collectives."""
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        x = numbers(rank, count, dtype, steps)
        dist.all_reduce(x, op, group)
        found.append(x)
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, numbers(rank, count * ranks, dtype, steps).contiguous(), op, group)
        found.append(out)
    gathered = torch.empty(count * ranks, dtype=dtype)
    dist.all_gather_into_tensor(gathered, numbers(rank, count, dtype, steps).contiguous(), group)
    rows = [torch.empty(count, dtype=dtype) for _ in range(ranks)]
    dist.all_gather(rows, numbers(rank, count, dtype, steps).contiguous(), group)
    scattered = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(scattered, [numbers(rank + i, count, dtype) for i in range(ranks)], group=group)
    x = numbers(rank, count, dtype, steps).contiguous()
    dist.broadcast(x, group=group, group_src=ranks - 1)
    swapped = torch.empty(count * ranks, dtype=dtype)
    dist.all_to_all_single(swapped, numbers(rank, count * ranks, dtype, steps).contiguous(), group=group)
    input_splits = [(rank * 3 + peer * 5) % 4 * count for peer in range(ranks)]
    output_splits = [(peer * 3 + rank * 5) % 4 * count for peer in range(ranks)]
    uneven = torch.empty(sum(output_splits), 2, dtype=dtype)
    rows_out = numbers(rank, 2 * sum(input_splits), dtype).view(-1, 2)
    dist.all_to_all_single(uneven, rows_out, output_splits, input_splits, group)
    functional = [funcol.all_reduce(swapped, "sum", group), funcol.all_gather_tensor(swapped, 0, group)]
    functional += [funcol.reduce_scatter_tensor(swapped, "sum", 0, group)]
    functional = [tensor.wait() if hasattr(tensor, "wait") else tensor for tensor in functional]
    neighbour = torch.empty(count, dtype=dtype)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, neighbour, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    for request in requests:
        request.wait()
    dist.barrier(group)
    return [*functional, neighbour, *found, gathered, *rows, scattered, x, swapped, uneven]


def compare(rank: int, ranks: int, count: int, dtype: torch.dtype, steps: int) -> None:
    group = dist.new_group(backend=register_backend())
    assert isinstance(group, SharedMemoryGroup)
    assert dist.get_backend(group) == "weft"
    ours = results(group, rank, ranks, count, dtype, steps)
    theirs = results(dist.group.WORLD, rank, ranks, count, dtype, 1)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 1001, LARGE])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sizes(ranks: int, count: int) -> None:
    run_ranks(ranks, compare, count, torch.float32, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype) -> None:
    run_ranks(4, compare, 5000, dtype, 1)


def test_strided_tensors() -> None:
    run_ranks(2, compare, 5000, torch.float32, 3)


def gradients_reduced(rank: int, ranks: int, count: int) -> None:
    x = torch.full((count,), rank + 1.0, requires_grad=True)
    total = x.clone()
    dist.all_reduce(total, group=dist.new_group(backend=register_backend()))
    torch.testing.assert_close(total, torch.full((count,), ranks * (ranks + 1) / 2))
    total.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(count))


@pytest.mark.parametrize("count", [8, LARGE])
def test_tensors_that_require_gradients(count: int) -> None:
    run_ranks(3, gradients_reduced, count)


def short_sum(rank: int, ranks: int, count: int) -> Tensor:
    group = dist.new_group(backend=register_backend())
    x = torch.full((count,), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    dist.all_reduce(x, group=group)
    mean = torch.full((count,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group)
    assert torch.equal(mean, torch.full((count,), (ranks - 1) / 2))
    return x


@pytest.mark.parametrize("count", [8, 50_000])
def test_bf16_is_summed_in_float32(count: int) -> None:
    """1 + 3 * 2^-8 = 1.01171875 rounds to 1.015625; an accumulation in bf16 would lose every addend."""
    sums = run_ranks(4, short_sum, count)
    assert sums[0][0].item() == 1.015625
    assert all(torch.equal(sums[0], other) for other in sums)


def disagree(rank: int, ranks: int, kind: str) -> str:
    group = dist.new_group(backend=register_backend(), timeout=timedelta(seconds=1))
    try:
        if kind == "size":
            dist.all_reduce(torch.ones(3 + (rank == 1)), group=group)
        elif kind == "dtype":
            dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank else torch.float64), group=group)
        elif kind == "operation":
            (dist.all_reduce if rank else dist.broadcast)(torch.ones(3), *([] if rank else [0]), group=group)
        elif kind == "splits":
            dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 3], group)
        elif rank == 0:  # alone
            dist.barrier(group)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("size", "4 elements"),
        ("dtype", "float64"),
        ("operation", "broadcast of 3 elements"),
        ("splits", "expects [2, 2] elements"),
    ],
)
def test_mismatched_collective_is_an_error_on_every_rank(kind: str, words: str) -> None:
    for text in run_ranks(2, disagree, kind):
        assert words in text
        assert "fix:" in text


def test_missing_rank_is_named() -> None:
    assert "rank 1 of group" in run_ranks(2, disagree, "alone")[0]


def descriptors(rank: int, ranks: int) -> list[str]:
    dist.new_group(backend=register_backend())
    folder = "/proc/self/fd"
    return [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.exists(f"{folder}/{fd}")]


def test_slab_descriptors_are_closed() -> None:
    for links in run_ranks(2, descriptors):
        assert not [link for link in links if "memfd" in link]


@pytest.mark.must("fault: Another process offers a piece of shared memory")
@pytest.mark.parametrize("kind", ["file of this process", "other process", "small memory file", "invalid text"])
def test_foreign_slab_address_is_not_mapped(kind: str, tmp_path: Path) -> None:
    """The address in the store comes from an unrelated process."""
    store = dist.HashStore()
    with (tmp_path / "precious").open("w+b") as file:
        file.truncate(SLAB_BYTES)
        addresses = {"file of this process": (os.getpid(), file.fileno()), "other process": (1, 0)}
        small = os.memfd_create("weft")
        address = json.dumps(addresses.get(kind, (os.getpid(), small))) if kind != "invalid text" else '["a", {}]'
        store.set("slab/1", address)
        store.set("open/1", "2")
        assert share_memory(store, 0, 2, timedelta(seconds=5), lambda: None) is None
        os.close(small)
        assert os.stat(file.fileno()).st_blocks == 0  # nothing was written into it
