"""FP8 grouped matmuls of experts: numbers, axes beside one process, replicas, choices, non-finite rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, run_plan
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.compute.experts import grouped_linear
from weft.compute.fp8_experts import fp8_grouped_linear
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.choices import choose
from weft.parallel.experts.path import ExpertPath
from weft.parallel.operators import explain_operators
from weft.parallel.precision.fp8_layers import choose_fp8_experts, fp8_experts_forward
from weft.plan import Comm, Plan, Precision

BORDERS = torch.tensor([37, 37, 170, 186], dtype=torch.int32)  # an expert without rows, and rows without expert
CONFIG = {
    **family("qwen3_moe"),
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}


def linear(function: Any, rows_first: bool, rows: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of used rows and of weights."""
    inputs = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = function(*inputs, rows_first, BORDERS)[: len(gradient)]
    of_rows, of_weight = torch.autograd.grad(out, inputs, gradient)
    return [out.detach(), of_rows[: len(gradient)], of_weight]


@pytest.mark.must("parity: FP8 of experts")
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear(rows_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weight, gradient = torch.randn(200, 80), torch.randn(4, 48, 80) / 9, torch.randn(186, 48)
    rows *= torch.logspace(-3, 3, 200)[:, None]  # each row has its own scale
    gradient *= torch.logspace(3, -3, 186)[:, None]
    weight = weight if rows_first else weight.mT.contiguous()
    exact = linear(grouped_linear, rows_first, rows, weight, gradient)
    found = linear(fp8_grouped_linear, rows_first, *(value.to(dtype) for value in (rows, weight, gradient)))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert 0.01 * theirs.norm() < (ours - theirs).norm() < 0.05 * theirs.norm()
    for ours, theirs in zip(found[:2], exact[:2], strict=True):  # small rows as exactly as large ones
        assert ((ours - theirs).norm(dim=1) < 0.1 * theirs.norm(dim=1)).all()
    assert not found[2][1].any()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_not_hidden(bad: float) -> None:
    """It reaches the loss and the gradient norm, which the guard of the step checks."""
    rows, weight = torch.randn(200, 32), torch.randn(4, 16, 32, requires_grad=True)
    rows[40, 3] = bad
    out = fp8_grouped_linear(rows, weight, True, BORDERS)
    assert not out[40].isfinite().any()
    assert out[:40].isfinite().all()
    (gradient,) = torch.autograd.grad(out[:186].nan_to_num().sum(), weight)
    assert not gradient[2].isfinite().all()
    assert gradient[0].isfinite().all()


def plan_of(settings: dict[str, Any] | None = None, **parallel: Any) -> Plan:
    plan = plan_for("fp32", **parallel)
    precision = plan.precision.model_copy(update={"matmul": "fp8", "emulate_fp8": True})
    return plan.model_copy(update={"precision": precision, **(settings or {})})


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep": (2, {"ep": 2, "zero": 0}, {}),
    "zero 3": (2, {"zero": 3}, {}),
    "zero 3, ep, replicas": (2, {"ep": 2, "zero": 3, "expert_balance": "replicate"}, {}),
    "tp": (2, {"tp": 2, "zero": 0}, {"comm": Comm(overlap_chunks=1)}),
    "tp, ep": (4, {"tp": 2, "ep": 2, "zero": 1}, {"comm": Comm(overlap_chunks=1)}),
    "pp": (2, {"pp": 2, "zero": 0}, {}),
}


@pytest.mark.must("composition: FP8 of experts", case="ep")
@pytest.mark.parametrize("name", CASES)
def test_axes_have_the_losses_of_one_process(name: str) -> None:
    ranks, parallel, settings = CASES[name]
    source, batches = Model(config=CONFIG), packed_batches(96)
    (expected,) = run_ranks(1, run_plan, source, plan_of(zero=0), batches, 2)
    # With tp a tensor, and its scale, is a part of the rows; otherwise every rank rounds what one process rounds.
    tolerance = 5e-3 if "tp" in parallel else 1e-3
    for found in run_ranks(ranks, run_plan, source, plan_of(settings, **parallel), batches, 2):
        assert found.losses == pytest.approx(expected.losses, rel=tolerance)
        assert found.norms == pytest.approx(expected.norms, rel=0.1)
        if "tp" not in parallel:
            assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-5)
        for key, gradient in found.gradients.items():
            likeness = torch.cosine_similarity(gradient.flatten(), expected.gradients[key].flatten(), 0)
            assert likeness > (0.9 if "tp" in parallel else 0.99), key


def test_choices() -> None:
    """FP8 where sizes, modules and device allow it; otherwise the reason is printed."""
    gpt_oss = {**family("gpt_oss"), "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    older = SimpleNamespace(supports=lambda feature: feature != "grouped_matmul")
    for config, matmul, device, reason in (
        (CONFIG, "fp8", None, ""),
        (CONFIG, "fp8_block", None, "not for each block"),
        ({**CONFIG, "moe_intermediate_size": 24}, "fp8", None, "16 does not divide"),
        (gpt_oss, "fp8", None, "biases"),
        (CONFIG, "fp8", older, "no grouped FP8 matmuls"),
    ):
        model = build_on_meta(read_config(Model(config={**config, "intermediate_size": 128})), torch.float32)
        plan = resolved(Plan(precision=Precision(matmul=matmul)), 1)
        (found,) = set(choose_fp8_experts(model, read_anatomy(model), plan, device).values())
        assert reason in found
        assert bool(found) == bool(reason)
    model = build_on_meta(read_config(Model(config=CONFIG)), torch.float32)
    rows = explain_operators(model, choose(model, resolved(plan_of(), 1), "cpu", detect()), "cpu")
    (row,) = (row for row in rows if row.operator == "matmul of experts")
    assert (row.implementation, row.detail) == ("fp8 by row", "2 modules (in float32 on devices without FP8)")


def test_a_compiled_forward_has_the_bits_of_an_eager_one() -> None:
    rows, weight = torch.randn(200, 32), torch.randn(4, 48, 32)
    compiled = torch.compile(fp8_grouped_linear, backend="aot_eager", fullgraph=True)
    found, expected = (linear(run, True, rows, weight, torch.ones(186, 48)) for run in (compiled, fp8_grouped_linear))
    assert all(map(torch.equal, found, expected))


def test_forward_of_a_module() -> None:
    source = Model(config=CONFIG)
    model = build_plain(source, read_config(source), torch.float32)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    hidden, index, weights = torch.randn(40, 64), torch.rand(40, 4).argsort(1)[:, :2], torch.rand(40, 2)
    exact = experts(hidden, index, weights)
    chosen = choose_fp8_experts(model, read_anatomy(model), resolved(plan_of(), 1))
    assert "model.layers.0.mlp.experts" in chosen
    path = ExpertPath(experts)
    path.compute = fp8_experts_forward
    path.attach()
    found = experts(hidden, index, weights)
    assert 0.01 * exact.norm() < (found - exact).norm() < 0.1 * exact.norm()
