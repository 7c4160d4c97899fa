"""The dry run: one rank's share of a training step of any number of ranks, by the real code, without the ranks.

The model is built, split, trained for a step to warm up and for one that is counted, on fake tensors
(`weft.planner.dryrun.modes`) and torch's fake process groups, which send nothing. Three things are taken as given, as nobody can
know them ahead: routers use all experts evenly, all ranks have as many tokens, and losses and gradients are finite.
"""

import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import allocate, build_on_meta
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.device import Cpu, detect
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.memory.optimizer_state import OffloadedStates, budget_of
from weft.memory.pool import Pool
from weft.memory.quantized_state import keep_states_small
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.plan_schedule import plan_timeline
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.planner.dryrun.modes import RealControlTensors, fake_world, fuse_attention, route_evenly
from weft.planner.dryrun.step_counts import Count, count_calls, count_step, extrapolate
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh
from weft.train.optimizer import build_optimizer
from weft.train.run import check_model
from weft.train.step import train_step

MICRO_BATCHES = 3  # the first, one of those in the middle, and the last


@dataclass(frozen=True)
class Trace:
    """The dry run of one rank."""

    rank: int
    world_size: int
    plan: Plan
    """Resolved."""
    parameters: int
    """Numbers in the weights that this rank keeps between steps."""
    count: Count
    elsewhere: dict[str, int]
    """Bytes that are on the host or on a disk, at most, by what they are."""
    moved: int
    """Bytes that go there and come back in one step."""
    seconds: float
    """What the dry run took."""


def trace(job: Job, world_size: int, ranks: Sequence[int], device_type: str = "cpu") -> list[Trace]:
    """Dry runs of some ranks of a job. What can be refused is refused before they start. Arguments as of `trace_rank`.

    Raises:
        JobError: there is no such rank, or the model cannot take the rows of the job.
        PlanError: the plan does not fit the model or the number of ranks.
        ModelError: the model cannot be built or read.
    """
    plan = job.plan.resolve(world_size).resolve_precision(native_bf16(device_type))
    check_model(job.model_copy(update={"plan": plan}))
    if wrong := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise JobError(
            f"there is no rank {wrong[0]}",
            where="--rank",
            rule=f"{world_size} ranks have the numbers 0 to {world_size - 1}",
            fix="name one of them",
        )
    return trace_all([(job, world_size, rank, device_type) for rank in ranks])


def native_bf16(device_type: str) -> bool:
    """Whether devices of a type compute bf16 natively: those of this machine as they say, others as the newest do."""
    device = Cpu() if device_type == "cpu" else detect()
    return device.type != device_type or device.supports("bf16")


