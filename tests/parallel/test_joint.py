"""Joint forwards and backwards: parity with one process, and the bits of the plain order."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import assert_parity, packed_batches, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.plan_schedule import runs_jointly
from weft.parallel.runtime import runtime
from weft.parallel.weights import to_local
from weft.plan import Pipeline, Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe")
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero 0": (2, 8, {"parallel": {"zero": 0, "ep": 2}}),
    "zero 1": (2, 8, {"parallel": {"zero": 1, "ep": 2}}),
    "zero 2": (2, 8, {"parallel": {"zero": 2, "ep": 2}}),
    "zero 3": (2, 8, {"parallel": {"zero": 3, "ep": 2}}),
    "ep 4": (4, 16, {"parallel": {"zero": 0, "ep": 4}}),
    "edp 2": (4, 16, {"parallel": {"zero": 3, "ep": 2}}),
    "tp 2": (4, 8, {"parallel": {"zero": 3, "tp": 2, "ep": 4}}),
    "cp 2": (4, 8, {"parallel": {"zero": 2, "cp": 2, "ep": 2}}),
    "recompute": (2, 8, {"parallel": {"zero": 3, "ep": 2}, "memory": {"recompute": ["block"]}}),
    "recompute, zero 0": (2, 8, {"parallel": {"zero": 0, "ep": 2}, "memory": {"recompute": ["block"]}}),
    "recompute, random numbers": (2, 8, {"parallel": {"zero": 2, "ep": 2}, "memory": {"recompute": ["block"]}}),
    "recompute, replicas": (
        2,
        8,
        {"parallel": {"zero": 3, "ep": 2, "expert_balance": "replicate"}, "memory": {"recompute": ["mlp"]}},
    ),
    "recompute, tp 2": (4, 8, {"parallel": {"zero": 3, "tp": 2, "ep": 4}, "memory": {"recompute": ["block"]}}),
    "recompute, cp 2": (4, 8, {"parallel": {"zero": 2, "cp": 2, "ep": 2}, "memory": {"recompute": ["block"]}}),
    "recompute, dualpipev": (
        4,
        8,
        {
            "parallel": {"pp": 2, "zero": 3, "ep": 2},
            "pipeline": {"schedule": "dualpipev"},
            "memory": {"recompute": ["block"]},
        },
    ),
    "recompute of parts": (2, 8, {"parallel": {"zero": 2, "ep": 2}, "memory": {"recompute": ["mlp", "norm"]}}),
    "offload": (2, 8, {"parallel": {"zero": 2, "ep": 2}, "memory": {"offload": ["block"]}}),
    "int8": (2, 8, {"parallel": {"zero": 0, "ep": 2}, "comm": {"compression": "int8"}}),
    "dualpipev": (4, 8, {"parallel": {"pp": 2, "zero": 0, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
    "dualpipev, zero 3": (4, 8, {"parallel": {"pp": 2, "zero": 3, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
    "interleaved-overlap": (
        4,
        8,
        {
            "parallel": {"pp": 2, "zero": 2, "ep": 2},
            "pipeline": {"schedule": "interleaved-overlap", "virtual_stages": 2},
        },
    ),
}
"""Ranks, rows of the global batch, and the plan."""
COMPILED = {"compiled blocks": (2, 8, {"parallel": {"zero": 2, "ep": 2}, "compute": {"compile": "blocks"}})}


def plan_of(layout: str, dtype: str = "fp32", overlap: str = "joint") -> tuple[int, int, Plan]:
    ranks, rows, tables = (LAYOUTS | COMPILED)[layout]
    precision = {"param_dtype": dtype, "update": "fp32", "reduce_dtype": "fp32"}
    comm = {"expert_overlap": overlap, **tables.get("comm", {})}
    return ranks, rows, Plan.model_validate({"precision": precision, **tables, "comm": comm})


def config_of(name: str, layout: str) -> dict[str, Any]:
    config = {**family(name), "first_k_dense_replace": 0}
    if "random" in layout:
        config["router_jitter_noise"] = 0.2
    return {**config, "num_hidden_layers": 4} if "pp" in (LAYOUTS | COMPILED)[layout][2]["parallel"] else config


@pytest.mark.must("parity: joint lanes", case="qwen3_moe-zero 0")
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout not in ("int8", "recompute, random numbers")]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_parity(name: str, layout: str) -> None:
    ranks, rows, plan = plan_of(layout)
    assert_parity(Model(config=config_of(name, layout)), plan, ranks, 1, rows=rows)


def gradients(rank: int, ranks: int, name: str, layout: str, dtype: str, overlap: str, rows: int) -> dict[str, Any]:
    """Loss and local gradients of a step with several micro-batches, and the number of hand-overs."""
    source = Model(config=config_of(name, layout))
    plan = resolved(plan_of(layout, dtype, overlap)[2], ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    torch.manual_seed(rank)
    config = read_config(source)
    model = parallelize(build_on_meta(config, DTYPES["fp32"]), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    batches = share(packed_batches(config.vocab_size, rows)[0], data_rank(mesh), plan.parallel.data_ranks, 1)
    loss = forward_backward(model, batches, 1.0)
    lanes = runtime(model).lanes
    found = {name: to_local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "hand-overs": lanes.handovers if lanes else 0, **found}


def test_compiled_blocks_have_the_bits_of_the_plain_order() -> None:
    check_bits("compiled blocks", "fp32")


@pytest.mark.must("composition: joint lanes", case="int8-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_of_the_plain_order(layout: str, dtype: str) -> None:
    check_bits(layout, dtype)


def check_bits(layout: str, dtype: str) -> None:
    ranks, rows, _ = plan_of(layout)
    name = "mixtral" if "random" in layout else "deepseek_v3" if "zero 3" in layout else "qwen3_moe"
    expected = run_ranks(ranks, gradients, name, layout, dtype, "off", rows)
    found = run_ranks(ranks, gradients, name, layout, dtype, "auto" if "pipe" in layout else "joint", rows)
    for own, reference in zip(found, expected, strict=True):
        assert own.pop("hand-overs") > 0
        assert reference.pop("hand-overs") == 0
        assert own.keys() == reference.keys()
        for key, value in reference.items():
            assert torch.equal(own[key], value), key


@pytest.mark.must("refusal: joint lanes")
def test_joint_is_refused_without_ep_and_without_joint_slots(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expert_overlap = joint without ep"):
        resolved(Plan.model_validate({"comm": {"expert_overlap": "joint"}}), 2)
    plan = Plan.model_validate({"parallel": {"pp": 2, "ep": 2, "zero": 0}, "comm": {"expert_overlap": "joint"}})
    with pytest.raises(PlanError, match="joint experts in a pipeline without joint slots"):
        resolved(plan, 4)
    (tmp_path / "plain.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    plan = plan.model_copy(update={"pipeline": Pipeline(schedule=str(tmp_path / "plain.csv"))})
    with pytest.raises(PlanError, match='expert_overlap = "joint" with the schedule'):
        runs_jointly(resolved(plan, 4))
