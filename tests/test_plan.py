"""Plans: degrees, rules about excluded settings, and resolution."""

import re

import pytest

from tests.lab.plans import resolved
from weft.errors import JobError, PlanError
from weft.job import Job, keys
from weft.plan import (
    RULES,
    Comm,
    Compute,
    Kernels,
    Memory,
    Parallel,
    Pipeline,
    Plan,
    Precision,
    refuse_run_keys,
    resolve_plan,
)
from weft.plan.rules import needs


def test_dp_shard_takes_the_remaining_ranks() -> None:
    plan = resolved(Plan(parallel=Parallel(dp_replicate=2)), 8)
    assert plan.parallel.dp_shard == 4
    assert plan.parallel.data_ranks == 8


@pytest.mark.parametrize(
    ("parallel", "world_size", "words"),
    [
        ({"dp_replicate": 3}, 4, "4 ranks cannot be divided by dp_replicate 3"),
        ({"dp_replicate": 2, "dp_shard": 3}, 4, "= 6, but there are 4 ranks"),
        ({"ep": 3}, 4, "ep 3 does not divide dp_shard 4"),
    ],
)
def test_degrees_that_do_not_fit(parallel: dict[str, int], world_size: int, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        resolved(Plan(parallel=Parallel(**parallel)), world_size)
    assert caught.value.rule
    assert caught.value.fix


@pytest.mark.parametrize("precision", [{"param_dtype": "fp16"}, {"param_dtype": "fp32", "update": "bf16"}])
def test_excluded_dtypes(precision: dict[str, str]) -> None:
    with pytest.raises(PlanError):
        resolved(Plan(precision=Precision(**precision)), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("plan.parallel.dp_shard=0", "plan.parallel.dp_shard is -1 or a whole number of at least 1"),
        ("plan.parallel.expert_capacity=0.5", "plan.parallel.expert_capacity is 0 or a number of at least 1"),
        ('plan.precision.update="fp16"', 'plan.precision.update is "fp64", "fp32" or "bf16"'),
        ('plan.precision.reduce_dtype="fp16"', 'plan.precision.reduce_dtype is "fp64", "fp32" or "bf16"'),
    ],
)
def test_values_that_a_key_does_not_take(setting: str, words: str) -> None:
    with pytest.raises(JobError, match=re.escape(setting.partition("=")[0])) as caught:
        Job.parse({"model": {"path": "model"}}, [setting])
    assert words in (caught.value.rule or "")
    assert caught.value.fix


def test_rules_name_their_keys_and_a_message_has_the_values() -> None:
    for rule in RULES:
        assert rule.keys, rule.name
        assert set(rule.candidates) <= set(rule.keys), rule.name
        assert all(f"plan.{key}" in keys() for key in rule.keys if key != "compute.kernels"), rule.name
        assert any(key.rpartition(".")[2] in rule.fix for key in rule.keys), rule.name
    with pytest.raises(PlanError, match=r"etp without ep: plan\.parallel\.etp = 2, plan\.parallel\.ep = 1") as caught:
        resolved(Plan(parallel=Parallel(etp=2)), 2)
    assert caught.value.fix == "set plan.parallel.ep above 1, or plan.parallel.etp to 1"
    with pytest.raises(KeyError):
        needs("parallel.no_such_key", "parallel.ep > 1")


def test_a_resolved_plan_leaves_nothing_open() -> None:
    plan = Plan(parallel=Parallel(pp=2), pipeline=Pipeline(schedule="zbv"))
    found = resolve_plan(plan, 4, native_bf16=True)
    assert (found.parallel.world_size, found.pipeline.virtual_stages, found.precision.param_dtype) == (4, 2, "bf16")
    assert resolve_plan(found, 4, native_bf16=False) is found
    assert Plan.model_validate(found.model_dump()).model_dump() == found.model_dump()
    with pytest.raises(PlanError, match="but there are 8 ranks"):
        resolve_plan(found, 8, native_bf16=True)


