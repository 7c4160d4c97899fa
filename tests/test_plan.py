"""Plans: degrees, rules about excluded settings, and resolution."""

import pytest

from weft.errors import PlanError
from weft.plan import RULES, Comm, Compute, Kernels, Memory, Parallel, Pipeline, Plan, Precision


def test_dp_shard_takes_the_remaining_ranks() -> None:
    plan = Plan(parallel=Parallel(dp_replicate=2)).resolve(8)
    assert plan.parallel.dp_shard == 4
    assert plan.parallel.data_ranks == 8


@pytest.mark.parametrize(
    ("parallel", "world_size", "words"),
    [
        ({"dp_replicate": 3}, 4, "4 ranks cannot be divided by dp_replicate 3"),
        ({"dp_replicate": 2, "dp_shard": 3}, 4, "= 6, but there are 4 ranks"),
        ({"dp_shard": 0}, 1, "dp_shard = 0"),
        ({"ep": 3}, 4, "ep 3 does not divide dp_shard 4"),
    ],
)
def test_degrees_that_do_not_fit(parallel: dict[str, int], world_size: int, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        Plan(parallel=Parallel(**parallel)).resolve(world_size)
    assert caught.value.rule
    assert caught.value.fix


@pytest.mark.parametrize(
    "precision",
    [
        {"param_dtype": "fp16"},
        {"update": "fp16", "param_dtype": "bf16"},
        {"param_dtype": "fp32", "update": "bf16"},
        {"reduce_dtype": "fp16"},
    ],
)
def test_excluded_dtypes(precision: dict[str, str]) -> None:
    with pytest.raises(PlanError):
        Plan(precision=Precision(**precision)).resolve(1)  # type: ignore[arg-type]


def test_every_rule_can_be_broken_and_the_default_breaks_none() -> None:
    breaking = [
        Plan(parallel=Parallel(rebalance="auto", pp=2)),
        Plan(parallel=Parallel(rebalance="auto", ep=2)),
        Plan(pipeline=Pipeline(virtual_stages=2)),
        Plan(pipeline=Pipeline(stage_blocks=(1, 2), head_cost=1)),
        Plan(parallel=Parallel(cp=2, cp_ulysses=3)),
        Plan(parallel=Parallel(dp_shard=0)),
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
        Plan(parallel=Parallel(expert_capacity=0.9)),
        Plan(parallel=Parallel(expert_drop="position")),
        Plan(precision=Precision(param_dtype="fp16")),
        Plan(precision=Precision(update="fp16")),
        Plan(precision=Precision(backward="fp16")),
        Plan(precision=Precision(param_dtype="fp32", backward="fp16")),
        Plan(precision=Precision(param_dtype="fp32", update="bf16")),
        Plan(precision=Precision(reduce_dtype="fp16")),
        Plan(parallel=Parallel(zero=0), precision=Precision(reduce_dtype="bf16")),
        Plan(precision=Precision(param_dtype="fp32", weights="split")),
        Plan(precision=Precision(update="bf16", optimizer_state_dtype="int8")),
        Plan(memory=Memory(recompute=("block", "norm"))),
        Plan(memory=Memory(recompute=("mlp", "activation"))),
        Plan(memory=Memory(recompute_interval=2)),
        Plan(memory=Memory(offload=("block", "mlp"))),
        Plan(memory=Memory(offload=("mlp",), recompute=("mlp",))),
        Plan(memory=Memory(offload_prefetch=2)),
        Plan(memory=Memory(optimizer_bytes=(1000,))),
        Plan(memory=Memory(optimizer_device="host", optimizer_bytes=(1000, 2000))),
        Plan(comm=Comm(compression="2:4"), precision=Precision(update="fp64", reduce_dtype="fp64")),
        Plan(comm=Comm(error_feedback=False)),
        Plan(parallel=Parallel(cp=2), compute=Compute(attention="sdpa")),
        Plan(memory=Memory(recompute=("mlp",)), compute=Compute(compile="blocks")),
        Plan(precision=Precision(matmul="fp8", param_dtype="fp16", loss_scale="dynamic")),
        Plan(precision=Precision(matmul="fp8"), parallel=Parallel(tp=2)),
        Plan(precision=Precision(emulate_fp8=True)),
        Plan(precision=Precision(quantize="int8", matmul="fp8")),
        Plan(precision=Precision(quantize="int8", quantize_inputs="fp8")),
        Plan(parallel=Parallel(tp=2), precision=Precision(quantize="int8")),
        Plan(precision=Precision(quantize="int8", param_dtype="bf16", weights="split")),
        Plan(precision=Precision(quantize="int8", param_dtype="fp64", update="fp64")),
        Plan(compute=Compute(compile="blocks"), precision=Precision(backward="fp16", loss_scale="dynamic")),
        Plan(compute=Compute(compile="blocks", kernels=Kernels(rms_norm="triton"))),
    ]
    for rule in RULES:
        assert any(rule.broken(plan.resolve_precision(native_bf16=False)) for plan in breaking), rule.name
        assert not rule.broken(Plan().resolve_precision(native_bf16=True)), rule.name
        assert not rule.broken(Plan().resolve_precision(native_bf16=False)), rule.name


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
        plan = Plan(precision=Precision(**settings)).resolve(1).resolve_precision(supported)  # type: ignore[arg-type]
        assert plan.precision.param_dtype == expected
        assert plan.resolve(1) == plan


def test_plans_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Plan().parallel.zero = 1  # type: ignore[misc]
