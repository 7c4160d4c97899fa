"""A dry run equals a real run on every rank: all communication in order, FLOPs, state bytes and peak memory."""

import json
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.plans import resolved
from tests.lab.pool import close_pools, run_ranks
from tests.lab.task_jobs import task_job
from weft.adapters.model import build_model
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy, read_any_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.cli import main
from weft.data import AnyBatch
from weft.device.detect import detect
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.state_size import model_state_bytes
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Comm, Compute, Kernels, Memory
from weft.planner.dryrun.assumed import assumed_batches, assumed_row
from weft.planner.dryrun.modes import route_evenly
from weft.planner.dryrun.step_counts import StepCounts, count_step
from weft.planner.dryrun.trace import Trace, trace, trace_rank
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import RankValues, train_step
from weft.training.step_report import rank_values

RANKS = 4
EXAMPLES = Path(__file__).parents[3] / "examples"
# Wide enough that weights and activations dominate small tensors.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512, "num_key_value_heads": 4}
DENSE = {**family("llama"), **SIZES}
MOE = {**family("qwen3_moe"), **SIZES, "moe_intermediate_size": 64, "num_experts": 8}


def job_for(model: dict[str, Any], precision: str, micro_batch: int, **parallel: Any) -> Job:
    dtypes = {"param_dtype": precision, "update": "fp32", "reduce_dtype": "fp32"}
    return Job.parse(
        {
            "model": {"config": model},
            "data": {"seq_len": 32},
            "train": {"global_batch_size": 8, "micro_batch_size": micro_batch},
            "plan": {"parallel": parallel, "precision": dtypes},
        }
    )


def real_count(rank: int, world_size: int, job: Job) -> StepCounts:
    """Counts of the same step on a real rank."""
    plan = resolved(job.plan, world_size)
    job = job.model_copy(update={"plan": plan})
    mesh = build_mesh(plan, "cpu", world_size)
    model = build_model(job, DTYPES[plan.precision.update])
    anatomy = read_any_anatomy(model, needs_roles=False)
    route_evenly(model, anatomy)
    parallelize(model, plan, mesh)
    materialize(model, job.model, torch.device("cpu"), kind=job.task.kind)
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, job.optimizer), model, detect())
    batches = assumed_batches(job, torch.device("cpu"), assumed_row(job, model))

    def values() -> RankValues:
        return rank_values(torch.device("cpu"), anatomy, runtime(model).router_stats.take_loads())

    def step(batches: Sequence[AnyBatch]) -> None:
        assert train_step(model, optimizer, batches, 1.0, values=values).problem is None

    step(batches)
    return count_step(model, optimizer, batches, step, anatomy)


PLANS: list[tuple[dict[str, Any], str, int, dict[str, Any]]] = [
    (DENSE, "fp32", 2, {"zero": 0}),
    (DENSE, "bf16", 1, {"zero": 1}),
    (DENSE, "fp32", 1, {"zero": 2}),
    (DENSE, "bf16", 2, {"zero": 3}),
    (DENSE, "bf16", 1, {"tp": 2, "zero": 1}),  # four micro-batches, of which the dry run runs three
    (DENSE, "fp32", 1, {"tp": 4, "sp": False, "zero": 3}),  # eight
    ({**DENSE, "gradient_checkpointing": True}, "fp32", 1, {"zero": 3}),
    (DENSE, "fp32", 4, {"cp": 2, "zero": 3}),
    (DENSE, "fp32", 8, {"cp": 4, "cp_ulysses": 2, "zero": 0}),
    (DENSE, "fp32", 1, {"pp": 2, "zero": 3}),
    (DENSE, "bf16", 2, {"pp": 2, "tp": 2, "zero": 0}),
    ({**DENSE, "tie_word_embeddings": True}, "fp32", 2, {"pp": 2, "zero": 1}),
    (MOE, "bf16", 2, {"ep": 2, "zero": 3}),
    (MOE, "fp32", 1, {"ep": 4, "zero": 1}),
    (MOE, "fp32", 4, {"tp": 2, "ep": 2, "zero": 1}),
    (MOE, "fp32", 2, {"ep": 2, "etp": 2, "zero": 0}),
    (MOE, "fp32", 3, {"tp": 2, "cp": 2, "zero": 2}),  # micro-batches of 3, 3 and 2 rows
    (MOE, "fp32", 2, {"dp_replicate": 2, "zero": 3}),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan[0]['model_type']} {plan[1]} {plan[2]} {plan[3]}")
