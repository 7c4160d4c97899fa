"""Compiled blocks: parity with the untouched model on every axis, few graphs, and refusals."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.lab.families import family
from tests.lab.parity import assert_parity, plan_for
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.operator_choice import choose_operators
from weft.parallel.parallelize import check_axes
from weft.plan import Compute, Kernels, Memory, Pipeline, Plan

BLOCKS = Compute(compile="blocks")
# Family, ranks, parallelism, other settings of the plan.
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "zero 0": ("llama", 1, {"zero": 0}, {}),
    "recompute": ("llama", 1, {"zero": 3}, {"memory": Memory(recompute=("block",))}),
    "recompute of activations": ("qwen3", 2, {"zero": 2}, {"memory": Memory(recompute=("activation", "norm"))}),
    "offload": ("gpt2", 2, {"zero": 3}, {"memory": Memory(offload=("mlp",))}),
    "windows": ("gemma3_text", 2, {"zero": 3}, {}),
    "tp": ("llama", 2, {"tp": 2, "zero": 1}, {}),
    "cp": ("llama", 2, {"cp": 2, "zero": 3}, {}),
    "pp": ("llama", 2, {"pp": 2, "zero": 1}, {}),
    "ep": ("qwen3_moe", 2, {"ep": 2, "zero": 1}, {}),
    "shared experts": ("deepseek_v3", 2, {"ep": 2, "zero": 3}, {}),
}


def _forget(rank: int, world_size: int) -> None:
    torch._dynamo.reset()  # the ranks of one test after another share a limit of graphs
    counters.clear()


def _count(rank: int, world_size: int) -> tuple[int, bool]:
    return counters["stats"]["unique_graphs"], bool(counters["recompile_limit"])


@pytest.mark.sweep  # compiles C++ for up to 20 s a case
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    kind, ranks, parallel, settings = CASES[name]
    plan = plan_for("fp32", **parallel).model_copy(update={"compute": BLOCKS, **settings})
    run_ranks(ranks, _forget)
    assert_parity(Model(config=family(kind)), plan, ranks, micro_batch=2)
    graphs, too_many = run_ranks(ranks, _count)[0]
    assert graphs > 0
    assert not too_many


def test_norms_are_left_to_the_compiler() -> None:
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = Plan(compute=BLOCKS).resolve(1)
    rows = {row.operator: row for row in choose_operators(model, read_anatomy(model), plan, "cuda")}
    assert rows["rms_norm"].implementation == rows["gated_activation"].implementation == "compiled"
    assert rows["linear_cross_entropy"].implementation == "chunked"


def test_refusals() -> None:
    for settings, word in (
        ({"memory": Memory(recompute=("attention",)), "compute": BLOCKS}, "recompute of attention"),
        ({"compute": Compute(compile="blocks", kernels=Kernels(rms_norm="triton"))}, "Triton operators by name"),
    ):
        with pytest.raises(PlanError, match=word):
            Plan(**settings).resolve(1)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = plan_for("fp32", Pipeline(schedule="zb-h1"), pp=2).model_copy(update={"compute": BLOCKS}).resolve(2)
    with pytest.raises(PlanError, match="zb-h1"):
        check_axes(model, read_anatomy(model), plan)
