"""Hierarchical collectives equal flat ones, on ranks with patched host identities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.backends.test_shared_memory import FLOATS, numbers, results
from tests.device.links import two_level_topology
from tests.lab.pool import run_ranks
from weft.backends import hierarchical
from weft.backends.hierarchical import TwoLevelGroup, register_backend
from weft.backends.instrumented import GlooGroup
from weft.backends.shared_memory import SharedMemoryGroup
from weft.comm.recorder import Recorder
from weft.plan import Comm
from weft.topology.mesh import choose_hierarchy


def make_group(rank: int, hosts: Sequence[int], forced: str = "auto") -> Any:
    """Create a group whose rank r is on host hosts[r]."""
    with mock.patch.object(hierarchical, "host_id", return_value=[f"host {hosts[rank]}"]):
        return dist.new_group(backend=register_backend(forced))


def compare(rank: int, ranks: int, count: int, dtype: torch.dtype, steps: int) -> None:
    group = make_group(rank, [peer // 2 for peer in range(ranks)], "two_level")
    assert isinstance(group, TwoLevelGroup)
    with mock.patch.object(hierarchical, "PIECE", 2 * hierarchical.SMALL):
        found = results(group, rank, ranks, count, dtype, steps)
    expected = results(dist.group.WORLD, rank, ranks, count, dtype, 1)  # gloo does not support strided tensors
    for index, (actual, reference) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(actual, reference), index


@pytest.mark.parametrize("count", [1, 3, 1000, 5001, 3 * hierarchical.SMALL + 1])
def test_sizes(count: int) -> None:
    run_ranks(4, compare, count, torch.float32, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype) -> None:
    run_ranks(4, compare, 5001, dtype, 1)


def test_strided_tensors() -> None:
    run_ranks(4, compare, 5001, torch.float32, 3)


@pytest.mark.must("parity: hierarchical collectives")
def test_three_hosts() -> None:
    run_ranks(6, compare, 4100, torch.float32, 1)


def kind(rank: int, ranks: int, hosts: list[int], forced: str) -> type:
    group = make_group(rank, hosts, forced)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [ranks] * 3
    return type(group)


@pytest.mark.parametrize(
    ("hosts", "forced", "expected"),
    [
        ([0, 0, 0, 0], "auto", SharedMemoryGroup),
        ([0, 0, 1, 1], "auto", TwoLevelGroup),
        ([0, 0, 1, 1], "two_level", TwoLevelGroup),
        ([0, 0, 1, 1], "flat", GlooGroup),
        ([0, 1, 2, 3], "auto", GlooGroup),
        ([0, 0, 0, 1], "auto", GlooGroup),  # different numbers of ranks per host
        ([0, 1, 0, 1], "auto", GlooGroup),  # ranks not numbered host after host
    ],
)
def test_group_type_by_host_layout(hosts: list[int], forced: str, expected: type) -> None:
    assert run_ranks(4, kind, hosts, forced) == [expected] * 4


def several_at_once(rank: int, ranks: int) -> None:
    group = make_group(rank, [peer // 2 for peer in range(ranks)])
    tensors = [numbers(rank, 9000 + i, torch.float32) for i in range(4)]
    expected = [tensor.clone() for tensor in tensors]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for tensor, work in zip(expected, works, strict=True):
        work.wait()
        work.wait()  # a second wait has no effect
        dist.all_reduce(tensor)
    for actual, reference in zip(tensors, expected, strict=True):
        assert torch.equal(actual, reference)


def test_several_all_reduces_in_flight() -> None:
    run_ranks(4, several_at_once)


def messages(rank: int, ranks: int) -> dict[str, dict[str, int]]:
    found = {}
    for forced in ("auto", "flat"):
        group = make_group(rank, [peer // 2 for peer in range(ranks)], forced)
        x, wide = torch.ones(40000), torch.ones(160000)
        with Recorder() as recorder:
            dist.all_reduce(x, group=group)
            dist.all_gather_into_tensor(wide, x, group=group)
            dist.reduce_scatter_tensor(x, wide, group=group)
        found[forced] = recorder.bytes_by("link")
    return found


def test_traffic_between_hosts_is_shared_by_the_ranks_of_a_host() -> None:
    full, wide = 4 * 40000, 4 * 160000
    for found in run_ranks(4, messages):
        # Each host sends half of the tensor to the other host: a quarter per rank, in each of the two steps of an all-reduce.
        assert found["auto"]["between"] == 2 * full // 4 + wide // 4 + wide // 4
        # A ring sends the same number of bytes over each link; one link leaves each host.
        assert found["flat"] == {"": 2 * full * 3 // 4 + 2 * wide * 3 // 4}
        assert found["flat"][""] / (2 * found["auto"]["between"]) == 1.5


@pytest.mark.parametrize(
    ("change", "ranks", "expected"),
    [
        ({}, [0, 1, 2, 3], "auto"),  # a hierarchical all-to-all sends equal bytes between hosts, and more inside
        ({"latency_seconds": 0.5}, [0, 1, 2, 3], "two_level"),  # fewer messages
        ({}, [0, 1], "flat"),  # ranks of one host
        ({}, [0, 2], "flat"),  # one rank per host
    ],
)
def test_hierarchy_is_chosen_by_the_declared_topology(
    tmp_path: Path, change: dict[str, float], ranks: list[int], expected: str
) -> None:
    known = two_level_topology(2, 2)
    slow = known.links[1].model_copy(update=change)
    path = tmp_path / "cluster.toml"
    path.write_text(known.model_copy(update={"links": (known.links[0], slow)}).to_toml())
    assert choose_hierarchy(Comm(topology=str(path)), ranks) == expected
    assert choose_hierarchy(Comm(topology=str(path), hierarchy="flat"), ranks) == "flat"
    assert choose_hierarchy(Comm(), ranks) == "auto"
