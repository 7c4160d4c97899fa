"""Frozen weights in 4 bits: adapters beside them, compared with PEFT and the same rounded weights in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.adapters import (
    WIDE,
    assert_adapter_parity,
    batches_for,
    job_for,
    reference,
    round_weights,
    run_job,
    start_folder,
)
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, plan_for
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import observe, train_in_the_pool
from weft.adapters.model import build_model
from weft.errors import ModelError
from weft.job import Adapter, Job, Model
from weft.plan import Pipeline, Plan
from weft.planner.dryrun.trace import trace
from weft.training.metrics import read_metrics

LLAMA: dict[str, Any] = {**family("llama"), **WIDE}
CONFIGS = {"llama": {**LLAMA, "vocab_size": 300}, "moe": {**family("qwen3_moe"), **WIDE, "moe_intermediate_size": 128}}


@pytest.mark.must("parity: frozen weights in 4 bits", case="lora-{'zero': 3}")
@pytest.mark.parametrize(
    "parallel",
    [
        *({"zero": stage} for stage in (0, 1, 2, 3)),
        *({"cp": 2, "zero": 3}, {"pp": 2}, {"pp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": False, "zero": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_equal_those_of_peft_on_the_rounded_weights(
    tmp_path: Path, kind: Any, parallel: dict[str, Any]
) -> None:
    folder = start_folder(tmp_path / "adapter", LLAMA, kind)
    expected = reference(LLAMA, folder, batches_for(LLAMA), round_weights)
    pipeline = Pipeline(schedule="1f1b") if "pp" in parallel else None
    plan = plan_for("fp32", pipeline, **parallel)
    plan = plan.model_copy(update={"precision": plan.precision.model_copy(update={"frozen_weights": "nf4"})})
    job = job_for(LLAMA, plan, Adapter(kind=kind, r=4, alpha=8, path=str(folder)))
    found = run_ranks(2, run_job, job, batches_for(LLAMA), 1, timeout=120)
    assert_adapter_parity(found, expected, pipeline="pp" in parallel)
    exact = reference(LLAMA, folder, batches_for(LLAMA))
    assert abs(exact.losses[0] - expected.losses[0]) > 1e-5  # rounding is visible


EXPERTS = ["o_proj", "experts.gate_up_proj", "experts.down_proj"]
BF16, FP16_BACKWARD = {"param_dtype": "bf16"}, {"param_dtype": "bf16", "backward": "fp16", "loss_scale": 1024.0}
WIDE_MODULES = {"param_dtype": "bf16", "fp32_modules": ("router", "norm", "head")}
FP8 = {"param_dtype": "bf16", "matmul": "fp8", "emulate_fp8": True}
ALL = "all-linear"
Z3: dict[str, Any] = {"zero": 3}
PLANS: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "experts, ep": ("moe", EXPERTS, 2, {"parallel": {"ep": 2, "zero": 0}}),
    "experts, ep and tp": ("moe", EXPERTS, 4, {"parallel": {"tp": 2, "ep": 2, **Z3}}),
    "experts, recompute": ("moe", EXPERTS, 2, {"parallel": {"ep": 2, **Z3}, "memory": {"recompute": ("mlp",)}}),
    "experts, joint lanes": ("moe", EXPERTS, 2, {"parallel": {"ep": 2, **Z3}, "comm": {"expert_overlap": "joint"}}),
    "experts, replicas": ("moe", EXPERTS, 2, {"parallel": {"ep": 2, "expert_balance": "replicate"}, "precision": BF16}),
    "etp": ("moe", ["o_proj"], 4, {"parallel": {"ep": 2, "etp": 2, **Z3}}),
    "split backward": ("moe", ["o_proj"], 2, {"parallel": {"pp": 2, **Z3}, "pipeline": {"schedule": "zb-h1"}}),
    "compiled experts": ("moe", ["o_proj"], 2, {"parallel": {"zero": 2}, "compute": {"compile": "blocks"}}),
    "fp32 modules": ("moe", ["o_proj"], 4, {"parallel": {"ep": 2, **Z3}, "precision": WIDE_MODULES}),
    "bf16, zero 3": ("llama", ALL, 2, {"parallel": Z3, "precision": BF16}),
    "bf16, zero 0": ("llama", ALL, 2, {"parallel": {"zero": 0}, "precision": BF16}),
    "fp16 backward": ("llama", ALL, 2, {"parallel": {"zero": 2}, "precision": FP16_BACKWARD}),
    "fp8": ("llama", ALL, 2, {"parallel": Z3, "precision": FP8}),
    "split weights": ("llama", ALL, 2, {"parallel": Z3, "precision": {**BF16, "weights": "split_even"}}),
    "states of 8 bits": ("llama", ALL, 2, {"parallel": Z3, "precision": {"optimizer_state_dtype": "int8"}}),
    "compiled": ("llama", ALL, 2, {"parallel": Z3, "compute": {"compile": "blocks"}}),
    "recompute": ("llama", ALL, 2, {"parallel": Z3, "memory": {"recompute": ("norm", "activation")}}),
    "offload": ("llama", ALL, 2, {"parallel": Z3, "memory": {"offload": ("block",), "offload_to": "disk"}}),
    "weights on a disk": ("llama", ALL, 2, {"parallel": Z3, "memory": {"parameters_device": "disk"}}),
    "tp in chunks": ("llama", ALL, 4, {"parallel": {"tp": 2, **Z3}, "comm": {"overlap_chunks": 2}}),
    "compressed gradients": ("llama", ALL, 2, {"parallel": {"zero": 2}, "comm": {"compression": "int8"}}),
    "replicas of shards": ("llama", ALL, 4, {"parallel": {"dp_replicate": 2, **Z3}}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models with exact and with rounded weights."""
    found = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        model.save_pretrained(folder / "whole")
        round_weights(model)
        model.save_pretrained(folder / "rounded")
        found[name] = folder
    return found