def test_every_rule_can_be_broken_and_the_default_breaks_none() -> None:
    breaking = [
        Plan(parallel=Parallel(rebalance="auto", pp=2)),
        Plan(parallel=Parallel(rebalance="auto", ep=2)),
        Plan(pipeline=Pipeline(virtual_stages=2)),
        Plan(pipeline=Pipeline(stage_blocks=(1, 2), head_cost=1)),
        Plan(pipeline=Pipeline(stage_blocks=(1, 2), embedding_cost=1)),
        Plan(pipeline=Pipeline(stage_blocks=(1, 2), block_costs=(1, 2, 3))),
        Plan(parallel=Parallel(cp=2, cp_ulysses=3)),
        Plan(comm=Comm(overlap_chunks=2)),
        Plan(comm=Comm(expert_overlap="joint")),
        Plan(comm=Comm(expert_compression="fp8")),
        Plan(parallel=Parallel(expert_balance="replicate")),
        Plan(parallel=Parallel(etp=2)),
        Plan(parallel=Parallel(ep=2, etp=2, expert_balance="replicate")),
        Plan(parallel=Parallel(pp=2, ep=2), comm=Comm(expert_overlap="joint")),
        Plan(parallel=Parallel(expert_slots=3)),
        Plan(parallel=Parallel(expert_relocate_every=10)),
        Plan(parallel=Parallel(ep=2, etp=2, expert_relocate_every=10)),
        Plan(parallel=Parallel(ep=2, expert_relocate_every=10), comm=Comm(compression="int8")),
        Plan(parallel=Parallel(expert_drop="position")),
        Plan(precision=Precision(param_dtype="fp16")),
        Plan(precision=Precision(backward="fp16")),
        Plan(precision=Precision(param_dtype="fp32", backward="fp16")),
        Plan(precision=Precision(param_dtype="fp32", update="bf16")),
        Plan(parallel=Parallel(zero=0), precision=Precision(reduce_dtype="bf16")),
        Plan(precision=Precision(param_dtype="fp32", weights="split")),
        Plan(precision=Precision(param_dtype="bf16", update="bf16", weights="split")),
        Plan(precision=Precision(update="bf16", optimizer_state_dtype="int8")),
        Plan(memory=Memory(recompute=("block", "norm"))),
        Plan(memory=Memory(recompute=("mlp", "activation"))),
        Plan(memory=Memory(recompute_interval=2)),
        Plan(memory=Memory(offload=("block", "mlp"))),
        Plan(memory=Memory(offload=("mlp",), recompute=("mlp",))),
        Plan(memory=Memory(offload_prefetch=2)),
        Plan(parallel=Parallel(zero=0), memory=Memory(parameters_device="disk")),
        Plan(comm=Comm(compression="int8"), memory=Memory(parameters_device="disk")),
        Plan(memory=Memory(offload_bytes=1)),
        Plan(memory=Memory(offload_to="disk")),
        Plan(memory=Memory(optimizer_bytes=(1000,))),
        Plan(memory=Memory(optimizer_device="host", optimizer_bytes=(1000, 2000))),
        Plan(comm=Comm(compression="2:4"), precision=Precision(update="fp64", reduce_dtype="fp64")),
        Plan(comm=Comm(error_feedback=False)),
        Plan(comm=Comm(compress_scope="inter_node")),
        Plan(parallel=Parallel(cp=2), compute=Compute(attention="sdpa")),
        Plan(memory=Memory(recompute=("mlp",)), compute=Compute(compile="blocks")),
        Plan(precision=Precision(matmul="fp8", param_dtype="fp16", loss_scale="dynamic")),
        Plan(precision=Precision(matmul="fp8"), parallel=Parallel(tp=2)),
        Plan(precision=Precision(emulate_fp8=True)),
        Plan(precision=Precision(quantize="int8", matmul="fp8")),
        Plan(precision=Precision(quantize="int8", frozen_weights="nf4")),
        Plan(precision=Precision(quantize="int8", backward="fp16", loss_scale="dynamic")),
        Plan(precision=Precision(matmul="fp8", backward="fp16", loss_scale="dynamic")),
        Plan(precision=Precision(quantize="int8", quantize_inputs="fp8")),
        Plan(parallel=Parallel(tp=2), precision=Precision(quantize="int8")),
        Plan(precision=Precision(quantize="int8", param_dtype="bf16", weights="split")),
        Plan(precision=Precision(quantize="int8", param_dtype="fp64", update="fp64")),
        Plan(compute=Compute(compile="blocks"), precision=Precision(backward="fp16", loss_scale="dynamic")),
        Plan(compute=Compute(compile="blocks", kernels=Kernels(rms_norm="triton"))),
        Plan(compute=Compute(attention="eager", kernels=Kernels(attention="flash"))),
    ]
    for rule in RULES:
        assert any(rule.broken(plan.with_dtypes(native_bf16=False)) for plan in breaking), rule.name
        assert not rule.broken(Plan().with_dtypes(native_bf16=True)), rule.name
        assert not rule.broken(Plan().with_dtypes(native_bf16=False)), rule.name


def test_own_loops_refuse_an_attention_kernel_by_name() -> None:
    for name in ("auto", "reference"):
        refuse_run_keys(Plan(compute=Compute(kernels=Kernels(attention=name))), "weft.prepare")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match='attention = "cudnn"'):
        refuse_run_keys(Plan(compute=Compute(kernels=Kernels(attention="cudnn"))), "weft.prepare")


@pytest.mark.parametrize(
    ("settings", "native", "emulated"),
    [
        ({}, "bf16", "fp32"),
        ({"param_dtype": "bf16"}, "bf16", "bf16"),
        ({"param_dtype": "fp32"}, "fp32", "fp32"),
        ({"update": "fp64", "reduce_dtype": "fp64"}, "bf16", "fp32"),
        ({"update": "bf16"}, "bf16", "bf16"),
        ({"weights": "split"}, "bf16", "bf16"),
        ({"backward": "fp16", "loss_scale": "dynamic"}, "bf16", "bf16"),
    ],
)
def test_auto_precision_follows_the_device_and_the_other_settings(
    settings: dict[str, str], native: str, emulated: str
) -> None:
    for supported, expected in ((True, native), (False, emulated)):
        plan = resolve_plan(Plan(precision=Precision(**settings)), 1, native_bf16=supported)  # type: ignore[arg-type]
        assert plan.precision.param_dtype == expected


def test_plans_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Plan().parallel.zero = 1  # type: ignore[misc]
