"""Outputs of cheap operations are not saved for backward, but recomputed once, however a module uses them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lab.live import StorageBytes
from weft.memory.output_recompute import Tape

Function = Callable[[Tensor, Tensor], Tensor]


def through_tape(function: Function, x: Tensor, weight: Tensor) -> Tensor:
    tape = Tape()
    with tape.packing(), tape.recording():
        return function(x, weight)


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(8, 8, generator=generator) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()


def gradients(function: Function, tape: bool) -> tuple[Tensor, ...]:
    x, weight = leaves()
    out = through_tape(function, x, weight) if tape else function(x, weight)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))


def gated(x: Tensor, weight: Tensor) -> Tensor:
    return (F.silu(x @ weight) * (x @ weight.T)) @ weight


def root_mean_square(x: Tensor, weight: Tensor) -> Tensor:
    x64 = x.double()
    return (weight * (x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)) @ weight


def views(x: Tensor, weight: Tensor) -> Tensor:
    one, other = (F.gelu(x @ weight).view(4, 16) * 2).t().chunk(2)
    return (one.reshape(8, 4) @ other.reshape(4, 8)) @ weight


def changed_before_it_is_saved(x: Tensor, weight: Tensor) -> Tensor:
    h = torch.sin(x @ weight)
    h.mul_(2)
    return h @ weight


def changed_input(x: Tensor, weight: Tensor) -> Tensor:
    shares = (x @ weight).exp() + 0
    total = shares.sum(-1, keepdim=True)
    kept = total.sqrt() @ weight[:1]
    shares /= total
    return kept + shares @ weight


def long_diamonds(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(60):  # each result is used twice: 2 ** 60 paths
        x = x * 0.5 + x * 0.5
    return x @ weight


@pytest.mark.parametrize(
    "function", [gated, root_mean_square, views, changed_before_it_is_saved, changed_input, long_diamonds]
)
def test_gradients_are_bit_equal(function: Function) -> None:
    for recomputed, plain in zip(gradients(function, tape=True), gradients(function, tape=False), strict=True):
        assert torch.equal(recomputed, plain)


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_cheap_ops_are_recomputed_once_and_matmuls_are_not() -> None:
    x, weight = leaves()
    plain, recomputed = OpCounter(), OpCounter()
    with plain:
        gated(x, weight).sum().backward()
    with recomputed:
        through_tape(gated, x, weight).sum().backward()
    assert recomputed.of["mm"] == plain.of["mm"]
    assert recomputed.of["silu"] == plain.of["silu"] + 1 == 2
    assert recomputed.of["mul"] == plain.of["mul"] + 1


def test_graph_can_run_twice() -> None:
    x, weight = leaves()
    loss = through_tape(gated, x, weight).sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(map(torch.equal, first, second))


def test_recomputed_outputs_are_freed() -> None:
    x, weight = leaves()
    held = []
    for tape in (False, True):
        with StorageBytes().track(x, weight) as live:
            before = live.current
            out = through_tape(gated, x, weight) if tape else gated(x, weight)
            held.append(live.current - before)
            out.sum().backward()
            del out
            x.grad = weight.grad = None
            assert live.current == before  # no leak
    assert held[0] - held[1] == 2 * x.numel() * 4


def test_in_place_change_of_an_input_after_the_block_is_an_error() -> None:
    x, weight = leaves()
    y = x * 1
    out = through_tape(lambda y, weight: torch.sin(y) @ weight, y, weight)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="an input was changed in place after forward; remove this role"):
        out.sum().backward()


def test_random_ops_are_not_recomputed() -> None:
    def dropped(x: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(F.relu(x @ weight), 0.5) @ weight

    torch.manual_seed(3)
    mine = gradients(dropped, tape=True)
    torch.manual_seed(3)
    for one, other in zip(mine, gradients(dropped, tape=False), strict=True):
        assert torch.equal(one, other)
