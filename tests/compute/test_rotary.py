"""RoPE: the Triton kernel in Triton's interpreter, and the operator on CPU, against float64 and Transformers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from weft.compute import rotary as op

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The interpreter truncates to bfloat16 where a GPU rounds."""
LAYOUTS: dict[str, Any] = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "strided elements": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}


def exact(x: Tensor, cos: Tensor, sin: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated tensor and its gradient in float64, by autograd."""
    x = x.detach().double().requires_grad_()
    y = op.reference(x, cos.double(), sin.double())
    return y.detach(), torch.autograd.grad(y, x, gradient.double())[0]


def check_kernel() -> dict[str, Any]:
    """Errors of the kernel relative to the tolerance of the dtype, by case."""
    torch.manual_seed(0)
    errors = {}
    shapes = [(2, 3, 2, 16), (1, 17, 2, 96), (2, 1, 3, 2)]
    for shape, dtype, rows in product(shapes, TOLERANCES, (1, 2)):
        x, gradient = (torch.randn(shape).to(dtype) for _ in range(2))
        cos, sin = (torch.randn(shape[0] if rows > 1 else 1, shape[2], shape[3]).to(dtype) for _ in range(2))
        for name, change in list(LAYOUTS.items())[: None if dtype == torch.float32 else 1]:
            a, g = change(x), change(gradient)
            results = op.launch(a, cos, sin, backward=False), op.launch(g, cos, sin, backward=True)
            for part, result, value in zip(("y", "dx"), results, exact(a, cos, sin, g), strict=True):
                errors[f"{part} {shape} {rows} {name} {dtype}"] = relative_error(result, value) / TOLERANCES[dtype]
            assert results[0].stride() == torch.empty_like(a).stride()
    return errors


@needs_triton
def test_kernel_equals_float64_in_the_interpreter() -> None:
    errors = run_interpreted(check_kernel)
    assert len(errors) == 84
    assert_within(errors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operator_on_cpu_equals_transformers(layout: str) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # slow: not for the interpreter's process

    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    cos, sin = torch.randn(2, 1, 6, 8)
    inputs = [[LAYOUTS[layout](x).detach().requires_grad_() for x in (q, k)] for _ in range(2)]
    outputs = op.rotary(*inputs[0], cos, sin), apply_rotary_pos_emb(*inputs[1], cos, sin)
    results = [(*output, *torch.autograd.grad(output, x, output)) for output, x in zip(outputs, inputs, strict=True)]
    for result, expected in zip(*results, strict=True):
        assert relative_error(result.detach(), expected.detach()) < 1e-6


def test_only_the_tables_are_saved() -> None:
    q, k = torch.randn(1, 4, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8, requires_grad=True)
    cos, sin = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        op.rotary(q, k, cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_operator_obeys_the_rules_of_torch() -> None:
    q, k = (torch.randn(2, 6, heads, 8).transpose(1, 2).bfloat16().requires_grad_() for heads in (4, 2))
    cos, sin = (torch.randn(1, 6, 8).bfloat16() for _ in range(2))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.rotary, (q, k, cos, sin), test_utils=tests)
    arguments = (q.detach(), k.detach(), cos, sin)
    torch.library.opcheck(op.rotary_backward, arguments, test_utils=("test_schema", "test_faketensor"))
