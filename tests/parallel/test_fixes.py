"""Every suggested fix leads to a valid plan, or to a refusal about another key."""

import json
import re
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.lab.families import family
from tests.lab.plans import resolved, resolved_job
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.errors import JobError, PlanError
from weft.job import Job, Model
from weft.parallel.choices import check_axes
from weft.parallel.pipeline.plan_schedule import load_schedule
from weft.plan import Plan
from weft.training.job_checks import check_model

VALUE = r'(?:"[^"]*"|-?\d+)'
SUGGESTION = re.compile(
    rf"((?:plan|data|optimizer|train)\.[\w.]+) (?:to|=) (?:one of )?({VALUE}(?:(?:, | or ){VALUE})*)"
)


def suggestions(error: JobError) -> list[tuple[str, Any]]:
    """Keys and values that a fix suggests."""
    found = SUGGESTION.findall(error.fix or "")
    return [(key, json.loads(value)) for key, values in found for value in re.findall(VALUE, values)]


def with_value(tables: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {**tables, head: with_value(tables.get(head, {}), rest, value) if rest else value}


def check_fixes(tables: dict[str, Any], refusal: Any, rounds: int = 6) -> None:
    """Check that each suggested value is accepted or another key is refused, and that following the first fix ends."""
    for _ in range(rounds):
        error = refusal(tables)
        if error is None:
            return
        assert error.fix, error
        suggested = suggestions(error)
        if not suggested:
            return
        for key, value in suggested:
            again = refusal(with_value(tables, key, value))
            refused = again is not None and (key in (again.where or "") or key in dict(suggestions(again)))
            # A plan without its model does not know which ep the experts support.
            assert not refused or "that divides the number of experts" in error.fix, (
                f"{error}\n\n{key} = {value}:\n{again}"
            )
        tables = with_value(tables, *suggested[0])
    pytest.fail(f"still refused after {rounds} fixes: {refusal(tables)}")


# Incompatible settings of a plan


def rule_refusal(tables: dict[str, Any]) -> PlanError | None:
    try:
        resolved(Plan.model_validate(tables["plan"]), 4)
    except PlanError as error:
        return error
    return None


WIDE = ["fp64", "fp32", "bf16"]
DTYPES = [*WIDE, "fp16"]


PRECISIONS = {
    "param_dtype": DTYPES,
    "update": WIDE,
    "reduce_dtype": WIDE,
    "optimizer_state_dtype": ["update", "bf16", "int8"],
    "weights": ["whole", "split"],
    "loss_scale": ["none", "dynamic"],
    "backward": ["forward", "fp16"],
}
ZEROS, COMPRESSIONS = range(4), ["none", "int8"]


def precision_tables(precision: tuple[str, ...], zero: int, compression: str) -> dict[str, Any]:
    settings = dict(zip(PRECISIONS, precision, strict=True))
    return {"plan": {"precision": settings, "parallel": {"zero": zero}, "comm": {"compression": compression}}}


@settings(max_examples=400)
@given(st.tuples(*map(st.sampled_from, PRECISIONS.values())), st.sampled_from(ZEROS), st.sampled_from(COMPRESSIONS))
def test_fixes_of_precision(precision: tuple[str, ...], zero: int, compression: str) -> None:
    check_fixes(precision_tables(precision, zero, compression), rule_refusal, rounds=9)


def test_fixes_of_all_precisions() -> None:
    for precision, zero, compression in product(product(*PRECISIONS.values()), ZEROS, COMPRESSIONS):
        check_fixes(precision_tables(precision, zero, compression), rule_refusal, rounds=9)


def test_a_fix_that_leads_to_another_rule() -> None:
    """Every dtype suggested for the requested precision breaks a rule about another dtype."""
    precision = ("fp64", "bf16", "bf16", "update", "whole", "none", "forward")
    check_fixes(precision_tables(precision, 0, "none"), rule_refusal, rounds=9)


@settings(max_examples=300, deadline=None)
@given(
    tp=st.integers(1, 6),
    cp=st.integers(1, 6),
    pp=st.integers(1, 6),
    dp_shard=st.sampled_from([-1, 1, 2, 3]),
    ep=st.integers(1, 6),
    world=st.integers(1, 12),
)
@example(tp=3, cp=1, pp=1, dp_shard=1, ep=1, world=4)
def test_fixes_of_degrees(tp: int, cp: int, pp: int, dp_shard: int, ep: int, world: int) -> None:
    def refusal(tables: dict[str, Any]) -> PlanError | None:
        try:
            resolved(Plan.model_validate(tables["plan"]), world)
        except PlanError as error:
            return error
        return None

    check_fixes({"plan": {"parallel": {"tp": tp, "cp": cp, "pp": pp, "dp_shard": dp_shard, "ep": ep}}}, refusal)


# Degrees and a model


@lru_cache(maxsize=64)
def model_of(config: str) -> tuple[Any, Any]:
    model = build_on_meta(read_config(Model(config=json.loads(config))), torch.float32)
    return model, read_anatomy(model)


def axes_refusal(config: str, world: int, micro_batches: int = 8) -> Any:
    def refusal(tables: dict[str, Any]) -> PlanError | None:
        try:
            plan = resolved(Plan.model_validate(tables["plan"]), world)
            check_axes(*model_of(config), plan, tables["data"]["seq_len"], micro_batches)
        except PlanError as error:
            return error
        return None

    return refusal


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Model with random numbers of heads, hidden units and experts, and parallel degrees that may fit."""
    name = draw(st.sampled_from(["llama", "phi3", "olmo2", "qwen3_moe"]))
    groups, kv_heads = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    config = {
        **family(name),
        "num_attention_heads": groups * kv_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": 8 * groups * kv_heads,
        "intermediate_size": draw(st.sampled_from([36, 40, 48])),
        **({"num_experts": draw(st.sampled_from([4, 6]))} if name == "qwen3_moe" else {}),
    }
    cp = draw(st.sampled_from([1, 2, 4]))
    parallel = {
        "tp": draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        "cp": cp,
        "cp_ulysses": draw(st.sampled_from([u for u in (1, 2, 4) if cp % u == 0])),
        "ep": draw(st.sampled_from([1, 2, 3, 4, 8])) if name == "qwen3_moe" else 1,
        "sp": draw(st.booleans()),
    }
    tables = {"plan": {"parallel": parallel}, "data": {"seq_len": draw(st.sampled_from([12, 16, 18, 20, 64]))}}
    return json.dumps(config), tables


def heads(name: str, heads: int, kv_heads: int, parallel: dict[str, Any], **others: int) -> tuple[str, dict[str, Any]]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    tables = {"plan": {"parallel": parallel}, "data": {"seq_len": others.pop("seq_len", 48)}}
    return json.dumps({**family(name), **sizes, **others}), tables


@settings(max_examples=120, deadline=None)
@given(cases())
@example(heads("llama", 6, 3, {"tp": 4}))
@example(heads("phi3", 6, 3, {"tp": 2}))
@example(heads("llama", 8, 4, {"tp": 8}, intermediate_size=36))
@example(heads("llama", 6, 3, {"tp": 3, "cp": 2}, seq_len=18))
@example(heads("qwen3_moe", 4, 2, {"tp": 4, "ep": 4}, num_experts=6))
def test_fixes_of_axes(case: tuple[str, dict[str, Any]]) -> None:
    config, tables = case
    parallel = tables["plan"]["parallel"]
    check_fixes(tables, axes_refusal(config, world=parallel["tp"] * parallel.get("cp", 1) * 2))


@pytest.mark.parametrize("blocks", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("stages", ["auto", 1, 2, 3])
def test_fixes_of_stages(blocks: int, schedule: str, stages: Any) -> None:
    config = json.dumps({**family("llama"), "num_hidden_layers": blocks})
    for pp in (2, 4):
        pipeline = {"schedule": schedule, "virtual_stages": stages}
        tables = {"plan": {"parallel": {"pp": pp}, "pipeline": pipeline}, "data": {"seq_len": 16}}
        check_fixes(tables, axes_refusal(config, world=12))


# A job


@pytest.mark.parametrize("steps", [1, 2, 8, 20, 1000])
@pytest.mark.parametrize("warmup", [0, 10, 30])
def test_the_fix_of_freeze_steps(steps: int, warmup: int) -> None:
    def refusal(tables: dict[str, Any]) -> JobError | None:
        try:
            Job.parse(tables)
        except JobError as error:
            return error
        return None

    tables: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "train": {"steps": steps}}
    tables["optimizer"] = {"name": "onebit-adam", "warmup_steps": warmup, "freeze_steps": 1000}
    tables["plan"] = {"comm": {"compression": "1-bit"}}
    error = refusal(tables)
    assert error is not None
    for key, value in suggestions(error):
        tables = with_value(tables, key, value)
    again = refusal(tables)
    assert again is None, again


def test_the_fix_of_a_row_that_is_too_long_can_be_split() -> None:
    def refusal(tables: dict[str, Any]) -> JobError | None:
        job = Job.parse(tables)
        try:
            check_model(resolved_job(job, 4))
        except JobError as error:
            return error
        return None

    tables = {
        "model": {"config": {**family("llama"), "max_position_embeddings": 51}},
        "data": {"seq_len": 64, "source": "tokens"},
        "plan": {"parallel": {"tp": 2, "cp": 2}},
    }
    error = refusal(tables)
    assert error is not None
    assert suggestions(error) == [("data.seq_len", 48)]
    check_fixes(tables, refusal)


@pytest.mark.parametrize(("stages", "named"), [(4, [("plan.pipeline.virtual_stages", 2)]), (3, [])])
def test_the_fix_of_a_table_of_other_stages(stages: int, named: list[tuple[str, int]], tmp_path: Path) -> None:
    """Three stages cannot be divided among two ranks by any virtual_stages: the fix is to change the table."""
    file = tmp_path / "own.csv"
    rows = [",".join(f"{stage}{kind}0" for kind in "FB" for stage in range(rank, stages, 2)) for rank in range(2)]
    file.write_text("\n".join(rows), encoding="utf-8")
    plan = resolved(Plan.model_validate({"parallel": {"pp": 2}, "pipeline": {"schedule": str(file)}}), 2)
    with pytest.raises(PlanError, match=f"has {stages} stages") as error:
        load_schedule(plan, 1)
    assert suggestions(error.value) == named
    assert "write the table for 2 stages" in (error.value.fix or "")


def test_the_fix_of_a_tp_degree_lists_all_degrees() -> None:
    config = {**family("llama"), "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = build_on_meta(read_config(Model(config={**config, "intermediate_size": 96})), torch.float32)
    with pytest.raises(PlanError) as refusal:
        check_axes(model, read_anatomy(model), resolved(Plan.model_validate({"parallel": {"tp": 4}}), 4))
    assert refusal.value.fix == "set plan.parallel.tp to one of 1, 3, 6"


@pytest.mark.parametrize(
    ("pp", "blocks", "pipeline"),
    [
        (8, 3, {"schedule": "zbv"}),
        (2, 6, {"schedule": "interleaved", "virtual_stages": 4}),
        (4, 5, {"schedule": "zbv"}),
    ],
)
def test_the_fix_of_too_many_stages_fits_the_model(pp: int, blocks: int, pipeline: dict[str, Any]) -> None:
    config = {**family("llama"), "num_hidden_layers": blocks}
    model = build_on_meta(read_config(Model(config=config)), torch.float32)
    anatomy = read_anatomy(model)

    def refusal(tables: dict[str, Any]) -> PlanError | None:
        plan = Plan.model_validate(tables)
        try:
            check_axes(model, anatomy, resolved(plan, plan.parallel.pp))
        except PlanError as error:
            return error
        return None

    tables: dict[str, Any] = {"parallel": {"pp": pp}, "pipeline": pipeline}
    error = refusal(tables)
    assert error is not None
    for key, value in suggestions(error):
        tables = with_value(tables, key.removeprefix("plan."), value)
    if "remove virtual_stages" in (error.fix or ""):
        tables = with_value(tables, "pipeline.virtual_stages", "auto")
    assert refusal(tables) is None, error
