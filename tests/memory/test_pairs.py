"""Every pair of techniques on a small MoE model: parity, or the plan refuses the pair (docs/compatibility.md)."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.bits import assert_near, assert_same_bits
from tests.lab.families import family
from tests.lab.parity import assert_parity
from tests.lab.plans import resolved
from tests.lab.techniques import LOSSY, NEUTRAL, PAIRS, SPLITS, TECHNIQUES, join, ranks_of
from weft.errors import PlanError
from weft.job import Model
from weft.plan import Plan

CONFIG = family("qwen3_moe")
WIDE = {**CONFIG, "hidden_size": 128, "moe_intermediate_size": 64}
"""Config whose optimizer states are large enough to be quantized."""
BF16 = {"param_dtype": "bf16"}
FP32 = {"param_dtype": "fp32"}


def plan_of(tables: dict[str, Any], precision: dict[str, str], folder: Path | None = None) -> Plan:
    tables = {**tables, "precision": {**precision, **tables.get("precision", {})}}
    if folder is not None:
        tables["memory"] = {**tables.get("memory", {}), "offload_dir": str(folder)}
    return Plan.model_validate(tables)


def possible() -> list[tuple[str, str]]:
    """Pairs that can be combined and that the plan accepts."""
    found = []
    for pair in PAIRS:
        tables = join(*pair)
        if tables is not None:
            try:
                resolved(plan_of(tables, BF16), ranks_of(tables))
            except PlanError:
                continue
            found.append(pair)
    return found


@pytest.mark.parametrize(("one", "other"), possible())
def test_pair_matches_its_reference(one: str, other: str, tmp_path: Path) -> None:
    """Compare a plan with both techniques with its reference.

    - Two ways of sharding: the plain model.
    - A technique that rounds, sharded or not: close to the plan without it.
    - Otherwise: bit-equal to the plan without the neutral techniques.
    """
    tables = join(one, other)
    assert tables is not None
    ranks = ranks_of(tables)
    several = "pp" in tables.get("parallel", {}) or "expert_overlap" in tables.get("comm", {})
    micro_batch = 1 if several else 2
    if one in SPLITS and other in SPLITS:
        assert_parity(Model(config=CONFIG), plan_of(tables, FP32), ranks, micro_batch)
        return
    lossy = [name for name in (one, other) if name in LOSSY]
    if lossy and not {one, other} & NEUTRAL.keys():
        exact: dict[str, Any] = SPLITS[one] if one in SPLITS else SPLITS.get(other, {})
        assert_near(WIDE, ranks, micro_batch, plan_of(exact, BF16), plan_of(tables, BF16), rel=0.05)
        return
    plain: dict[str, Any] = {}
    for name in (one, other):
        if name not in NEUTRAL:
            plain |= TECHNIQUES[name]
    plain["parallel"] = tables.get("parallel", {})  # weights on a disk need ZeRO, which changes the order of sums
    config = WIDE if lossy else CONFIG
    assert_same_bits(config, ranks, micro_batch, plan_of(plain, BF16), plan_of(tables, BF16, tmp_path))
