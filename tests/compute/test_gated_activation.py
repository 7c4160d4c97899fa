"""Gated activations: the Triton kernels in Triton's interpreter, and the operators on CPU, against float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from weft.compute import gated_activation as op

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The interpreter truncates to bfloat16 where a GPU rounds."""
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "halves of a row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "permuted": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


def exact(gate: Tensor, up: Tensor, activation: str, gradient: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients in float64, by autograd."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    y = op.activate(tensors[0], activation) * tensors[1]
    return y.detach(), *torch.autograd.grad(y, tensors, gradient.double())


def check_kernels() -> dict[str, Any]:
    """Errors of the kernels relative to the tolerance of the dtype, by case."""
    torch.manual_seed(0)
    errors = {}
    for shape, activation, dtype in product([(7, 33), (2, 3, 5, 16), (1, 2100)], op.ACTIVATIONS, TOLERANCES):
        gate, up, gradient = (torch.randn(shape).to(dtype) * 3 for _ in range(3))
        for (name, change), (other, change_other) in product(LAYOUTS.items(), LAYOUTS.items()):
            if name != other and (activation != "silu" or dtype != torch.float32):
                continue
            if name != "contiguous" and dtype != torch.float32:
                continue
            a, b, g = change(gate), change_other(up), change_other(gradient)
            results = op.launch(a, b, activation), *op.launch_backward(g, a, b, activation)
            for part, result, value in zip(["y", "d_gate", "d_up"], results, exact(a, b, activation, g), strict=True):
                assert result.is_contiguous()
                case = f"{part} {shape} {activation} {name} {other} {dtype}"
                errors[case] = relative_error(result, value) / TOLERANCES[dtype]
        packed = torch.cat([gate, up], -1)
        d_packed = op.launch_packed_backward(gradient, packed, activation)
        expected = torch.cat(exact(gate, up, activation, gradient)[1:], -1)
        errors[f"packed {shape} {activation} {dtype}"] = relative_error(d_packed, expected) / TOLERANCES[dtype]
    return errors


def check_extremes() -> dict[str, Any]:
    """Errors where the exponential overflows or vanishes."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 100.0, 1e4])
    ones, errors = torch.ones_like(gate), {}
    for activation in op.ACTIVATIONS:
        results = op.launch(gate, ones, activation), *op.launch_backward(ones, gate, ones, activation)
        for part, result, value in zip(
            ["y", "d_gate", "d_up"], results, exact(gate, ones, activation, ones), strict=True
        ):
            assert torch.isfinite(result).all()
            errors[f"{part} {activation}"] = float(((result - value).abs() / (value.abs() + 1)).max()) / 1e-6
    return errors


@needs_triton
def test_kernels_equal_float64_in_the_interpreter() -> None:
    errors = run_interpreted(check_kernels, check_extremes)
    assert len(errors) > 200
    assert_within(errors)


@pytest.mark.parametrize("activation", op.ACTIVATIONS)
def test_operators_on_cpu_equal_float64(activation: str) -> None:
    packed = torch.randn(2, 5, 24, requires_grad=True)
    gate, up = (half.detach().requires_grad_() for half in packed.chunk(2, -1))
    gradient = torch.randn(2, 5, 12)
    expected = exact(gate, up, activation, gradient)
    y, y_packed = op.gated_activation(gate, up, activation), op.packed_gated_activation(packed, activation)
    results = y, *torch.autograd.grad(y, (gate, up), gradient)
    (d_packed,) = torch.autograd.grad(y_packed, packed, gradient)
    for result, value in zip(results, expected, strict=True):
        assert relative_error(result.detach(), value) < 1e-6
    assert torch.equal(y, y_packed)
    assert torch.equal(d_packed, torch.cat(results[1:], -1))


@pytest.mark.parametrize("activation", op.ACTIVATIONS)
def test_only_inputs_are_saved(activation: str) -> None:
    gate, up, saved = *(torch.randn(4, 24, requires_grad=True) for _ in range(2)), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        op.gated_activation(gate, up, activation)
    assert {tensor.data_ptr() for tensor in saved} == {gate.data_ptr(), up.data_ptr()}


def test_operators_obey_the_rules_of_torch() -> None:
    packed = torch.randn(3, 5, 16).bfloat16().requires_grad_()
    gate, up = (half.detach().requires_grad_() for half in packed.chunk(2, -1))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.gated_activation, (gate, up, "silu"), test_utils=tests)
    torch.library.opcheck(op.packed_gated_activation, (packed, "gelu"), test_utils=tests)
    gradient, tests = torch.randn(3, 5, 8).bfloat16(), ("test_schema", "test_faketensor")
    arguments = (gradient, gate.detach(), up.detach(), "gelu_tanh")
    torch.library.opcheck(op.gated_activation_backward, arguments, test_utils=tests)
    arguments = (gradient, packed.detach(), "silu")
    torch.library.opcheck(op.packed_gated_activation_backward, arguments, test_utils=tests)
