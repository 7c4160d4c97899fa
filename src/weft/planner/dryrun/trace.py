"""Dry run: one rank's part of a training step at any world size, with the real training code but without the other ranks.

The model is built, parallelized and trained for one warm-up step and one counted step, on fake tensors
(`weft.planner.dryrun.modes`) and torch's fake process groups, which send nothing. Three things depend on the data and are
assumed: routing is even, all ranks have the same number of tokens, and losses and gradients are finite.
"""

import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.adapters.model import build_model
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_any_anatomy
from weft.compute.cross_entropy import chunk_bounds
from weft.data import AnyBatch
from weft.device.cpu import Cpu
from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import JobError, PlanError
from weft.job import Job, resolve_job
from weft.memory.live_bytes import LiveBytes
from weft.memory.pool import Pool
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.plan_schedule import plan_timeline
from weft.parallel.runtime import allocate, runtime
from weft.parallel.sequence.varlen import check_attention
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan
from weft.planner.dryrun.assumed import assumed_batches, assumed_row
from weft.planner.dryrun.modes import (
    RealControlTensors,
    fake_world,
    fuse_attention,
    fuse_operators,
    route_evenly,
    without_device,
)
from weft.planner.dryrun.step_counts import FEW, Counters, StepCounts, count_calls, count_step, extrapolate
from weft.precision.dtypes import DTYPES, check_dtypes, check_row_format
from weft.topology.mesh import build_mesh
from weft.training.forward_backward import forward
from weft.training.functions import use_loss
from weft.training.job_checks import check_model
from weft.training.optimizer import build_optimizer
from weft.training.step import RankValues, train_step
from weft.training.step_report import rank_values

Found = TypeVar("Found")
LOAD = Path("/proc/loadavg")


@dataclass(frozen=True)
class Trace:
    """Result of the dry run of one rank."""

    rank: int
    world_size: int
    plan: ResolvedPlan
    """Resolved plan."""
    parameters: int
    """Parameter elements that this rank stores between steps."""
    count: StepCounts
    offloaded: dict[str, int]
    """Peak bytes offloaded to the host or to disk, by kind."""
    offload_traffic: int
    """Offload traffic per step in bytes, both directions."""
    seconds: float
    """Duration of the dry run."""


def trace(job: Job, world_size: int, ranks: Sequence[int], device_type: str = "cpu") -> list[Trace]:
    """Dry-run some ranks of a job, after all checks of job and plan. Arguments as for `trace_rank`.

    Raises:
        JobError: a rank does not exist, the rows of the job do not fit the model.
        PlanError: the plan does not fit the model, the number of ranks, or the devices of this machine.
        ModelError: the model cannot be built or read.
    """
    resolved = resolve_job(job, world_size, native_bf16=native_bf16(device_type))
    plan = resolved.plan
    if (device := local_device(device_type)) is not None:
        check_dtypes(plan.precision, device)
        check_row_format(plan.comm, device)
        check_attention(plan, device)
    check_model(resolved)
    if wrong := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise JobError(
            f"there is no rank {wrong[0]}",
            where="--rank",
            rule=f"with {world_size} ranks, a rank is 0 to {world_size - 1}",
            fix="choose a rank in this range",
        )
    return trace_all([(job, world_size, rank, device_type) for rank in ranks])


def native_bf16(device_type: str) -> bool:
    """True if devices of a type compute bf16 natively; detected for this machine's devices, assumed True for other types."""
    device = local_device(device_type)
    return device is None or device.supports("bf16")


def local_device(device_type: str) -> Device | None:
    """Device of a type on this machine; None if it has none."""
    device = Cpu() if device_type == "cpu" else detect()
    return device if device.type == device_type else None


