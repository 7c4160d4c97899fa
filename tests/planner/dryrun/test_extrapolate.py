"""A dry run of a few layers, micro-batches and chunks of the loss gives the same counts as a full one."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.plans import resolved
from weft.job import Job
from weft.planner.costmodel.hardware import DEVICES
from weft.planner.costmodel.operator_roofline import roofline_seconds
from weft.planner.costmodel.operators import Operation, TensorSpec
from weft.planner.dryrun import step_counts
from weft.planner.dryrun.extrapolate import trace_in_brief, two_depths
from weft.planner.dryrun.trace import Trace, trace

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 14, "vocab_size": 512, "head_dim": 16}


def job_of(name: str, changes: dict[str, Any], **plan: Any) -> Job:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 64}
    train = {"global_batch_size": 24, "micro_batch_size": 1}
    config = {**family(name), **SIZES, **changes}
    return Job.parse({"model": {"config": config}, "data": data, "train": train, "plan": plan})


def seconds(found: Trace) -> float:
    """Seconds of all operator calls on an H100 by their rooflines."""
    return sum(times * roofline_seconds(call, DEVICES["H100"]) for call, times in found.count.operations.items())


@pytest.mark.slow("a dry run of all 14 layers")
@pytest.mark.parametrize(
    ("name", "changes", "ranks", "plan"),
    [
        ("llama", {}, 4, {"parallel": {"zero": 3}}),
        ("llama", {"num_hidden_layers": 22}, 2, {"memory": {"recompute": ["block"], "recompute_interval": 3}}),
        ("llama", {}, 2, {"parallel": {"zero": 2}, "memory": {"offload": ["block"]}}),
        ("llama", {}, 4, {"parallel": {"tp": 2, "zero": 3}, "precision": {"param_dtype": "bf16"}}),
        ("qwen3_moe", {}, 4, {"parallel": {"ep": 2, "zero": 2}}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 7}, 2, {"parallel": {"zero": 3}}),
        ("deepseek_v3", {"num_hidden_layers": 15, "head_dim": 8}, 2, {"parallel": {"zero": 3}}),
        ("llama", {"num_hidden_layers": 4}, 8, {"parallel": {"pp": 4, "zero": 2}}),
        (
            "llama",
            {"num_hidden_layers": 8},
            4,
            {"parallel": {"pp": 4}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
        ),
        ("llama", {"num_hidden_layers": 4}, 4, {"parallel": {"pp": 4}, "pipeline": {"schedule": "zb-h1"}}),
    ],
)
def test_extrapolated_dry_run_equals_full_dry_run(
    name: str, changes: dict[str, Any], ranks: int, plan: dict[str, Any]
) -> None:
    job = job_of(name, changes, **plan)
    brief = trace_in_brief(job, ranks, "cuda")
    full = trace(job, ranks, [found.rank for found in brief], "cuda")
    if job.plan.parallel.pp == 1:
        interval = job.plan.memory.recompute_interval
        assert two_depths(job.model.config, interval) is not None, "the dry run was not extrapolated"
    for short, long in zip(brief, full, strict=True):
        assert seconds(short) == (pytest.approx(seconds(long), rel=0.01) if job.plan.parallel.pp == 1 else 0)
        assert short.parameters == long.parameters
        assert short.count.peak == pytest.approx(long.count.peak, rel=0.01)
        assert short.count.state_bytes == pytest.approx(long.count.state_bytes, rel=0.01)
        assert short.count.flops == long.count.flops
        traffic = {row[:3]: row[3:] for row in short.count.traffic()}
        assert traffic == {row[:3]: row[3:] for row in long.count.traffic()}
        assert short.offload_traffic == long.offload_traffic


def has_data(arguments: Any) -> bool:
    """True for the arguments of a call on weights, activations or gradients; others count the targets of a step."""
    if isinstance(arguments, TensorSpec):
        return arguments.dtype.is_floating_point
    return isinstance(arguments, tuple) and any(map(has_data, arguments))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", {"parallel": {"tp": 2, "zero": 3}}),  # with messages in each chunk
        ("qwen3_moe", {"parallel": {"ep": 2, "zero": 2}, "comm": {"expert_overlap": "joint"}}),
        ("llama", {"parallel": {"pp": 2}}),
    ],
)
def test_chunks_and_micro_batches_that_are_left_out_are_counted(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: dict[str, Any]
) -> None:
    """Memory, messages in order, FLOPs and operator calls are exactly those of a dry run of all of them."""
    job = job_of(name, {"num_hidden_layers": 2, "vocab_size": 2**20, "max_position_embeddings": 160}, **plan)
    ranks = resolved(job.plan, 4).parallel.data_ranks
    update = {
        "data": {"source": "tokens", "path": "none.npy", "seq_len": 160},
        "train": {"global_batch_size": 4 * ranks},
    }
    job = Job.parse(job.model_dump(exclude_none=True) | update)  # four micro-batches of five chunks or ten
    (brief,) = trace(job, 4, [3], "cuda")
    monkeypatch.setattr(step_counts, "FEW", 100)  # in the forks of the dry runs, too
    (full,) = trace(job, 4, [3], "cuda")
    calls = [
        {call: times for call, times in found.count.operations.items() if has_data(call.arguments)}
        for found in (brief, full)
    ]
    assert calls[0] == calls[1]
    nothing: Counter[Operation] = Counter()
    assert replace(brief.count, operations=nothing) == replace(full.count, operations=nothing)


def test_models_with_unequal_layers_are_not_extrapolated() -> None:
    assert two_depths({**family("llama"), "num_hidden_layers": 8}) is None  # not much deeper
    assert two_depths({**family("llama"), "num_hidden_layers": 81}) == (5, 7)
    assert two_depths({**family("llama"), "num_hidden_layers": 80}, recompute_interval=3) == (8, 14)
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 10
    assert two_depths({**family("gemma3_text"), "num_hidden_layers": 40, "layer_types": kinds}) == (4, 8)
    assert two_depths({**family("qwen3_moe"), "num_hidden_layers": 40, "mlp_only_layers": [30]}) is None
