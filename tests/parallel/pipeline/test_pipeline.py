"""A pipelined model has the losses, logits, gradients and updates of the plain model, for every schedule."""

from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import assert_parity, packed_batches, plan_for, run_plan
from tests.lab.pool import run_ranks
from weft.job import Model
from weft.parallel.pipeline.schedules import SCHEDULES
from weft.plan import Parallel, Pipeline, Plan, Precision

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "gpt2")
EIGHT = 8  # number of micro-batches that every schedule supports on 4 ranks


def source(name: str, blocks: int, **changes: Any) -> Model:
    config: dict[str, Any] = {**family(name), **changes}
    config["n_layer" if name == "gpt2" else "num_hidden_layers"] = blocks
    if name == "gemma3_text":
        config["layer_types"] = [("sliding_attention", "full_attention")[index % 2] for index in range(blocks)]
    return Model(config=config)


def virtual_stages(schedule: str) -> list[int]:
    fewest, most = SCHEDULES[schedule].virtual_stages
    return list(range(fewest, min(most or 3, 3) + 1))


def check(name: str, ranks: int, schedule: str, stages: int, dtype: str = "fp32", **parallel: Any) -> None:
    plan = plan_for(dtype, Pipeline(schedule=schedule, virtual_stages=stages), **parallel)
    blocks = max(plan.parallel.pp * stages, 3)
    # The rounding of a float32 router depends on its number of tokens per call: the reference uses the same number.
    at_once = 1 if dtype == "fp64" else None
    assert_parity(source(name, blocks), plan, ranks, micro_batch=1, rows_at_once=at_once, rows=EIGHT)


@pytest.mark.must("parity: pipeline schedules", case="2-gpipe-1")
@pytest.mark.parametrize(
    ("schedule", "stages"), [(schedule, stages) for schedule in SCHEDULES for stages in virtual_stages(schedule)]
)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_matches_plain_model(pp: int, schedule: str, stages: int) -> None:
    check("llama", pp, schedule, stages, pp=pp, zero=0)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved", "dualpipev"])
@pytest.mark.parametrize("name", FAMILIES[1:])
def test_every_family_matches_plain_model(name: str, schedule: str) -> None:
    check(name, 2, schedule, virtual_stages(schedule)[0], pp=2, zero=1)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (4, {"zero": 0}),
    "zero1": (4, {"zero": 1}),
    "zero2": (4, {"zero": 2}),
    "zero3": (4, {"zero": 3}),
    "tp2 sp": (4, {"tp": 2, "zero": 1}),
    "tp2": (4, {"tp": 2, "sp": False, "zero": 0}),
    "cp2": (4, {"cp": 2, "zero": 1}),
    "cp2 ulysses": (4, {"cp": 2, "cp_ulysses": 2, "zero": 0}),
    "ep2": (4, {"ep": 2, "zero": 1}),
    "ep2 zero3": (4, {"ep": 2, "zero": 3}),
}
HAS_EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def applies(name: str, layout: str) -> bool:
    return "ep2" not in layout or name in HAS_EXPERTS


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_pipeline_with_another_axis_matches_plain_model(name: str, layout: str, schedule: str) -> None:
    if not applies(name, layout):
        pytest.skip("no experts")
    ranks, parallel = LAYOUTS[layout]
    check(name, ranks, schedule, virtual_stages(schedule)[0], pp=2, **parallel)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES[1:])
def test_every_family_and_schedule_matches_plain_model_on_four_ranks(name: str, schedule: str) -> None:
    check(name, 4, schedule, virtual_stages(schedule)[-1], pp=4, zero=1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_schedule_and_axis_matches_plain_model(name: str, layout: str, schedule: str) -> None:
    if not applies(name, layout):
        pytest.skip("no experts")
    ranks, parallel = LAYOUTS[layout]
    check(name, ranks, schedule, virtual_stages(schedule)[-1], pp=2, **parallel)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-overlap", "zb-h1"])
@pytest.mark.parametrize(
    ("name", "parallel"),
    [("llama", {"tp": 2, "zero": 1}), ("llama", {"tp": 2, "zero": 3}), ("qwen3_moe", {"tp": 2, "ep": 2, "zero": 1})],
    ids=str,
)
def test_three_axes_on_eight_ranks_match_plain_model(name: str, parallel: dict[str, Any], schedule: str) -> None:
    check(name, 8, schedule, virtual_stages(schedule)[0], pp=2, **parallel)


@pytest.mark.must("parity: pipeline schedules", case="qwen3-{'zero': 0}-zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3}, {"tp": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tied_and_untied_embeddings_match_plain_model(name: str, parallel: dict[str, Any], schedule: str) -> None:
    """With 1F1B the embedding and the head are on two ranks, with ZBV on one."""
    plan = plan_for("fp32", Pipeline(schedule=schedule, virtual_stages=virtual_stages(schedule)[0]), pp=2, **parallel)
    assert_parity(source(name, 4, tie_word_embeddings=True), plan, 4 if len(parallel) > 1 or parallel["zero"] else 2, 1)


@pytest.mark.parametrize("parallel", [{"ep": 2, "zero": 1}, {"tp": 2, "zero": 0}], ids=str)
def test_stage_without_experts_matches_plain_model(parallel: dict[str, Any]) -> None:
    plan = plan_for("fp32", Pipeline(stage_blocks=(2, 1)), pp=2, **parallel)
    assert_parity(source("deepseek_v3", 3, first_k_dense_replace=2), plan, 4, micro_batch=1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_float64_matches_plain_model(name: str, schedule: str) -> None:
    check(name, 2, schedule, virtual_stages(schedule)[0], "fp64", pp=2, zero=1)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_bf16_gradients_are_accumulated_in_fp32(schedule: str, zero: int) -> None:
    """Also deferred weight gradients, which are computed long after the backward of their micro-batch."""
    batches, found = packed_batches(96, 2 * EIGHT), {}
    for name in ("1f1b", schedule):
        plan = Plan(
            parallel=Parallel(pp=2, zero=zero),  # type: ignore[arg-type]
            pipeline=Pipeline(schedule=name),
            precision=Precision(param_dtype="bf16"),
        )
        traces = run_ranks(4, run_plan, source("llama", 4), plan, batches, 1)
        found[name] = {key: value for trace in traces for key, value in trace.gradients.items()}
    for key, gradient in found["1f1b"].items():
        assert torch.equal(found[schedule][key], gradient), key
