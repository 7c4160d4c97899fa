"""Models whose tensor-parallel products run in chunks beside their messages equal the untouched model."""

from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.parity import assert_parity
from weft.job import Model
from weft.plan import Plan

FP32 = {"forward": "fp32", "update": "fp32", "reduce": "fp32"}
# Name of the layout -> ranks, plan.parallel.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "zero": 1}),
    "tp2 without sp": (2, {"tp": 2, "sp": False, "zero": 0}),
    "tp4": (4, {"tp": 4, "zero": 1}),
    "tp4 without sp": (4, {"tp": 4, "sp": False, "zero": 1}),
}
FAMILIES = ("llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "olmo2", "gemma3_text", "deepseek_v3")
CANNOT = {("olmo2", "tp4"), ("phi3", "tp4"), ("olmo2", "tp4 without sp"), ("phi3", "tp4 without sp")}
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if (name, layout) not in CANNOT]


def plan_of(chunks: int, tables: dict[str, Any]) -> Plan:
    return Plan.model_validate({"precision": FP32, **tables, "comm": {"overlap_chunks": chunks}})


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_families(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan = plan_of(2 if ranks == 2 else 4, {"parallel": parallel})
    assert_parity(Model(config=family(name)), plan, ranks, micro_batch=2)
