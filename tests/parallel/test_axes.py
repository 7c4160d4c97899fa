"""Every way to split a model, and every pair of them, equals the untouched model in one process, family by family."""

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
# What a family cannot take; the refusal itself is tested in test_refusals.py.
CANNOT = {("olmo2", "tp4, 2 kv heads"), ("olmoe", "tp4, 2 kv heads"), ("phi3", "tp4, 2 kv heads")}
# Variants of a pair that is there already: on some families, and not in float64.
VARIANTS = ("tp2 x dp2, replicated", "tp2 without sp x cp2 ulysses", "cp2 x dp2, two copies", "ep2 x dp2, two copies")
SOME = ("llama", "qwen3_moe", "gpt_oss", "gpt2")
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if (name, layout) not in CANNOT]
CASES += [(name, layout) for name in EXPERT_FAMILIES for layout in EXPERT_LAYOUTS]
CASES = [(name, layout) for name, layout in CASES if layout not in VARIANTS or name in SOME]
# Norms of all but GPT-2 compute in float32 even in a float64 model. That is exact where a norm sees what it sees on one
# rank; where its gradient comes in parts (OLMo-2's norm over all heads, a key that two tp ranks share), parts round apart.
EXACT = [
    (name, layout)
    for name, layout in CASES
    if name in ("llama", "qwen3_moe", "gpt2", "phi3")
    and layout not in VARIANTS
    and (name == "gpt2" or "2 kv heads" not in layout)
]


@pytest.mark.thin(40)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_float32(name: str, layout: str) -> None:
    ranks, parallel = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    assert_parity(Model(config=family(name)), plan_for("fp32", **parallel), world_size=ranks, micro_batch=2)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layout"), EXACT)
def test_float64(name: str, layout: str) -> None:
    ranks, parallel = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    micro_batch = 1 if ranks == 2 else 4
    assert_parity(Model(config=family(name)), plan_for("fp64", **parallel), world_size=ranks, micro_batch=micro_batch)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_eight_ranks(name: str) -> None:
    plan = plan_for("fp32", cp=2, ep=2, zero=3)
    assert_parity(Model(config=family(name)), plan, world_size=8, micro_batch=1)
