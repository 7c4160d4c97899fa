"""Dropout by position: the kernel in Triton's interpreter, and the operator on CPU, have the bits of a mask in memory."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.compute.interpreter import needs_triton, run_interpreted
from weft.compute import dropout as op
from weft.compute.compile import CompiledRegions, compile_blocks
from weft.parallel.sequence.dropout import DropoutContext, LayoutInvariantDropout

ROWS, TOKENS = torch.tensor([7, 2**32 - 1, 3 * 10**9]), torch.tensor([0, 1, 2, 13, 14, 15, 900])  # of a rank of cp
SEED, LAYER, FIRST_FEATURE = torch.tensor(4 * 10**9), torch.tensor(5 * 10**8), 96
RATES = (0.1, 0.2, 1 / 3, 0.5, 0.999)
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "half of the features": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "tokens before rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "features first": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


def with_mask(x: Tensor, gradient: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Output and gradient by a mask in memory."""
    features, leaf = torch.arange(FIRST_FEATURE, FIRST_FEATURE + x.shape[-1]), x.detach().requires_grad_()
    mask = op.dropout_mask(op.layer_seed(int(SEED), int(LAYER)), ROWS, TOKENS, features, rate=rate)
    y = leaf * mask.to(x.dtype)
    return y.detach(), *torch.autograd.grad(y, leaf, gradient)


def values(width: int, dtype: torch.dtype) -> Tensor:
    """Values of [3, 7, width], with zeros of both signs, infinities, NaN and numbers that are subnormal in float16."""
    x = torch.randn(3, 7, width, generator=torch.Generator().manual_seed(width)) * torch.logspace(-6, 3, width)
    x[0, 1, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    return x.to(dtype)


def differs(found: Tensor, expected: Tensor) -> bool:
    """True if any bit differs, except those of NaN, which torch writes in several ways."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.dtype.itemsize]
    sides = [torch.where(side.isnan(), 0, side).contiguous().view(bits) for side in (found, expected)]
    return found.dtype != expected.dtype or not torch.equal(*sides) or not torch.equal(found.isnan(), expected.isnan())


def round_as_torch_does() -> None:
    """Let the interpreter round to bfloat16 like the devices: its own conversion truncates (Triton 3.7)."""
    from triton.runtime import interpreter

    own = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name != "bf16":
            return own(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = convert


def check_kernel() -> dict[str, bool]:
    """Results of the kernel that differ from those with a mask in any bit."""
    round_as_torch_does()
    seed, found = op.layer_seed(int(SEED), int(LAYER)), {}
    for dtype, rate, width, (name, change) in product(op.DTYPES, (0.1, 1 / 3), (33, 300), LAYOUTS.items()):
        x, gradient = values(width, dtype), values(width, dtype).flip(0)
        for part, tensor, expected in zip(("y", "dx"), (x, gradient), with_mask(x, gradient, rate), strict=True):
            made = op.launch(change(tensor), seed, ROWS, TOKENS, FIRST_FEATURE, rate)
            if name == "expanded":
                expected = with_mask(change(tensor), gradient, rate)[0].contiguous()
            found[f"{part} {dtype} {rate} {width} {name}"] = differs(made, expected) or not made.is_contiguous()
    return found


@needs_triton
def test_the_kernel_has_the_bits_of_a_mask() -> None:
    found = run_interpreted(check_kernel)
    assert len(found) == 120
    assert not [case for case, is_other in found.items() if is_other]


@pytest.mark.parametrize("rate", [0.0, 1e-9, 1e-3, *RATES, 0.25, 1 - 2**-24])
def test_the_kernel_and_the_mask_keep_the_same_hashes(rate: float) -> None:
    """The mask compares hashes in float32, and the kernel compares integers."""
    limit, _ = op.keep_rule(rate, torch.float32)
    hashes = torch.arange(max(limit - 300, 0), min(limit + 300, 2**32))
    assert torch.equal(hashes >= rate * 2**32, hashes >= limit)


@pytest.mark.parametrize("part", [100, op.CPU_PART])
@pytest.mark.parametrize("dtype", [*op.DTYPES, torch.float64])
def test_the_operator_has_the_bits_of_a_mask(dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "CPU_PART", part)
    for rate, change in product(RATES, LAYOUTS.values()):
        x, gradient = change(values(40, dtype)).requires_grad_(), change(values(40, dtype).flip(0))
        y = op.dropout(x, SEED, LAYER, ROWS, TOKENS, FIRST_FEATURE, rate)
        (dx,) = torch.autograd.grad(y, x, gradient)
        for found, expected in zip((y.detach(), dx), with_mask(x, gradient, rate), strict=True):
            assert not differs(found, expected.contiguous())


def test_nothing_of_the_size_of_the_tensor_is_saved() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        op.dropout(values(40, torch.float32).requires_grad_(), SEED, LAYER, ROWS, TOKENS, 0, 0.1)
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in (SEED, LAYER, ROWS, TOKENS)}


def test_the_operator_obeys_the_rules_of_torch() -> None:
    x = torch.randn(3, 7, 40).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    arguments = x, SEED, LAYER, ROWS, TOKENS, FIRST_FEATURE, 0.1
    torch.library.opcheck(op.dropout, arguments)


class Block(nn.Module):
    """Block of a model with dropout."""

    def __init__(self, layer: int, context: DropoutContext):
        super().__init__()
        self.linear, self.dropout = nn.Linear(24, 24), LayoutInvariantDropout(0.3, layer, context)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x))


def test_compiled_blocks_share_their_code_for_all_layers_and_seeds() -> None:
    context = DropoutContext(0, 1, True)
    context.rows, context.positions = ROWS, TOKENS
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(layer, context) for layer in range(10)])
    x, results = torch.randn(3, 7, 24, requires_grad=True), []
    for compiled in (False, True):
        torch._dynamo.reset()
        regions = compile_blocks(model, map(str, range(10))) if compiled else CompiledRegions()
        regions.lower = aot_autograd(fw_compiler=lambda graph, _: graph.forward)
        for seed in range(3):
            context.seed = 2**33 + seed
            context.begin_forward()
            loss = model(x).square().sum()
            results.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    assert (regions.graphs, regions.forwards) == (1, 30)
    assert results[0][0] != results[1][0]
    for found, expected in zip(results[3:], results[:3], strict=True):
        assert all(map(torch.equal, found, expected))