def test_dry_run_equals_real_run(plan: tuple[dict[str, Any], str, int, dict[str, Any]]) -> None:
    model, precision, micro_batch, parallel = plan
    assert_dry_equals_real(job_for(model, precision, micro_batch, **parallel))


OTHER_TASKS: list[dict[str, Any]] = [
    {"zero": 3},
    {"tp": 2, "sp": False, "zero": 1},
    {"cp": 2, "cp_ulysses": 2, "zero": 2},
    {"pp": 2, "zero": 0},
]


@pytest.mark.parametrize("parallel", OTHER_TASKS, ids=str)
@pytest.mark.parametrize("name", ["vlm", "masked", "seq2seq", "audio seq2seq", "image classification", "diffusion"])
def test_dry_run_of_other_tasks_equals_real_run(name: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    if name == "image classification" and "cp" in parallel:
        pytest.skip("17 patches")
    if name == "diffusion" and "pp" in parallel:
        pytest.skip("refused")
    if name == "vlm" and "pp" in parallel:
        pytest.skip("the images of a batch, which stages after the first one do not use, are not counted there")
    if name == "diffusion" and parallel["zero"] == 3:
        pytest.skip("gathers of layers that the model calls alone are not counted")
    job = task_job(name, tmp_path, plan={"parallel": parallel, "precision": {"param_dtype": "fp32"}})
    assert_dry_equals_real(job, 2)


@pytest.mark.parametrize(
    ("model", "comm", "parallel"),
    [
        (DENSE, Comm(compression="2:4"), {"zero": 0}),
        (DENSE, Comm(compression="int8"), {"zero": 3}),
        (MOE, Comm(expert_compression="fp8"), {"ep": 2, "zero": 0}),
    ],
)
def test_dry_run_equals_real_run_with_compression(model: dict[str, Any], comm: Comm, parallel: dict[str, Any]) -> None:
    job = job_for(model, "fp32", 2, **parallel)
    assert_dry_equals_real(job.model_copy(update={"plan": job.plan.model_copy(update={"comm": comm})}), 2)


def test_dry_run_equals_real_run_with_onebit_adam() -> None:
    tables = job_for(DENSE, "fp32", 2, zero=2).model_dump(exclude_none=True)
    tables["optimizer"] |= {"name": "onebit-adam", "freeze_steps": 20}
    tables["plan"]["comm"] = {"compression": "1-bit"}
    assert_dry_equals_real(Job.parse(tables), 2)


@pytest.mark.parametrize(("sp", "ranks"), [(True, 2), (True, 4), (False, 4)])
def test_dry_run_equals_real_run_with_chunked_overlap(sp: bool, ranks: int) -> None:
    job = job_for(DENSE, "fp32", 2, tp=2, sp=sp, zero=1)
    plan = job.plan.model_copy(update={"comm": Comm(overlap_chunks=4)})
    assert_dry_equals_real(job.model_copy(update={"plan": plan}), ranks)


def test_recompute_reduces_peak_memory() -> None:
    job = job_for(MOE, "bf16", 2, tp=2, zero=3)
    peaks = []
    for roles in ((), ("activation", "norm"), ("block",)):
        memory = Memory(recompute=roles)
        peaks.append(
            assert_dry_equals_real(job.model_copy(update={"plan": job.plan.model_copy(update={"memory": memory})}))
        )
    assert peaks[0] > max(peaks[1:])  # with two blocks, backward holds all activations of one block at a time


def test_split_weights_save_the_casts() -> None:
    """The peak is lower by two bytes per weight, because all casts for forward are alive at the peak."""
    job = job_for({**DENSE, "tie_word_embeddings": True}, "bf16", 2, zero=0)
    precision = job.plan.precision.model_copy(update={"weights": "split"})
    split = job.model_copy(update={"plan": job.plan.model_copy(update={"precision": precision})})
    saved = assert_dry_equals_real(job, 2) - assert_dry_equals_real(split, 2)
    (found,) = trace(job, 2, [0])
    assert saved == 2 * found.parameters


def test_offloaded_tensors_are_not_on_the_device(tmp_path: Path) -> None:
    """With offload to disk, activations on the device are lower; with offload to the host they are not on CPU."""
    job = job_for(DENSE, "bf16", 2, zero=3)
    from_logits = Compute(
        kernels=Kernels(linear_cross_entropy="reference")
    )  # its peak has the activations of all blocks
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"compute": from_logits})})
    plain = assert_dry_equals_real(job, 2)
    for tier in ("disk", "host"):
        memory = Memory(optimizer_device=tier, offload=("block",), offload_to=tier, offload_dir=str(tmp_path))
        moved = job.model_copy(update={"plan": job.plan.model_copy(update={"memory": memory})})
        activations = assert_dry_equals_real(moved, 2)
        assert (activations < plain) == (tier == "disk")


