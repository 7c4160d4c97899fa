"""RMSNorm: the Triton kernels in Triton's interpreter, and the operator on CPU, against formulas in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from weft.compute import rms_norm as op

VARIANTS = [(0.0, True, True), (0.0, False, True), (1.0, False, True), (0.0, False, False)]
"""Offset, whether the cast is first, and whether there is a weight."""


def exact(x: Tensor, weight: Tensor | None, eps: float, offset: float, gradient: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients in float64, by autograd."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in (x, weight) if tensor is not None]
    y = tensors[0] * torch.rsqrt(tensors[0].pow(2).mean(-1, keepdim=True) + eps)
    y = y * (offset + tensors[1]) if weight is not None else y
    return y.detach(), *torch.autograd.grad(y, tensors, gradient.double())


def check_kernels() -> dict[str, Any]:
    """Errors of the kernels relative to the tolerance of the dtype, by case."""
    torch.manual_seed(0)
    errors = {}
    shapes = [(7, 33), (3, 1), (2, 5, 64), (2, 3, 4, 16), (70, 100), (5, 3001)]
    for shape, (offset, cast_first, has_weight), dtype in product(shapes, VARIANTS, TOLERANCES):
        x, gradient = (torch.randn(shape).to(dtype) * 3 for _ in range(2))
        x[0] *= 1e-3
        weight = torch.randn(shape[-1]).to(dtype) if has_weight else None
        is_first = (offset, cast_first, has_weight, dtype) == (*VARIANTS[0], torch.float32)
        for name, change in list(LAYOUTS.items())[: None if is_first else 1]:
            a, g = change(x), change(gradient)
            y = op.launch(a, weight, 1e-5, offset, cast_first)
            assert y.shape == a.shape
            assert y.is_contiguous()
            results = [y, *op.launch_backward(g, a, weight, 1e-5, offset, has_weight)]
            expected = exact(a, weight, 1e-5, offset, g)
            for part, result, value in zip(["y", "dx", "dw"], results, expected, strict=False):
                case = f"{part} {tuple(a.shape)} {offset} {cast_first} {has_weight} {name} {dtype}"
                errors[case] = relative_error(result, value) / TOLERANCES[dtype]
    return errors


TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The interpreter truncates to bfloat16 where a GPU rounds: half of its error is not the kernel's."""
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "rows with gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "reversed dims": lambda x: x.transpose(0, -2) if x.ndim > 2 else x[::2],
    "strided elements": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def check_mixed_dtypes() -> dict[str, Any]:
    """Outputs and gradients of inputs and weights of different dtypes, with their dtypes."""
    torch.manual_seed(0)
    errors = {}
    for of_x, of_weight, cast_first in product(*[(torch.float16, torch.float32)] * 2, (True, False)):
        x, weight, gradient = torch.randn(9, 48).to(of_x), torch.randn(48).to(of_weight), torch.randn(9, 48)
        y = op.launch(x, weight, 1e-5, 0.0, cast_first)
        assert y.dtype == op.reference(x, weight, 1e-5, 0.0, cast_first).dtype
        dx, dw = op.launch_backward(gradient.to(y.dtype), x, weight, 1e-5, 0.0, True)
        assert (dx.dtype, dw.dtype) == (of_x, of_weight)
        expected = exact(x, weight, 1e-5, 0.0, gradient.to(y.dtype))
        for part, result, value in zip(["y", "dx", "dw"], (y, dx, dw), expected, strict=True):
            errors[f"{part} {of_x} {of_weight} {cast_first}"] = relative_error(result, value) / 2e-3
    return errors


def check_bits() -> dict[str, Any]:
    """Whether a second run gives other bits, and a gradient that is not asked for is empty."""
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(50, 40), torch.randn(40), torch.randn(50, 40)
    runs = [op.launch_backward(gradient, x, weight, 1e-5, 0.0, True) for _ in range(2)]
    differ = [not torch.equal(a, b) for a, b in zip(*runs, strict=True)]
    dx, dw = op.launch_backward(gradient, x, weight, 1e-5, 0.0, False)
    return {"dx": differ[0] * 2, "dw": differ[1] * 2, "empty": dw.numel() * 2, "same": 2 * (not dx.equal(runs[0][0]))}


@needs_triton
def test_kernels_equal_float64_in_the_interpreter() -> None:
    errors = run_interpreted(check_kernels, check_mixed_dtypes, check_bits)
    assert len(errors) > 200
    assert_within(errors)


@pytest.mark.parametrize(("offset", "cast_first", "has_weight"), VARIANTS)
def test_operator_on_cpu_equals_float64(offset: float, cast_first: bool, has_weight: bool) -> None:
    x = torch.randn(3, 5, 24, requires_grad=True)
    weight = torch.randn(24, requires_grad=True) if has_weight else None
    gradient = torch.randn(3, 5, 24)
    y = op.rms_norm(x, weight, 1e-5, offset, cast_first)
    results = (y.detach(), *torch.autograd.grad(y, [x, weight] if weight is not None else [x], gradient))
    for result, expected in zip(results, exact(x, weight, 1e-5, offset, gradient), strict=True):
        assert relative_error(result, expected) < 1e-6


def test_only_inputs_are_saved_and_a_frozen_weight_gets_no_gradient() -> None:
    x, weight, saved = torch.randn(4, 24, requires_grad=True), torch.randn(24), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = op.rms_norm(x, weight, 1e-5, 0.0, True)
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), weight.data_ptr()}
    y.sum().backward()
    assert weight.grad is None


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("cast_first", [True, False])
def test_operator_obeys_the_rules_of_torch(of_weight: torch.dtype | None, cast_first: bool) -> None:
    x = torch.randn(3, 8, 4).transpose(1, 2).bfloat16().requires_grad_()
    weight = None if of_weight is None else torch.randn(8, dtype=of_weight, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.rms_norm, (x, weight, 1e-5, 0.0, cast_first), test_utils=tests)
    gradient = torch.randn(3, 4, 8)
    for needs_weight in (True, False):
        arguments = (gradient, x.detach(), None if weight is None else weight.detach(), 1e-5, 0.0, needs_weight)
        torch.library.opcheck(op.rms_norm_backward, arguments, test_utils=("test_schema", "test_faketensor"))