def trace_stages(job: Job, world_size: int, device_type: str = "cpu") -> list[Trace]:
    """Dry-run one rank per pipeline stage, in stage order; all ranks of a stage do the same work. Otherwise like `trace`."""
    stages = job.plan.parallel.pp
    return trace(job, world_size, [stage * world_size // stages for stage in range(stages)], device_type)


def trace_all(runs: Sequence[tuple[Job, int, int, str]], in_brief: bool = False) -> list[Trace]:
    """Run dry runs in separate processes. Arguments as for `trace_rank`."""
    return run_dry([partial(trace_rank, *run, in_brief=in_brief) for run in runs])


def run_dry(calls: Sequence[Callable[[], Found]]) -> list[Found]:
    """Make each call in a separate process, concurrently on cores that are free.

    Args:
        calls: picklable functions that enter `dry_rank`; long ones first.
    """
    # A fork starts faster, but cannot use an accelerator that this process has initialized.
    forks = sys.platform == "linux" and not torch.accelerator.is_available()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    # Torch caches meshes under keys that are the same for all ranks, so each rank needs a new process.
    with context.Pool(min(len(calls), free_cores()), maxtasksperchild=1) as pool:
        return pool.map(_in_process, calls, chunksize=1)


def free_cores() -> int:
    """Cores of this process that others leave free, at least one; all where the system does not tell."""
    try:
        load, _, _, running, _ = LOAD.read_text(encoding="utf-8").split()
    except OSError:
        return os.cpu_count() or 1
    # The load is a mean over a minute, in which this process may have used all cores itself.
    others = min(float(load), int(running.partition("/")[0]) - 1)
    return max(1, len(os.sched_getaffinity(0)) - round(others))


def _in_process(call: Callable[[], Found]) -> Found:
    gc.freeze()  # the collector need not scan the objects that were inherited by the fork
    warnings.filterwarnings("ignore", module="torch")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return call()


@dataclass(frozen=True)
class DryRank:
    """Rank of a dry run, ready to train."""

    plan: ResolvedPlan
    """Resolved plan."""
    model: Any
    """Parallelized model of fake tensors."""
    anatomy: Anatomy
    """Anatomy of the full model."""
    optimizer: DistributedOptimizer
    batches: Sequence[AnyBatch]
    """All micro-batches of a step."""
    pools: dict[str, Pool]
    """Memory of offloaded data, by kind."""
    counters: Counters
    """Counters that must be used: sections of a step that are left out are counted there."""


@contextmanager
def dry_rank(job: Job, world_size: int, rank: int, device_type: str) -> Iterator[DryRank]:
    """Build a rank in this process, which must not be in a process group. Only one dry run per process is possible.

    Only the model's configuration is read, and the memory needed does not grow with the model.

    Args:
        job: job to run; its plan is resolved for `world_size`, and its data are replaced by `assumed_batches`.
        world_size: number of ranks of the job.
        rank: rank to run.
        device_type: device type of the ranks. For an accelerator, fake CPU tensors with the attention operators
            of CUDA are used.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks.
        ModelError: the model cannot be built or read.
        JobError: this process is in a process group already.
    """
    resolved = resolve_job(job, world_size, native_bf16=native_bf16(device_type))
    plan = resolved.plan
    absent = device_type != "cpu"  # the same result on every machine: streams and allocators of a device are not traced
    device = torch.device("cpu")
    with fake_world(rank, world_size, device.type):
        mesh = build_mesh(plan, device.type, world_size)
        model = build_model(job, DTYPES[plan.precision.update])
        anatomy = read_any_anatomy(model, needs_roles=job.task.kind == "causal")
        row = assumed_row(job, model)
        route_evenly(model, anatomy)
        if absent:
            fuse_attention(model, anatomy)
        fused = absent and device_type == "cuda"
        traced = without_device(plan)
        parallelize(model, fuse_operators(model, anatomy, traced) if fused else traced, mesh)
        if fused and (attention_plans := runtime(model).attention_plans):
            attention_plans.device_type = device_type
        use_loss(model, resolved)
        pools = _fake_pools(plan, device_type)
        if (on_disk := runtime(model).on_disk) is not None:
            on_disk.pool = pools["parameters"]
        with FakeTensorMode(allow_non_fake_inputs=True), RealControlTensors():
            allocate(model, device)
            if (teacher := runtime(model).teacher) is not None:
                allocate(teacher.model, device)
            model.train()
            counters = Counters()
            if (linear_loss := runtime(model).linear_loss) is not None:
                linear_loss.chunks = lambda *sizes: counters.few(chunk_bounds(*sizes))
            if offload := runtime(model).offload:
                offload.pool = pools.get("activations", offload.pool)
            inner, batches = build_optimizer(model, job.optimizer), assumed_batches(resolved, device, row)
            optimizer = DistributedOptimizer(
                inner, model, detect(), pools.get("optimizer"), keep_zeros=job.optimizer.keep_zeros
            )
            yield DryRank(plan, model, anatomy, optimizer, batches, pools, counters)


def trace_rank(job: Job, world_size: int, rank: int, device_type: str = "cpu", in_brief: bool = False) -> Trace:
    """Dry-run a step of one rank in this process.

    Args:
        job, world_size, rank, device_type: as for `dry_rank`.
        in_brief: True to run only enough micro-batches to fill a pipeline, and extrapolate to the rest; operators are not
            recorded then.

    Raises:
        PlanError, ModelError, JobError: as `dry_rank`.
    """
    started = time.perf_counter()
    with dry_rank(job, world_size, rank, device_type) as dry:
        optimizer, batches, pools, counters = dry.optimizer, dry.batches, dry.pools, dry.counters
        scale = optimizer.loss_scale

        def values() -> RankValues:
            return rank_values(batches[0].targets.device, dry.anatomy, runtime(dry.model).router_stats.take_loads())

        def step(batches: Sequence[AnyBatch]) -> None:
            optimizer.loss_scale = scale  # fake gradients say nothing about an overflow
            train_step(dry.model, optimizer, batches, job.optimizer.clip_norm, values=values)

        schedule = dry.plan.parallel.pp > 1  # a pipeline schedule needs all its micro-batches
        few, some = _brief_micro_batches(dry.plan, batches) if in_brief and schedule else (batches, batches)
        # Warm-up: creates the optimizer states and fills the caches of DTensor, including those for gradient accumulation.
        first = count_calls(lambda: step(few if schedule else batches[:2]), counters)
        before = {name: pool.requested for name, pool in pools.items()}
        if schedule:
            count = count_step(dry.model, optimizer, batches, lambda _: step(some), dry.anatomy, counters)
        else:
            count = count_step(dry.model, optimizer, batches, step, dry.anatomy, counters, in_brief=True)
        if len(some) < len(batches):
            count = extrapolate(first, count, (len(batches) - len(some)) // (len(some) - len(few)))
            count = replace(count, operations=Counter())  # the warm-up, which also creates states, does not count them
        share = max(1.0, len(batches) / (len(some) if schedule else FEW))
        sent = {name: (pool.requested - before[name]) * share for name, pool in pools.items()}
        for name in {"optimizer", "parameters"} & pools.keys():  # their blocks persist between steps
            sent[name] = pools[name].live
        parameters = sum(to_local(parameter.detach()).numel() for parameter in dry.model.parameters())
    offloaded = {name: pool.peak for name, pool in pools.items() if pool.is_off_device}
    traffic = 2 * int(sum(sent[name] for name in offloaded))
    return Trace(rank, world_size, dry.plan, parameters, count, offloaded, traffic, time.perf_counter() - started)


def trace_blocks(job: Job, world_size: int, rank: int, device_type: str = "cpu") -> list[int]:
    """Dry-run the forward of the first micro-batch; activation bytes that are alive when each block begins.

    Arguments and errors as for `dry_rank`.
    """
    found: list[int] = []
    with dry_rank(job, world_size, rank, device_type) as dry, LiveBytes() as live:
        dry.optimizer.track(live)
        for block in dry.anatomy.blocks:
            dry.model.get_submodule(block.name).register_forward_pre_hook(
                lambda *_: found.append(live.current["activations"]), prepend=True
            )
        forward(dry.model, dry.batches[0], loss_only=True)
    return found


def _brief_micro_batches(
    plan: ResolvedPlan, batches: Sequence[AnyBatch]
) -> tuple[Sequence[AnyBatch], Sequence[AnyBatch]]:
    """Two micro-batch counts from which the full step can be extrapolated: one round of the pipeline, and one or a round more.

    The larger one must already reach the maximum number of micro-batches in flight. All micro-batches (twice) if the schedule
    has no such counts or does not support so few.
    """
    around, total = plan.parallel.pp, len(batches)
    most = plan_timeline(plan, total).peak_in_flight
    for more in (1, around):
        few = around + total % more
        if few + more >= total:
            break
        try:
            _, some = (plan_timeline(plan, size).peak_in_flight for size in (few, few + more))
        except PlanError:
            continue
        if some == most:
            return batches[:few], batches[: few + more]
    return batches, batches


def _fake_pools(plan: ResolvedPlan, device_type: str) -> dict[str, Pool]:
    """Pools of fake host or disk memory by kind of the data that the plan offloads."""
    memory, on_cpu = plan.memory, device_type == "cpu"  # on CPU, host memory is device memory

    def fake_pool(tier: str) -> Pool:
        return Pool(lambda size: torch.empty(size, dtype=torch.uint8), is_off_device=tier == "disk" or not on_cpu)

    pools: dict[str, Pool] = {}
    if memory.offload:
        pools["activations"] = fake_pool(memory.offload_to)
    if memory.optimizer_device == "disk" or (memory.optimizer_device == "host" and not on_cpu):
        pools["optimizer"] = fake_pool(memory.optimizer_device)
    if memory.parameters_device == "disk":
        pools["parameters"] = fake_pool("disk")
    return pools
