"""Dispatch modes of a dry run: real control tensors, fake data tensors, collectives on real tensors, fused attention."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft.planner.dryrun import trace
from weft.planner.dryrun.modes import LARGEST_CONTROL_BYTES, FusedAttention, RealControlTensors, fake_world


@pytest.fixture
def dry() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), RealControlTensors():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


@pytest.mark.usefixtures("dry")
def test_integer_tensors_are_real_and_float_tensors_fake() -> None:
    positions = torch.arange(6).view(2, 3)
    assert (positions.diff() == 1).all()
    assert positions.sum().item() == 15
    assert is_fake(torch.zeros(3))
    assert is_fake(torch.ones(4, 5)[torch.tensor([1, 2])])
    assert is_fake(F.embedding(positions, torch.ones(6, 8)))


@pytest.mark.usefixtures("dry")
def test_large_tensors_are_fake() -> None:
    side = 2 * int(LARGEST_CONTROL_BYTES**0.5)
    positions = torch.arange(side)
    assert not is_fake(positions)
    assert is_fake(positions[:, None] >= positions)
    assert is_fake(torch.zeros(LARGEST_CONTROL_BYTES + 1, dtype=torch.bool))


@pytest.mark.usefixtures("dry")
def test_fake_scalar_read_by_the_host_is_one() -> None:
    assert torch.zeros(()).item() == 1.0
    assert float(torch.ones(4).norm()) == 1.0


@pytest.mark.usefixtures("dry")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul_has_shapes_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(12, 16, dtype=dtype, requires_grad=True)
    weight = torch.ones(3, 16, 8, dtype=dtype, requires_grad=True)
    out = F.grouped_mm(x, weight, offs=torch.tensor([4, 8, 12], dtype=torch.int32))
    assert out.shape == (12, 8)
    out.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize(
    ("load", "free"),
    [
        ("0.10 1.00 1.00 1/99 7", 4),  # nothing else runs
        ("4.00 1.00 1.00 1/99 7", 4),  # this process used all cores in the minute before
        ("0.10 1.00 1.00 5/99 7", 4),  # others run for a moment
        ("2.00 1.00 1.00 3/99 7", 2),
        ("9.00 1.00 1.00 9/99 7", 1),
    ],
)
def test_dry_runs_use_cores_that_others_leave_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: str, free: int
) -> None:
    (tmp_path / "loadavg").write_text(load)
    monkeypatch.setattr(trace, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert trace.free_cores() == free


def test_collectives_on_real_tensors_assume_equal_ranks() -> None:
    with fake_world(2, 4), FakeTensorMode(allow_non_fake_inputs=True), RealControlTensors():
        count = torch.tensor([3])
        dist.all_reduce(count)
        assert count.item() == 12
        gathered = torch.empty(8, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([1, 2]))
        assert gathered.tolist() == [1, 2] * 4
        received = torch.empty(4, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor([5, 6, 7, 8]))  # rank 2 gets element 2 of every rank
        assert received.tolist() == [7] * 4
    assert not dist.is_initialized()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value_size", [32, 16])
def test_fused_attention_has_the_same_shapes(masked: bool, value_size: int) -> None:
    def run() -> list[torch.Size]:
        q = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        k = torch.zeros(2, 2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        v = torch.zeros(2, 2, 16, value_size, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(2, 1, 16, 16, dtype=torch.bool) if masked else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
        out.sum().backward()
        return [out.shape, *(x.grad.shape for x in (q, k, v) if x.grad is not None)]

    expected = run()
    assert len(expected) == 4
    with FakeTensorMode(allow_non_fake_inputs=True), RealControlTensors(), FusedAttention():
        assert run() == expected
