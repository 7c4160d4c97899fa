"""Parity with the fused operators of CUDA on every axis; on CPU they run in operations of torch."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.lab.families import FAMILIES, family
from tests.lab.parity import ParityRecord, assert_parity, plan_for, run_plan
from weft.compute import kernels
from weft.compute.kernels import KernelRow
from weft.job import Model
from weft.plan import Memory

AXES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "zero 0": (1, {"zero": 0}, {}),
    "zero 3": (2, {"zero": 3}, {}),
    "tp": (2, {"tp": 2, "zero": 1}, {}),
    "cp": (2, {"cp": 2, "zero": 1}, {}),
    "pp": (2, {"pp": 2, "zero": 1}, {}),
    "ep": (2, {"ep": 2, "zero": 1}, {}),
    "recompute": (2, {"zero": 2}, {"memory": Memory(recompute=("mlp", "norm"))}),
}
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "granitemoe")
QUICK = {("llama", "tp"), ("qwen3_moe", "ep"), ("deepseek_v3", "recompute"), ("gemma3_text", "cp")}
CASES = [
    pytest.param(name, axis, marks=pytest.mark.must("one case of an axis each") if (name, axis) in QUICK else ())
    for name in FAMILIES
    for axis in AXES
    if axis != "ep" or name in EXPERTS
]


def run_with_kernels(rank: int, world_size: int, *args: Any) -> ParityRecord:
    """Run a plan with all operators of CUDA; their references have the numbers of the Triton kernels."""
    forwards = {name: op for name, op in kernels.OPERATORS.items() if isinstance(op, kernels.ForwardOperator)}
    fused = {name: replace(operator, refusal={"triton": lambda _: ""}) for name, operator in forwards.items()}
    used: list[str] = []

    def record(*given: Any) -> list[KernelRow]:
        rows = kernels.choose_kernels(*given)
        used.extend(row.implementation for row in rows)
        return rows

    with mock.patch.dict(kernels.OPERATORS, fused), mock.patch("weft.parallel.choices.choose_kernels", record):
        found = run_plan(rank, world_size, *args)
    assert ("triton" in used) != ("gpt2" in str(args[0])), used  # GPT-2 has no such module
    return found


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_parity(name: str, axis: str) -> None:
    ranks, parallel, settings = AXES[axis]
    plan = plan_for("fp32", **parallel).model_copy(update=settings)
    assert_parity(Model(config=family(name)), plan, ranks, micro_batch=2, run=run_with_kernels)


@pytest.mark.parametrize("name", FAMILIES)
def test_parity_of_rows_of_one_document(name: str) -> None:
    plan = plan_for("fp32", zero=3)
    assert_parity(Model(config=family(name)), plan, 2, micro_batch=2, rows_at_once=2, run=run_with_kernels)
