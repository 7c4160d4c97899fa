"""Experts: gathering and combining rows in Triton's interpreter and on CPU, against float64; families; unused copies."""

from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.compute.interpreter import assert_within, needs_triton, relative_error, run_interpreted
from tests.compute.test_kernels import assert_equal_runs, build
from weft.anatomy.transformers import read_anatomy
from weft.compute import experts as op
from weft.compute.kernels import find_kernels, replace_forwards
from weft.parallel.experts.late_gradients import late_linear
from weft.parallel.pipeline.weight_gradients import DeferredGroupedMatmul

TOLERANCES = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def route(tokens: int, top_k: int, experts: int, unused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Order, position and borders of random choices; `unused` copies are for an expert that does not exist."""
    index = torch.rand(tokens, experts + unused).argsort(1)[:, :top_k]
    chosen, order = index.flatten().sort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    borders = torch.searchsorted(chosen, torch.arange(experts), right=True).to(torch.int32)
    return order, position.view(index.shape), borders


def exact(rows: Tensor, position: Tensor, weights: Tensor | None, borders: Tensor, gradient: Tensor) -> list[Tensor]:
    """Sums and gradients in float64, copy by copy."""
    tensors = [value.detach().double().requires_grad_() for value in (rows, weights) if value is not None]
    shares = tensors[1] if weights is not None else torch.ones(position.shape, dtype=torch.float64)
    sums = []
    for token, places in enumerate(position.tolist()):
        copies = [tensors[0][row] * shares[token, k] for k, row in enumerate(places) if row < borders[-1]]
        sums.append(sum(copies, torch.zeros(rows.shape[1], dtype=torch.float64)))
    out = torch.stack(sums)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient.double())]


SHAPES = (5, 2, 3, 40, False), (4, 1, 4, 1100, True), (8, 4, 6, 64, True)
"""Tokens, choices, experts, width, and whether some copies are unused."""


def check_kernels() -> dict[str, Any]:
    """Errors of the kernels relative to the tolerance of the dtype, by case."""
    errors = {}
    for (tokens, top_k, experts, width, unused), dtype in product(SHAPES, TOLERANCES):
        torch.manual_seed(0)
        order, position, borders = route(tokens, top_k, experts, unused)
        rows = torch.randn(len(order), width).to(dtype)
        rows[borders[-1] :] = torch.nan  # a grouped matmul leaves them as they are
        gradient = torch.randn(tokens, width)
        for of_weights in (None, dtype, torch.float32):
            weights = None if of_weights is None else torch.rand(tokens, top_k).to(of_weights)
            expected = exact(rows, position, weights, borders, gradient)
            results = [op.launch(rows, position, weights, borders)]
            if weights is not None:
                results += op.launch_backward(gradient.to(results[0].dtype), rows, position, weights, borders)
                results[1], expected[1] = results[1][: borders[-1]], expected[1][: borders[-1]]
            for part, result, value in zip(("sum", "rows", "weights"), results, expected, strict=False):
                case = f"{part} {tokens} {top_k} {width} {unused} {dtype} {of_weights}"
                errors[case] = relative_error(result, value) / TOLERANCES[dtype]
    return errors


@needs_triton
def test_kernels() -> None:
    assert_within(run_interpreted(check_kernels))


@pytest.mark.parametrize("unused", [False, True])
def test_operators(unused: bool) -> None:
    torch.manual_seed(0)
    order, position, borders = route(7, 3, 4, unused)
    hidden, weights = torch.randn(7, 12, requires_grad=True), torch.rand(7, 3, requires_grad=True)
    rows = op.permute(hidden, order, position, borders)
    assert torch.equal(rows, hidden[order // 3])
    spoiled = torch.where((torch.arange(21) < borders[-1])[:, None], rows, torch.nan)
    out = op.unpermute(spoiled, position, weights, borders)
    gradient = torch.randn_like(out)
    used = position < borders[-1]
    plain = (hidden[:, None] * (weights * used)[..., None]).sum(1)
    assert torch.allclose(out, plain, atol=1e-6)
    found = torch.autograd.grad(out, (hidden, weights), gradient)
    for ours, theirs in zip(found, torch.autograd.grad(plain, (hidden, weights), gradient), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3"])
def test_families(family: str) -> None:
    model = build(family)
    original = deepcopy(model)
    rows = find_kernels(model, read_anatomy(model), "experts", "triton")
    replace_forwards(model, rows)
    assert [row.implementation for row in rows] == ["triton"], rows
    assert_equal_runs(model, original, 1e-5)


def test_experts_with_biases_keep_their_code() -> None:
    model = build("gpt_oss")
    (row,) = find_kernels(model, read_anatomy(model), "experts", "triton")
    assert row.implementation == "reference"
    assert "biases" in row.reason


def test_experts_without_rows_have_no_gradient_where_the_device_leaves_it_undefined() -> None:
    """By each function that computes gradients of the matrices of experts."""
    plain, borders = torch.nn.functional.grouped_mm, torch.tensor([2, 2, 5], dtype=torch.int32)

    def undefined(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        found = plain(left, right, offs=offs)
        if right.ndim == 2:
            found[1] = torch.nan
        return found

    class Undefined(torch.autograd.Function):
        """`grouped_mm` with a gradient of the weights as on such a device."""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
            ctx.save_for_backward(rows, weight, offs)
            return plain(rows, weight, offs=offs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            rows, weight, offs = ctx.saved_tensors
            return plain(gradient, weight.mT, offs=offs), undefined(rows.T, gradient, offs=offs), None

    def any_product(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        return undefined(left, right, offs=offs) if right.ndim == 2 else Undefined.apply(left, right, offs)

    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.randn(3, 16, 32).requires_grad_()
    op.grouped_linear(rows, expected, False, borders).square().sum().backward()
    assert expected.grad is not None
    with (
        mock.patch.object(op, "leaves_empty_groups", return_value=True),
        mock.patch("torch.nn.functional.grouped_mm", any_product),
    ):
        found = expected.detach().clone().requires_grad_()
        outputs = op.grouped_linear(rows, found, False, borders)
        outputs.square().sum().backward()
        linear = late_linear(SimpleNamespace(gate_up_proj=found, down_proj=torch.ones(3, 2, 2)))
        by_late = linear(rows, found, False, borders)
        (gradient,) = torch.autograd.grad(by_late.square().sum(), found)
        deferred = DeferredGroupedMatmul(found, rows, 2 * outputs.detach(), borders).compute()
    assert found.grad is not None
    for gradients in (found.grad, gradient, deferred):
        assert torch.equal(gradients, expected.grad)
    assert not op.leaves_empty_groups(torch.device("cpu"))
