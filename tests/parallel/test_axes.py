"""Parity with the unmodified model on one process, for every parallel axis and every pair of axes, by model family."""

import pytest

from tests.lab.families import FAMILIES, family
from tests.lab.parity import assert_parity, plan_for
from weft.job import Model

# Name of the layout -> ranks, plan.parallel.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 0}),
    "tp4, 2 kv heads": (4, {"tp": 4, "zero": 1}),
    "cp2 ring": (2, {"cp": 2, "zero": 1}),
    "cp2 ulysses": (2, {"cp": 2, "cp_ulysses": 2, "zero": 0}),
    "cp4 as 2 x 2": (4, {"cp": 4, "cp_ulysses": 2, "zero": 2}),
    "tp2 x cp2": (4, {"tp": 2, "cp": 2, "zero": 3}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
    "tp2 x dp2, replicated": (4, {"tp": 2, "zero": 0}),
    "tp2 without sp x cp2 ulysses": (4, {"tp": 2, "sp": False, "cp": 2, "cp_ulysses": 2, "zero": 1}),
    "cp2 x dp2": (4, {"cp": 2, "zero": 2}),
    "cp2 x dp2, two copies": (4, {"cp": 2, "dp_replicate": 2, "zero": 3}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "ep2": (2, {"ep": 2, "zero": 1}),
    "ep2, replicated": (2, {"ep": 2, "zero": 0}),
    "ep4": (4, {"ep": 4, "zero": 2}),
    "tp2 x ep2, folded": (2, {"tp": 2, "ep": 2, "zero": 1}),
    "tp2 x ep4, folded over dp2": (4, {"tp": 2, "ep": 4, "zero": 3}),
    "tp2 without sp x ep2": (4, {"tp": 2, "sp": False, "ep": 2, "zero": 2}),
    "tp2 x cp2 x ep2, replicated": (4, {"tp": 2, "cp": 2, "ep": 2, "zero": 0}),
    "ep2 x dp2": (4, {"ep": 2, "zero": 3}),
    "ep2 x dp2, two copies": (4, {"ep": 2, "dp_replicate": 2, "zero": 1}),
    "cp2 x ep2": (4, {"cp": 2, "ep": 2, "zero": 3}),
}
EXPERT_FAMILIES = [name for name, config in FAMILIES.items() if any("experts_per_tok" in key for key in config)]
# Layouts that a family does not support; the refusals are tested in test_families.py.
UNSUPPORTED = {("olmo2", "tp4, 2 kv heads"), ("olmoe", "tp4, 2 kv heads"), ("phi3", "tp4, 2 kv heads")}
# Variants of a pair of axes that another layout covers: only on some families, and not in float64.
VARIANTS = ("tp2 x dp2, replicated", "tp2 without sp x cp2 ulysses", "cp2 x dp2, two copies", "ep2 x dp2, two copies")
VARIANT_FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gpt2")
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if (name, layout) not in UNSUPPORTED]
CASES += [(name, layout) for name in EXPERT_FAMILIES for layout in EXPERT_LAYOUTS]
CASES = [(name, layout) for name, layout in CASES if layout not in VARIANTS or name in VARIANT_FAMILIES]
# Norms of all families except GPT-2 compute in float32 even in a float64 model. The result is exact if a norm has the same
# input as on one rank. If its gradient is a sum of parts (the norm over all heads in OLMo-2, a key that two tp ranks share),
# the parts are rounded separately.
EXACT = [
    (name, layout)
    for name, layout in CASES
    if name in ("llama", "qwen3_moe", "gpt2", "phi3")
    and layout not in VARIANTS
    and (name == "gpt2" or "2 kv heads" not in layout)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_float32(name: str, layout: str) -> None:
    ranks, parallel = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    assert_parity(Model(config=family(name)), plan_for("fp32", **parallel), world_size=ranks, micro_batch=2)


@pytest.mark.parametrize(("name", "layout"), EXACT)
def test_float64(name: str, layout: str) -> None:
    ranks, parallel = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    micro_batch = 1 if ranks == 2 else 4
    assert_parity(Model(config=family(name)), plan_for("fp64", **parallel), world_size=ranks, micro_batch=micro_batch)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_eight_ranks(name: str) -> None:
    plan = plan_for("fp32", cp=2, ep=2, zero=3)
    assert_parity(Model(config=family(name)), plan, world_size=8, micro_batch=1)
