"""Step time from dry runs: operators timed on the local device, communication by the cluster's link model.

Computation, communication and optimizer update are added without overlap, as on CPU ranks whose own cores move the data.
Pipeline stages are simulated event by event in the order of their schedule. If the ranks of a host share its cores, the step
takes at least the work of all ranks divided by the number of cores.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import prod
from typing import NamedTuple

from weft.comm.recorder import Message
from weft.device.detect import detect
from weft.job import Job
from weft.parallel.pipeline.schedules import build_schedule
from weft.parallel.pipeline.simulate import ActionCosts, simulate
from weft.plan import ResolvedPlan
from weft.planner.costmodel import network
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.operators import Operation, time_operations
from weft.planner.costmodel.step_time import StepTime
from weft.planner.dryrun.trace import Trace
from weft.topology.mesh import AXES, EXPERT_AXES, expert_mesh_shape, mesh_shape


class Work(NamedTuple):
    """Seconds of one rank in one step."""

    forward: float
    backward: float
    update: float
    messages: dict[str, float]
    """Communication time by term of the step: "tp", "cp", "ep" or "gradients"."""
    sent: float
    """Time of one point-to-point message to the next stage."""

    @property
    def on_core(self) -> float:
        """Computation time of the rank: forward, backward and update."""
        return self.forward + self.backward + self.update


def work_of(trace: Trace, seconds: Mapping[Operation, float | None], cluster: ClusterSpec) -> Work:
    """Sum up the seconds of one rank.

    Args:
        trace: dry run of the rank.
        seconds: time per operation, keyed without its phase; an operation with None counts zero.
        cluster: cluster whose links carry the communication.
    """
    phases = dict.fromkeys(("forward", "backward", "update"), 0.0)
    calls = phases.copy()
    for operation, times in trace.count.operations.items():
        phases[operation.phase] += times * (seconds[operation._replace(phase="")] or 0.0)
        calls[operation.phase] += times * cluster.device.call
    # A CPU core dispatches, then computes. An accelerator computes while the host dispatches.
    for phase, host in calls.items():
        phases[phase] = phases[phase] + host if cluster.device.cores else max(phases[phase], host)
    messages: dict[str, float] = defaultdict(float)
    between: list[float] = []
    for message in trace.count.messages:
        seconds_taken = message_seconds(message, trace.plan, trace.world_size, cluster)
        if message.axis == "pp" and message.operation in ("send", "recv"):
            between.append(seconds_taken)
        else:
            messages[term_of(message.axis)] += seconds_taken
    sent = sum(between) / len(between) if between else 0.0
    return Work(phases["forward"], phases["backward"], phases["update"], dict(messages), sent)


def term_of(axis: str) -> str:
    """Term of a step that counts the communication over an axis."""
    terms = {"tp": "tp", "etp": "tp", "ep": "ep"}
    return "cp" if axis.startswith("cp") else terms.get(axis, "gradients")


def message_seconds(message: Message, plan: ResolvedPlan, world_size: int, cluster: ClusterSpec) -> float:
    """Seconds of one collective or point-to-point message without overlap; `message.bytes` counts a ring algorithm."""
    size, stride = _group(message.axis, plan, world_size)
    ranks = network.group(cluster, size, stride)
    if message.operation in ("send", "recv"):
        return network.point_to_point(ranks, message.bytes)
    full_bytes = message.bytes * size / max(1, size - 1)
    return (
        network.all_to_all(ranks, full_bytes)
        if message.operation == "all_to_all"
        else network.all_gather(ranks, full_bytes)
    )


@cache
def _group(axis: str, plan: ResolvedPlan, world_size: int) -> tuple[int, int]:
    """Size and stride of the process group of an axis, or of several flattened axes."""
    for names, shape in ((AXES, mesh_shape(plan)), (EXPERT_AXES, expert_mesh_shape(plan))):
        for count in range(1, len(names) + 1):
            for indices in combinations(range(len(names)), count):
                if "_".join(names[index] for index in indices) == axis:
                    return prod(shape[index] for index in indices), prod(shape[indices[-1] + 1 :])
    return world_size, 1


def measured_step(
    traces: Sequence[Trace], seconds: Mapping[Operation, float | None], cluster: ClusterSpec, micro_batches: int
) -> StepTime:
    """Step time from timed operators.

    Args:
        traces: dry runs of one rank per pipeline stage, in stage order.
        seconds: time per operation, keyed without its phase.
        cluster: links between ranks, and the cores that ranks share.
        micro_batches: micro-batches per step and data rank.
    """
    works = [work_of(trace, seconds, cluster) for trace in traces]
    plan, world = traces[0].plan, traces[0].world_size
    inside = [sum(value for term, value in work.messages.items() if term != "gradients") for work in works]
    busiest = max(range(len(works)), key=lambda rank: works[rank].on_core + inside[rank])
    most = works[busiest]
    pipeline = 0.0
    if len(works) > 1:
        schedule = build_schedule(plan.pipeline.schedule, len(works), micro_batches, plan.pipeline.stages_per_rank)
        owners, per_rank = schedule.rank_of_stage, schedule.num_stages // len(works)
        share = 1 / (micro_batches * per_rank)
        forward = [(works[rank].forward + inside[rank] / 3) * share for rank in owners]
        backward = [(works[rank].backward + inside[rank] * 2 / 3) * share / 2 for rank in owners]
        makespan = simulate(schedule, ActionCosts(forward, backward, backward, most.sent)).makespan
        pipeline = max(0.0, makespan - most.forward - most.backward - inside[busiest])
    compute = most.forward + most.backward
    known = {term: most.messages.get(term, 0.0) for term in ("tp", "cp", "ep", "gradients")}
    time = StepTime(compute, zero=0.0, pipeline=pipeline, optimizer=most.update, **known)
    if cluster.device.cores:
        together = world / len(works) * sum(work.on_core for work in works) / cluster.device.cores
        alone = time.seconds - sum(known.values())
        time = replace(time, compute=compute + max(0.0, together - alone))
    return time


def time_step(
    job: Job,
    traces: list[Trace],
    cluster: ClusterSpec,
    formula: StepTime | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> StepTime:
    """Step time of a plan, with its operators timed now on the local device.

    Args:
        job: job of the dry runs.
        traces: dry runs of one rank per pipeline stage.
        cluster: cluster of the same devices as this machine's.
        formula: the same step by formula; on accelerators, which overlap communication with computation, its exposed
            communication times are used.
        log: callable that prints a line about the operators that cannot be timed in isolation and count zero.
    """
    device = cluster.device
    calls = {operation for found in traces for operation in found.count.operations}
    processes = min(cluster.per_host, device.cores) if device.cores else 1
    seconds = time_operations(calls, processes, detect().type)
    if untimed := sorted({operation.name for operation, found in seconds.items() if found is None}):
        log(f"not timed, counted as 0 s: {', '.join(untimed)}")
    micro_batches = job.train.global_batch_size // (job.train.micro_batch_size * traces[0].plan.parallel.data_ranks)
    time = measured_step(traces, seconds, cluster, micro_batches)
    if formula is None or device.cores:
        return time
    return replace(formula, compute=time.compute, optimizer=time.optimizer)