def assert_dry_equals_real(job: Job, world_size: int = RANKS) -> int:
    """Compare dry and real runs of all ranks; returns the largest activation bytes at the peak of a rank."""
    close_pools()  # torch caches device meshes of earlier runs, which have other process groups
    dry_runs = [found.count for found in trace(job, world_size, range(world_size))]
    for dry, real in zip(dry_runs, run_ranks(world_size, real_count, job), strict=True):
        assert dry.messages == real.messages
        assert dry.flops == real.flops
        assert dry.state_bytes == real.state_bytes
        assert dry.peak == pytest.approx(real.peak, rel=0.02)
        assert sum(real.peak_roles.values()) == real.peak_bytes["activations"]
        for kind, size in real.peak_bytes.items():
            assert dry.peak_bytes[kind] == pytest.approx(size, rel=0.02, abs=0.02 * real.peak), kind
    return max(found.peak_bytes["activations"] for found in dry_runs)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_state_bytes_match_the_formulas(zero: int) -> None:
    job = job_for(DENSE, "bf16", 2, zero=zero)
    model = build_on_meta(read_config(job.model), torch.float32)
    parameters = read_anatomy(model).parameters
    (found,) = trace(job, RANKS, [3])
    predicted, state = model_state_bytes(parameters, found.plan), found.count.state_bytes
    assert state["parameters"] == 4 * found.parameters
    for kind in ("parameters", "optimizer"):
        assert state[kind] == pytest.approx(predicted[kind], rel=0.01)
    # With zero 0, gradients are in persistent buckets, with one more float32 per tensor that flags an existing gradient.
    flags = 4 * len(list(model.parameters()))
    assert state.get("gradients", 0) == (predicted["gradients"] + flags if zero == 0 else 0)


@pytest.mark.slow("traces layers of models of 70 billion parameters and more")
@pytest.mark.parametrize(
    ("name", "world_size", "layers"), [("llama-70b", 64, 2), ("qwen3-235b", 512, 2), ("deepseek-v3", 2048, 5)]
)
def test_dry_run_of_a_model_larger_than_the_host(name: str, world_size: int, layers: int) -> None:
    settings = [f"model.config.num_hidden_layers={layers}", "data.seq_len=1024", "train.global_batch_size=1"]
    job = Job.load(EXAMPLES / f"{name}.toml", settings)
    parameters = read_anatomy(build_on_meta(read_config(job.model), torch.float32)).parameters
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as alone:  # a process without child processes of other tests
        first, last, most_kib = alone.submit(trace_ends, job, world_size).result()
    assert first.count.messages == last.count.messages
    assert first.count.flops == last.count.flops
    assert last.parameters <= first.parameters
    assert parameters / world_size <= first.parameters < parameters / world_size * 1.1  # norms are replicated over tp
    assert most_kib < 2**21


def trace_ends(job: Job, world_size: int) -> tuple[Trace, Trace, int]:
    """Traces of the first and the last rank, and the peak memory of the larger dry-run process in KiB."""
    first, last = trace(job, world_size, [0, world_size - 1], "cuda")
    return first, last, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.parametrize("recompute", ["attention", "by Transformers", "nothing"])
