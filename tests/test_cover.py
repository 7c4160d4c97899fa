"""Pairwise coverage of family, layout, ZeRO stage, dtype and technique, compared with the original model."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bits import assert_near, assert_same_bits, records_of
from tests.lab.cover import Row, covering_array, pairs_of
from tests.lab.families import FAMILIES, family
from tests.lab.parity import assert_parity, packed_batches, reference
from tests.lab.plans import resolved
from tests.lab.techniques import LOSSY, NEUTRAL, SPLITS, Tables, ranks_of
from weft.errors import PlanError
from weft.job import Model
from weft.plan import Plan

EXPERTS = tuple(name for name, config in FAMILIES.items() if any("experts_per_tok" in key for key in config))
LAYOUTS: dict[str, Tables] = {
    "data ranks": {},
    **{name: SPLITS[name] for name in SPLITS if not name.startswith("zero")},
    "tp x cp": {"parallel": {"tp": 2, "cp": 2}},
    "pp x tp": {"parallel": {"pp": 2, "tp": 2}},
}
TECHNIQUES: dict[str, Tables] = {
    "none": {},
    "recompute block": NEUTRAL["recompute block"],
    "recompute attention and mlp": {"memory": {"recompute": ("attention", "mlp")}},
    "recompute activation and norm": {"memory": {"recompute": ("activation", "norm")}},
    "offload block": NEUTRAL["offload block"],
    "offload attention and mlp": {"memory": {"offload": ("attention", "mlp"), "offload_to": "disk"}},
    "states on a disk": NEUTRAL["states on a disk"],
    "split weights": NEUTRAL["split weights"],
    **LOSSY,
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "layout": tuple(LAYOUTS),
    "technique": tuple(TECHNIQUES),
    "zero": (0, 1, 2, 3),
    "dtype": ("fp32", "fp64", "bf16"),
}
WIDE = {"hidden_size": 128, "n_embd": 128, "head_dim": 32, "moe_intermediate_size": 64}
"""Sizes with optimizer states large enough for quantization."""
# Other families sum in float32 inside, in another order than over documents alone.
EXACT = ("llama", "qwen3_moe", "gpt2", "phi3")


def tables_of(row: Row, technique: str) -> Tables:
    """Plan of a row with a given technique."""
    tables: Tables = {name: dict(table) for name, table in TECHNIQUES[technique].items()}
    for name, table in LAYOUTS[row["layout"]].items():
        tables[name] = {**table, **tables.get(name, {})}
    tables["parallel"] = {**tables.get("parallel", {}), "zero": row["zero"]}
    formats = {"param_dtype": row["dtype"]}
    if row["dtype"] == "fp64":
        formats |= {"update": "fp64", "reduce_dtype": "fp64"}
    tables["precision"] = {**formats, **tables.get("precision", {})}
    return tables


def is_plan(row: Row) -> bool:
    """True if no rule refuses the plan of a row."""
    tables = tables_of(row, row["technique"])
    try:
        resolved(Plan.model_validate(tables), ranks_of(tables))
    except PlanError:
        return False
    return True


PLANS = {
    (layout, technique, zero, dtype)
    for layout, technique, zero, dtype in product(*list(SETTINGS.values())[1:])
    if is_plan({"layout": layout, "technique": technique, "zero": zero, "dtype": dtype})
}


def is_possible(row: Row) -> bool:
    """True if the family supports layout and dtype, and no rule refuses the plan."""
    return (
        (not row["layout"].startswith("ep") or row["family"] in EXPERTS)
        and (row["dtype"] != "fp64" or row["family"] in EXACT)
        and tuple(row.values())[1:] in PLANS
    )


# Three dense families and three with experts, which differ in tied and packed matrices, biases, windows and kinds of experts.
# Each pair of their settings is in a row of `make test`.
BRIEF = {
    **SETTINGS,
    "family": ("llama", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    "layout": tuple(name for name in LAYOUTS if " x " not in name),
    "technique": tuple(name for name in TECHNIQUES if name != "offload block"),
}
REQUIRED = covering_array(BRIEF, is_possible)
OTHERS = [row for row in covering_array(SETTINGS, is_possible) if row not in REQUIRED]


@pytest.mark.parametrize("settings", [BRIEF, SETTINGS], ids=["brief", "all"])
def test_every_possible_pair_is_in_a_row(settings: dict[str, tuple[Any, ...]]) -> None:
    """Compared with an independent count over all possible rows."""
    rows = REQUIRED if settings is BRIEF else REQUIRED + OTHERS
    every = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    expected = {pair for row in every if is_possible(row) for pair in pairs_of(row)}
    assert all(is_possible(row) for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == expected
    assert {value for row in rows for value in row.items()} == {
        (name, value) for name, values in settings.items() for value in values
    }
    assert covering_array(BRIEF, is_possible) == REQUIRED


def name_of(row: Row) -> str:
    return "-".join(map(str, row.values()))


@pytest.mark.parametrize(
    "row",
    [*(pytest.param(row, marks=pytest.mark.must("covering array")) for row in REQUIRED), *OTHERS],
    ids=name_of,
)
def test_row(row: Row, tmp_path: Path) -> None:
    """Equal to the original model in fp32 and fp64. In bf16, bit-equal to the plan without the technique, with a loss close to
    the original model. With a lossy technique, close to the plan without it."""
    technique, dtype = row["technique"], row["dtype"]
    tables = tables_of(row, technique)
    several = "pp" in tables["parallel"] or "expert_overlap" in tables.get("comm", {})
    ranks, micro_batch = ranks_of(tables), 1 if several else 2
    tables["memory"] = {**tables.get("memory", {}), "offload_dir": str(tmp_path)}
    plan, plain = Plan.model_validate(tables), Plan.model_validate(tables_of(row, "none"))
    config = family(row["family"])
    if technique in LOSSY:
        config |= {
            name: size
            for name, size in WIDE.items()
            if name in config and config.get("qk_rope_head_dim") != config[name]
        }
        assert_near(config, ranks, micro_batch, plain, plan, rel=0.05)
    elif dtype != "bf16":
        assert_parity(Model(config=config), plan, ranks, micro_batch)
    elif technique != "none":
        assert_same_bits(config, ranks, micro_batch, plain, plan)
    else:
        expected = reference(Model(config=config), "fp32", packed_batches(config["vocab_size"]), 4)
        for trace in records_of(config, plan, ranks, micro_batch):
            assert trace.losses == pytest.approx(expected.losses, rel=0.02)
