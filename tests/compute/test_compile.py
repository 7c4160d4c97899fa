"""Compiled blocks: parity with the untouched model on every axis, few graphs, and refusals."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.lab.families import family
from tests.lab.parity import assert_parity, packed_batches, plan_for, run_plan
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.compute import kernels
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.operator_choice import choose_operators
from weft.parallel.parallelize import check_axes
from weft.plan import Compute, Kernels, Memory, Parallel, Pipeline, Plan, Precision

BLOCKS = Compute(compile="blocks")
# Family, ranks, parallelism, other settings of the plan.
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "zero 0": ("llama", 1, {"zero": 0}, {}),
    "recompute": ("llama", 1, {"zero": 3}, {"memory": Memory(recompute=("block",))}),
    "offload": ("gpt2", 2, {"zero": 3}, {"memory": Memory(offload=("block",))}),
    "windows": ("gemma3_text", 2, {"zero": 3}, {}),
    "tp": ("llama", 2, {"tp": 2, "zero": 1}, {}),
    "cp": ("llama", 2, {"cp": 2, "zero": 3}, {}),
    "pp": ("llama", 2, {"pp": 2, "zero": 1}, {}),
    "ep": ("qwen3_moe", 2, {"ep": 2, "zero": 1}, {}),
    "shared experts": ("deepseek_v3", 2, {"ep": 2, "zero": 3}, {}),
}


def _forget(rank: int, world_size: int) -> None:
    """Begin without the graphs of other tests; from now on, too many graphs are an error and not a silent fallback."""
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _count(rank: int, world_size: int) -> int:
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    return counters["stats"]["unique_graphs"]


@pytest.mark.sweep  # compiles C++ for up to 20 s a case
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    kind, ranks, parallel, settings = CASES[name]
    plan = plan_for("fp32", **parallel).model_copy(update={"compute": BLOCKS, **settings})
    run_ranks(ranks, _forget)
    assert_parity(Model(config=family(kind)), plan, ranks, micro_batch=2)
    assert run_ranks(ranks, _count)[0] > 0


# Blocks of one shape share their code, so that a deep model does not reach the limit of graphs and fall back silently.
DEEP: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zero 3": ("llama", {"zero": 3}, {}),
    "tp": ("llama", {"tp": 2}, {}),
    "cp": ("llama", {"cp": 2}, {}),
    "ep": ("qwen3_moe", {"ep": 2}, {}),
    "shared experts": ("deepseek_v3", {"ep": 2}, {}),
    "fp8": ("llama", {}, {"precision": Precision(matmul="fp8", emulate_fp8=True, param_dtype="fp32")}),
    "routers and norms in float32": (
        "qwen3_moe",
        {},
        {"precision": Precision(param_dtype="bf16", fp32_modules=("router", "norm"))},
    ),
    "recompute and offload": ("llama", {}, {"memory": Memory(recompute=("block",), offload=("block",))}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", DEEP)
def test_blocks_share_their_code(name: str) -> None:
    kind, parallel, settings = DEEP[name]
    config = {**family(kind), "num_hidden_layers": 10, "hidden_size": 64, "intermediate_size": 64}
    plan = Plan(parallel=Parallel(**parallel), compute=BLOCKS, **settings)  # type: ignore[arg-type]
    run_ranks(2, _forget)
    run_ranks(2, run_plan, Model(config=config), plan, packed_batches(96), 2, timeout=200)
    assert run_ranks(2, _count)[0] > 0


def test_norms_are_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = Plan(compute=BLOCKS).resolve(1)
    rows = {row.operator: row for row in choose_operators(model, read_anatomy(model), plan, "cuda")}
    assert rows["rms_norm"].implementation == rows["gated_activation"].implementation == "compiled"
    assert rows["linear_cross_entropy"].implementation == "chunked"
    assert rows["adamw"].implementation == "triton"
    Plan(compute=Compute(compile="blocks", kernels=Kernels(adamw="triton"))).resolve(1)  # outside of the blocks


def test_refusals() -> None:
    for settings, word in (
        ({"memory": Memory(recompute=("attention",)), "compute": BLOCKS}, "parts of blocks"),
        ({"memory": Memory(offload=("mlp",)), "compute": BLOCKS}, "parts of blocks"),
        ({"compute": Compute(compile="blocks", kernels=Kernels(rms_norm="triton"))}, "Triton operators by name"),
    ):
        with pytest.raises(PlanError, match=word):
            Plan(**settings).resolve(1)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = plan_for("fp32", Pipeline(schedule="zb-h1"), pp=2).model_copy(update={"compute": BLOCKS}).resolve(2)
    with pytest.raises(PlanError, match="zb-h1"):
        check_axes(model, read_anatomy(model), plan)