def trace_stages(job: Job, world_size: int, device_type: str = "cpu") -> list[Trace]:
    """Dry runs of one rank of each stage of a pipeline, in their order; the others do the same. All else as of `trace`."""
    stages = job.plan.resolve(world_size).parallel.pp
    return trace(job, world_size, [stage * world_size // stages for stage in range(stages)], device_type)


def trace_all(runs: Sequence[tuple[Job, int, int, str]], in_brief: bool = False) -> list[Trace]:
    """Dry runs, each in a process of its own, as many at once as there are cores. Arguments as of `trace_rank`."""
    # A fork is ready at once, but cannot use an accelerator that this process has looked at.
    forks = sys.platform == "linux" and not torch.accelerator.is_available()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    # Torch caches meshes under keys that are the same for all ranks: a process must not be two of them.
    with context.Pool(min(len(runs), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        return pool.starmap(partial(_trace_alone, in_brief), runs, chunksize=1)


def _trace_alone(in_brief: bool, job: Job, world_size: int, rank: int, device_type: str) -> Trace:
    gc.freeze()  # what came with the fork is not looked at again
    warnings.filterwarnings("ignore", module="torch")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return trace_rank(job, world_size, rank, device_type, in_brief)


def trace_rank(job: Job, world_size: int, rank: int, device_type: str = "cpu", in_brief: bool = False) -> Trace:
    """The dry run of one rank in this process, which must not be in a process group; once in the life of a process.

    Nothing is read but the model's configuration, and memory does not grow with the model.

    Args:
        job: its plan is resolved against `world_size`; its rows are `assumed_batches`.
        world_size: ranks of the job.
        rank: one of them.
        device_type: what the ranks run on. Where torch has none of it: fake tensors of the CPU, with the attention of CUDA.
        in_brief: run as many micro-batches of a pipeline as fill it, and carry on what these do; operators are not noted then.

    Raises:
        PlanError: the plan does not fit the model or the number of ranks.
        ModelError: the model cannot be built or read.
        JobError: there is a process group already.
    """
    started = time.perf_counter()
    plan = job.plan.resolve(world_size).resolve_precision(native_bf16(device_type))
    job = job.model_copy(update={"plan": plan})
    absent = device_type not in ("cpu", detect().type)
    place = torch.device("cpu" if absent else device_type)
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank, world_size))
        mesh = build_mesh(plan, place.type, world_size)
        model = build_on_meta(read_config(job.model), DTYPES[plan.precision.update])
        anatomy = read_anatomy(model)
        route_evenly(model, anatomy)
        if absent:
            fuse_attention(model, anatomy)
        parallelize(model, plan, mesh)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(RealControlTensors())
        allocate(model, place)
        model.train()
        optimizer, batches = build_optimizer(model, job.optimizer), assumed_batches(job, place)
        pools = _imagine_elsewhere(model, optimizer, plan, mesh, device_type)
        scale = LossScale.from_plan(plan.precision.loss_scale)

        def step(batches: Sequence[MicroBatch]) -> None:
            train_step(model, optimizer, batches, plan, mesh, scale, job.optimizer.clip_norm)

        schedule = plan.parallel.pp > 1  # needs all its micro-batches
        few, some = _rounds(plan, batches) if in_brief and schedule else (batches, batches)
        # Makes the optimizer's state, and fills the caches of DTensor, also for adding up gradients.
        first = count_calls(lambda: step(few if schedule else batches[:2]))
        before = {name: pool.requested for name, pool in pools.items()}
        if schedule:
            count = count_step(model, optimizer, batches, lambda _: step(some), anatomy)
        else:
            count = count_step(model, optimizer, batches, step, anatomy, MICRO_BATCHES)
        if len(some) < len(batches):
            count = extrapolate(first, count, (len(batches) - len(some)) // (len(some) - len(few)))
        share = max(1.0, len(batches) / (len(some) if schedule else MICRO_BATCHES))
        sent = {name: (pool.requested - before[name]) * share for name, pool in pools.items()}
        if "optimizer" in pools:  # its homes stay
            sent["optimizer"] = pools["optimizer"].live
        parameters = sum(to_local(parameter.detach()).numel() for parameter in model.parameters())
    elsewhere = {name: pool.peak for name, pool in pools.items() if pool.is_off_device}
    moved = 2 * int(sum(sent[name] for name in elsewhere))
    return Trace(rank, world_size, plan, parameters, count, elsewhere, moved, time.perf_counter() - started)


def _rounds(plan: Plan, batches: list[MicroBatch]) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """As many micro-batches as go once around a pipeline, and one or a round more, as with more a rank holds no more. All of
    them where the schedule is not like that, or does not take so few."""
    around, whole = plan.parallel.pp, len(batches)
    most = plan_timeline(plan, whole).peak_in_flight
    for more in (1, around):
        few = around + whole % more
        if few + more >= whole:
            break
        try:
            _, some = (plan_timeline(plan, size).peak_in_flight for size in (few, few + more))
        except PlanError:
            continue
        if some == most:
            return batches[:few], batches[: few + more]
    return batches, batches


def _imagine_elsewhere(
    model: Any, optimizer: torch.optim.Optimizer, plan: Plan, mesh: DeviceMesh, device_type: str
) -> dict[str, Pool]:
    """Let what leaves the device go to memory that is fake, as everything here; by what leaves it."""
    memory, on_cpu = plan.memory, device_type == "cpu"  # whose own memory the host's is

    def imagined(tier: str) -> Pool:
        return Pool(lambda size: torch.empty(size, dtype=torch.uint8), is_off_device=tier == "disk" or not on_cpu)

    pools: dict[str, Pool] = {}
    if plan.precision.optimizer_state_dtype != "update":
        keep_states_small(optimizer, plan.precision.optimizer_state_dtype)
    if memory.offload:
        model.offload.pool = pools["activations"] = imagined(memory.offload_to)
    if memory.optimizer_device == "disk" or (memory.optimizer_device == "host" and not on_cpu):
        pools["optimizer"] = imagined(memory.optimizer_device)
        budget = budget_of(optimizer, memory, mesh.get_local_rank("pp"))
        OffloadedStates(optimizer, detect(), pools["optimizer"], budget)
    return pools


def assumed_batches(job: Job, place: torch.device) -> list[MicroBatch]:
    """The micro-batches of a rank: as many rows as in the job; where rows are packed, each of two documents of one length.

    Args:
        job: with a resolved plan.
        place: device of the rank.
    """
    train, data = job.train, job.data
    share = -(-train.global_batch_size // job.plan.parallel.data_ranks)
    packed = data.packing and data.source != "tokens"
    positions = torch.arange(data.seq_len, device=place) % (data.seq_len // 2 if packed else data.seq_len)
    sizes = [min(train.micro_batch_size, share - begin) for begin in range(0, share, train.micro_batch_size)]
    zeros = [torch.zeros(size, data.seq_len, dtype=torch.int64, device=place) for size in sizes]
    return [MicroBatch(rows, positions.repeat(len(rows), 1), rows.clone()) for rows in zeros]