def test_cuda_attention_saves_no_scores(recompute: str) -> None:
    """With different head dimensions of keys and values, torch materializes the scores on CPU but not on CUDA."""
    model = {**family("deepseek_v3"), "v_head_dim": 4, "gradient_checkpointing": recompute == "by Transformers"}
    job = job_for(model, "bf16", 2, zero=3)
    if recompute == "attention":
        memory = Memory(recompute=("attention",))
        job = job.model_copy(update={"plan": job.plan.model_copy(update={"memory": memory})})
    job = job.model_copy(update={"data": job.data.model_copy(update={"packing": False, "seq_len": 64})})
    (cpu,), (cuda,) = trace(job, RANKS, [0], "cpu"), trace(job, RANKS, [0], "cuda")
    assert cuda.count.messages == cpu.count.messages
    assert cuda.count.state_bytes == cpu.count.state_bytes
    scores = 2 * 4 * 64 * 64 * 2  # bytes per layer: rows x heads x queries x keys x 2
    assert cuda.count.peak < cpu.count.peak - 2 * scores


def wide_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss with logits in float64."""
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")


def test_a_loss_of_ones_own_is_in_the_account() -> None:
    job = job_for(DENSE, "fp32", 4, zero=3)
    own = job.model_copy(update={"train": job.train.model_copy(update={"loss": f"{__name__}:wide_loss"})})
    plain, wide = (trace(which, RANKS, [0])[0].count for which in (job, own))
    logits = 2 * 32 * SIZES["vocab_size"]  # of a micro-batch of two rows
    assert wide.peak - plain.peak >= 2 * logits
    assert wide.flops == plain.flops


def test_invalid_plans_are_refused_before_the_dry_run() -> None:
    with pytest.raises(PlanError, match="4 ranks cannot be divided"):
        trace(job_for(DENSE, "fp32", 2, tp=3), RANKS, [0])
    with pytest.raises(PlanError, match="8 experts"):
        trace(job_for(MOE, "fp32", 2, ep=3), 3, [0])
    with pytest.raises(JobError, match="there is no rank 4"):
        trace(job_for(DENSE, "fp32", 2), RANKS, [4])
    job = job_for(DENSE, "fp32", 2)
    plan = job.plan.model_copy(update={"precision": job.plan.precision.model_copy(update={"matmul": "fp8"})})
    with pytest.raises(PlanError, match="matmul = 'fp8' on cpu"):
        trace(job.model_copy(update={"plan": plan}), RANKS, [0])


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
def test_fp8_matmuls_are_counted(model: dict[str, Any]) -> None:
    job = job_for(model, "bf16", 2, zero=0)
    precision = job.plan.precision.model_copy(update={"matmul": "fp8", "emulate_fp8": True})
    in_fp8 = job.model_copy(update={"plan": job.plan.model_copy(update={"precision": precision})})
    (plain,), (found,) = trace(job, RANKS, [0]), trace(in_fp8, RANKS, [0])
    padding = 1.25 if model is MOE else 1.0  # in weight gradients, for 16 rows per expert, of 64 rows or more
    assert plain.count.flops <= found.count.flops <= padding * plain.count.flops


def refused(rank: int, world_size: int) -> str:
    try:
        trace_rank(job_for(DENSE, "fp32", 2), RANKS, 0)
    except JobError as error:
        return error.what
    return ""


def test_process_in_a_process_group_is_refused() -> None:
    assert "process group already" in run_ranks(1, refused)[0]


@pytest.mark.must("command: dryrun")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write_job(tmp_path), tmp_path / "figures.json"
    arguments = [
        "--world-size",
        "4",
        "--rank",
        "1",
        "--set",
        "plan.parallel.zero=1",
        "--device",
        "cpu",
        "--json",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["weft", "dryrun", str(path), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    text = capsys.readouterr().out
    for words in ("rank 1", "dp_shard 4", "zero 1", "dp_shard reduce_scatter float32", "total GiB at the peak"):
        assert words in text
    (figures,) = json.loads(out.read_text())
    assert figures["peak"] == sum(figures["peak_bytes"].values())
    assert sum(entry["bytes"] for entry in figures["traffic"]) == sum(m["bytes"] for m in figures["messages"])


def test_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["weft", "dryrun", str(write_job(tmp_path)), "--world-size", "3", "--set", "plan.parallel.tp=2"]
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "3 ranks cannot be divided" in capsys.readouterr().err
