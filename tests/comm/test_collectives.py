"""Each differentiable collective equals its definition on full tensors, with non-contiguous gradients."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lab.pool import run_ranks
from weft.backends.hierarchical import register_backend
from weft.comm import collectives

SHAPE = (4, 6, 8)


def inputs(ranks: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(ranks)]


def apply(rank: int, ranks: int, name: str, dim: int, shared: bool, same: bool) -> tuple[Tensor, Tensor]:
    """Output and input gradient of one collective, for a non-contiguous gradient of the output."""
    group = dist.new_group(backend=register_backend() if shared else "gloo")
    x = inputs(1 if same else ranks)[0 if same else rank]
    function = getattr(collectives, name)
    if name == "copy":
        (out,) = function(group, x)
    elif name == "start_all_to_all":
        out = function(x, group)()
    else:
        out = function(x, group) if name == "reduce" else function(x, group, dim)
    out.backward(weights(out.shape, 0 if same and name != "split" else rank))
    assert x.grad is not None
    return out.detach(), x.grad


def weights(shape: torch.Size, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(*range(len(shape))[::-1])


DEFINITIONS: dict[str, Callable[[list[Tensor], int], list[Tensor]]] = {
    "copy": lambda xs, dim: xs,
    "reduce": lambda xs, dim: [torch.stack(xs).sum(0)] * len(xs),
    "gather": lambda xs, dim: [torch.cat(xs, dim)] * len(xs),
    "reduce_scatter": lambda xs, dim: list(torch.stack(xs).sum(0).chunk(len(xs), dim)),
    "start_all_to_all": lambda xs, dim: [torch.cat([x.chunk(len(xs))[i] for x in xs]) for i in range(len(xs))],
}


def gradients_of_copies(rank: int, ranks: int) -> list[Tensor | None]:
    """Gradients of three copies: all ranks use the first, one uses the second, and none uses the third."""
    xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    first, second, _ = collectives.copy(dist.new_group(), *xs)
    ((first + second).sum() if rank == 1 else first.sum()).backward()
    return [x.grad for x in xs]


def test_a_copy_that_no_rank_uses_has_no_gradient() -> None:
    for found in run_ranks(2, gradients_of_copies):
        assert [gradient if gradient is None else gradient.tolist() for gradient in found] == [[2, 2], [1, 1], None]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["gather", "reduce_scatter", "start_all_to_all"])
def test_collectives_into_different_work_sum_gradients(name: str, dim: int, shared: bool) -> None:
    """The input gradient is that of the sum of the losses of all ranks."""
    xs = inputs(2)
    outs = DEFINITIONS[name](xs, dim)
    torch.autograd.backward(outs, [weights(out.shape, rank) for rank, out in enumerate(outs)])
    found = run_ranks(2, apply, name, dim, shared, False)
    for (out, gradient), expected, x in zip(found, outs, xs, strict=True):
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=0)
        torch.testing.assert_close(gradient, x.grad)


def test_copy_sums_gradients() -> None:
    for out, gradient in run_ranks(2, apply, "copy", 0, True, True):
        torch.testing.assert_close(out, inputs(1)[0].detach(), rtol=0, atol=0)
        torch.testing.assert_close(gradient, 2 * weights(torch.Size(SHAPE), 0))


def test_reduce_passes_the_gradient_through() -> None:
    for out, gradient in run_ranks(2, apply, "reduce", 0, True, True):
        torch.testing.assert_close(out, 2 * inputs(1)[0].detach())
        torch.testing.assert_close(gradient, weights(torch.Size(SHAPE), 0), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_split_and_unsplit(dim: int) -> None:
    x = inputs(1)[0].detach()
    parts = x.chunk(2, dim)
    found = run_ranks(2, apply, "split", dim, True, True)
    full = torch.cat([weights(part.shape, rank) for rank, part in enumerate(parts)], dim)
    for (out, gradient), part in zip(found, parts, strict=True):
        torch.testing.assert_close(out, part, rtol=0, atol=0)
        torch.testing.assert_close(gradient, full, rtol=0, atol=0)
    for rank, (out, gradient) in enumerate(run_ranks(2, apply, "unsplit", dim, True, True)):
        doubled = torch.cat([x, x], dim)
        torch.testing.assert_close(out, doubled, rtol=0, atol=0)
        torch.testing.assert_close(gradient, weights(doubled.shape, 0).chunk(2, dim)[rank], rtol=0, atol=0)


def async_and_sync(rank: int, ranks: int, shared: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Outputs and gradients of an asynchronous and a synchronous all-to-all, and the order of events."""
    group = dist.new_group(backend=register_backend() if shared else "gloo")
    rows = [[2, 1], [3, 0]]
    input_splits, output_splits = rows[rank], [peer[rank] for peer in rows]
    events: list[str] = []
    issue, wait = collectives.AsyncAllToAll.start, collectives.AsyncAllToAll.wait

    def started(self: collectives.AsyncAllToAll, *args: object) -> Tensor:
        events.append("start")
        return issue(self, *args)  # type: ignore[arg-type]

    def waited(self: collectives.AsyncAllToAll) -> None:
        events.append("wait")
        wait(self)

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            events.append("between")
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            events.append("between")
            return gradient * 2

    with mock.patch.multiple(collectives.AsyncAllToAll, start=started, wait=waited):
        x = inputs(ranks, (3, 5))[rank]
        wait_output = collectives.start_all_to_all(x, group, output_splits, input_splits)
        between = Between.apply(x)
        out = wait_output()
        factors = weights(out.shape, rank), weights(between.shape, rank)
        ((out * factors[0]).sum() + (between * factors[1]).sum()).backward()
    assert x.grad is not None
    expected = collectives.exchange(x.detach(), group, output_splits, input_splits)
    gradient = collectives.exchange(factors[0], group, input_splits, output_splits) + 2 * factors[1]
    return [out.detach(), x.grad], [expected, gradient], events


@pytest.mark.parametrize("shared", [True, False])
def test_async_all_to_all_overlaps_in_forward_and_backward(shared: bool) -> None:
    for found, expected, events in run_ranks(2, async_and_sync, shared):
        for actual, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=0, atol=0)
        assert events == ["start", "between", "wait"] * 2