@pytest.mark.must("composition: frozen weights in 4 bits", case="experts, ep and tp")
@pytest.mark.must("composition: frozen weights in 4 bits", case="split weights")
@pytest.mark.parametrize("plan_name", PLANS)
def test_bits_are_those_of_the_rounded_weights(plan_name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Losses, gradients and weights of adapters, beside those of a run whose weights are rounded and not packed."""
    name, targets, ranks, tables = PLANS[plan_name]
    config = CONFIGS[name]
    adapter = Adapter(
        kind="lora", r=4, alpha=8, targets=targets, path=str(start_folder(tmp_path / "a", config, "lora", targets))
    )
    records = []
    for source, frozen in (("whole", "nf4"), ("rounded", "whole")):
        precision = {"param_dtype": "fp32", **tables.get("precision", {}), "frozen_weights": frozen}
        memory = {**tables.get("memory", {}), "offload_dir": str(tmp_path)}
        plan = Plan.model_validate({**tables, "precision": precision, "memory": memory})
        job = Job(model=Model(path=str(sources[name] / source)), plan=plan, adapter=adapter, optimizer=SETTINGS)
        records.append(run_ranks(ranks, run_job, job, batches_for(config), 1, timeout=120))
    for found, expected in zip(*records, strict=True):
        assert found.losses == expected.losses
        for kind in ("gradients", "weights"):
            own, others = getattr(found, kind), getattr(expected, kind)
            assert own.keys() == others.keys()
            assert [key for key in own if not torch.equal(own[key], others[key])] == []


SETTINGS_OF_A_RUN: dict[str, Any] = {
    "model": {"config": {**LLAMA, "vocab_size": 300}},
    "adapter": {"kind": "qlora", "r": 4},
    "checkpoint": {"every": 1},
    "optimizer": {"schedule": "constant", "warmup_steps": 0},
}


@pytest.mark.effect("plan.precision.frozen_weights", "bytes of parameters by dtype; matmuls of the unpacked dtype")
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_run_holds_packed_weights_and_resumes(zero: int, tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path, **SETTINGS_OF_A_RUN, plan={"parallel": {"zero": zero}}))
    out, _ = train_in_the_pool(job, 2)
    memory = json.loads((out / "run.json").read_text())["memory"]
    assert memory["measured"]["parameters"] == memory["predicted"]["parameters"]
    assert memory["measured"]["optimizer"] == memory["predicted"]["optimizer"]
    blocks = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    adapters = sum(p.numel() for n, p in build_model(job, torch.float32).named_parameters() if "lora" in n)
    others = sum(p.numel() for p in build_model(job, torch.float32).parameters()) - blocks - adapters
    shards = {0: (1, 1), 2: (2, 1), 3: (2, 2)}[zero]  # of adapters, and of frozen weights
    expected = 4 * adapters / shards[0] + (9 / 16 * blocks + 4 * others) / shards[1]
    assert memory["measured"]["parameters"] == pytest.approx(expected, rel=1e-3)
    (dry,) = trace(job, 2, [0])
    assert dry.count.state_bytes["parameters"] == memory["measured"]["parameters"]
    longer = job.model_copy(update={"train": job.train.model_copy(update={"steps": 3})})
    train_in_the_pool(longer, 2, resume="auto")
    resumed = read_metrics(out / "metrics.jsonl")
    whole = job.model_copy(update={"train": longer.train, "out": str(tmp_path / "whole")})
    train_in_the_pool(whole, 2)
    assert [row.loss for row in resumed] == [row.loss for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")]


def test_a_model_without_frozen_weights_is_refused(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path, plan={"precision": {"frozen_weights": "nf4"}}))
    with pytest.raises(ModelError, match=r"freeze the weights \(requires_grad_\(False\)\) under adapters"):
        train_in_the_pool(job, 2)
    assert not (tmp_path / "run").exists()


def test_a_part_that_is_no_multiple_of_64_is_refused(tmp_path: Path) -> None:
    model = {"config": {**LLAMA, "vocab_size": 300, "intermediate_size": 192}}
    job = Job.load(write_job(tmp_path, **{**SETTINGS_OF_A_RUN, "model": model}, plan={"parallel": {"tp": 2}}))
    with pytest.raises(RankError, match=r"down_proj\.base_layer\.weight has 96 columns on a rank"):
        train_in_the_pool(job, 2)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_new_adapters_are_those_of_the_rounded_weights(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """The norms of DoRA begin as those of the rounded weights, so that adapters change nothing at first."""
    losses = []
    for source, frozen in (("whole", "nf4"), ("rounded", "whole")):
        folder = tmp_path / frozen
        folder.mkdir()
        plan = {"precision": {"param_dtype": "fp32", "frozen_weights": frozen}, "parallel": {"zero": 3}}
        job = Job.load(write_job(folder, adapter={"kind": kind, "r": 4}, plan=plan))
        job = Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(sources["llama"] / source)}})
        losses.append(observe(job, 2).losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_weight_that_no_step_can_use_is_named(value: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["llama"]))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 70] = value
    model.save_pretrained(tmp_path / "model")
    job = Job.load(write_job(tmp_path, adapter={"kind": "qlora", "r": 4}))
    job = Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(tmp_path / "model")}})
    with pytest.raises(
        RankError, match=r"layers\.1\.mlp\.up_proj\.base_layer\.weight (is not finite|has a weight of 1e\+30)"
    ):
        observe(job, 2)
