"""The peak-memory formula with activation bytes of a few dry-run layers matches a dry run of the full layout."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.lab.families import family
from weft.job import Job, Model
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.peak_memory import LayerActivations, peak_memory
from weft.planner.dryrun.count_activations import count_activations
from weft.planner.dryrun.layer_activations import trace_layers
from weft.planner.dryrun.trace import trace
from weft.planner.search.space_of_job import shape_of
from weft.planner.search.strategy import stack_for

pytestmark = pytest.mark.together
ZB = {"schedule": "zb-h1"}
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**family("llama"), **SIZES},
    "qwen3_moe": {
        **family("qwen3_moe"),
        **SIZES,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
    },
}


def job_of(model: str, **plan: Any) -> Job:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 1024}
    train = {"global_batch_size": 16, "micro_batch_size": 2}
    return Job.parse({"model": {"config": MODELS[model]}, "data": data, "train": train, "plan": plan})


@cache
def traced(model: str) -> LayerActivations:
    """Twenty dry runs, cached for all tests of a model, which therefore run in one worker."""
    return trace_layers(job_of(model), "cuda", with_tp=True)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_recomputed_activations_are_not_saved(model: str) -> None:
    found = traced(model)
    assert found.layer["none"] > found.layer["light"] > found.layer["attention"] > found.layer["full"]
    assert found.layer["none"] > found.layer["mlp"] > found.layer["full"]
    assert found.layer["full"] == pytest.approx(2 * 256, rel=0.05)  # the input of a block, in bf16
    # The head keeps logits of a part of the tokens; those of all, in float32 and with their gradient, would be 8 bytes each.
    assert 4096 < found.ends < 4096 * 8


def test_a_process_of_its_own_counts_the_same() -> None:
    found = count_activations(job_of("llama"), "cuda")
    assert found is not None
    assert found.layer == {kind: traced("llama").layer[kind] for kind in ("none", "full")}  # type: ignore[index]
    assert found.ends == traced("llama").ends
    job = job_of("llama")
    unknown = job.model_copy(update={"model": Model(config={"model_type": "none of them"})})
    assert count_activations(unknown, "cuda") is None


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", {"parallel": {"zero": 0}}),
        ("llama", {"parallel": {"zero": 1}}),
        ("llama", {"parallel": {"zero": 2}}),
        ("llama", {"parallel": {"zero": 3}}),
        ("llama", {"parallel": {"zero": 1, "tp": 2}}),
        ("llama", {"parallel": {"zero": 3, "tp": 2}, "memory": {"recompute": ["block"]}}),
        ("llama", {"parallel": {"zero": 1, "pp": 2}}),
        ("llama", {"parallel": {"zero": 2, "pp": 2}}),
        ("llama", {"parallel": {"zero": 3, "pp": 2}}),
        ("llama", {"parallel": {"zero": 1, "pp": 2}, "pipeline": ZB}),
        ("llama", {"parallel": {"zero": 1, "pp": 2}, "pipeline": ZB, "memory": {"recompute": ["block"]}}),
        ("llama", {"parallel": {"zero": 1}, "memory": {"recompute": ["block"]}}),
        ("llama", {"parallel": {"zero": 1}, "memory": {"recompute": ["block"], "recompute_interval": 2}}),
        ("llama", {"parallel": {"zero": 1}, "memory": {"recompute": ["attention", "activation", "norm"]}}),
        ("llama", {"parallel": {"zero": 1}, "memory": {"recompute": ["mlp"]}}),
        ("llama", {"parallel": {"zero": 1}, "precision": {"weights": "split"}}),
        ("llama", {"parallel": {"zero": 3}, "precision": {"weights": "split"}}),
        ("llama", {"parallel": {"zero": 3}, "memory": {"optimizer_device": "host", "recompute": ["block"]}}),
        ("qwen3_moe", {"parallel": {"zero": 1, "ep": 4}}),
        ("qwen3_moe", {"parallel": {"zero": 1, "ep": 4}, "memory": {"recompute": ["mlp"]}}),
        ("qwen3_moe", {"parallel": {"zero": 3, "ep": 2}, "memory": {"recompute": ["activation", "norm"]}}),
        ("qwen3_moe", {"parallel": {"zero": 1, "ep": 2}, "comm": {"expert_overlap": "joint"}}),
        ("qwen3_moe", {"parallel": {"zero": 1, "pp": 2, "ep": 2}, "pipeline": {"schedule": "dualpipev"}}),
        ("qwen3_moe", {"parallel": {"zero": 1, "pp": 2, "ep": 2}, "pipeline": {"schedule": "interleaved-overlap"}}),
        ("qwen3_moe", {"parallel": {"zero": 3, "tp": 2}, "memory": {"recompute": ["mlp"]}}),
        ("qwen3_moe", {"parallel": {"zero": 3, "tp": 2, "ep": 2}, "memory": {"optimizer_device": "host"}}),
    ],
)
def test_peak_memory_formula_matches_dry_run(model: str, plan: dict[str, Any]) -> None:
    job = job_of(model, **plan)
    runs = trace(job, 4, [0, 3], "cuda")
    layout = layout_of(runs[0].plan, 1024, 16, 2)
    stack = replace(stack_for(job.plan.precision, job.plan.compute, "cpu"), imbalance=1.0)  # a dry run routes evenly
    memory = peak_memory(shape_of(job), layout, stack, traced(model))
    assert memory.allocated == pytest.approx(max(run.count.peak for run in runs), rel=0.1)
