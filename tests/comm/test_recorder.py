"""The recorder records operation, axis, bytes, dtype and call site, both for shared memory and for gloo."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lab.pool import run_ranks
from weft.backends import shared_memory
from weft.comm.recorder import Message, Recorder, is_skipped
from weft.plan import Parallel, Plan
from weft.topology.mesh import build_mesh


def record(rank: int, ranks: int, shared: bool) -> list[Message]:
    with mock.patch.object(shared_memory, "can_share", return_value=shared):
        mesh = build_mesh(Plan(parallel=Parallel(zero=1)), "cpu", ranks)
    group = mesh.get_group("dp_shard")
    assert isinstance(group, shared_memory.SharedMemoryGroup) == shared
    x, half, double = torch.ones(8), torch.ones(4), torch.ones(16, dtype=torch.bfloat16)
    with Recorder() as recorder:
        dist.all_reduce(x, group=group)
        dist.reduce_scatter_tensor(half, x, group=group)
        dist.all_gather_into_tensor(double, double[:8].clone(), group=group)
        dist.all_to_all_single(
            x[:4].clone(), x[: 3 if rank else 5].clone(), [2, 2] if rank else [3, 1], [1, 2] if rank else [3, 2], group
        )
        dist.broadcast(x, 0, group)
        dist.all_reduce(x)
    dist.all_reduce(x, group=group)  # outside the context, not recorded
    return recorder.messages


@pytest.mark.parametrize("shared", [True, False])
def test_recorded_messages(shared: bool) -> None:
    first, second = run_ranks(2, record, shared)
    assert [(m.operation, m.axis, m.bytes, m.dtype) for m in first] == [
        ("all_reduce", "dp_shard", 32, torch.float32),
        ("reduce_scatter", "dp_shard", 16, torch.float32),
        ("all_gather", "dp_shard", 16, torch.bfloat16),
        ("all_to_all", "dp_shard", 8, torch.float32),
        ("broadcast", "dp_shard", 32, torch.float32),
        ("all_reduce", "world", 32, torch.float32),
    ]
    assert second[3].bytes == 4  # one of three rows leaves the rank
    assert {message.site.split(":")[0] for message in first} == {"test_recorder.py"}
    assert len({message.site for message in first}) == 6


@pytest.mark.parametrize(
    ("file", "skipped"),
    [
        ("lib/weft/comm/collectives.py", True),
        ("lib/weft/planner/dryrun/modes.py", True),
        ("lib/weft/parallel/tensor/tensor_parallel.py", False),
        ("lib/torch/distributed/fsdp/x.py", True),
        ("scripts/train.py", False),
    ],
)
def test_call_sites_of_an_installed_weft_are_its_own_modules(file: str, skipped: bool) -> None:
    assert is_skipped(file, weft="lib/weft", packages="lib") == skipped
