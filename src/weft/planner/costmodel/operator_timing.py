"""The step of a plan from its dry runs, whose operators were timed on the device at hand and whose messages take what the
cluster's links say.

The step is computation, messages and update one after the other, as on ranks whose own cores move the messages; stages of a
pipeline are put in the order of their schedule, event by event. Ranks that share the cores of a host take all of their work
divided by the cores, at least.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import prod
from typing import NamedTuple

from weft.comm.collectives import Message
from weft.device.device import detect
from weft.job import Job
from weft.parallel.pipeline.schedules import build_schedule
from weft.parallel.pipeline.simulate import ActionCosts, simulate
from weft.plan import Plan
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
    """By term of a step: "tp", "cp", "ep" or "gradients"."""
    sent: float
    """Of one message to the next stage."""

    @property
    def on_core(self) -> float:
        """In which it computes."""
        return self.forward + self.backward + self.update


def work_of(trace: Trace, seconds: Mapping[Operation, float | None], cluster: ClusterSpec) -> Work:
    """Add up what a rank does.

    Args:
        trace: its dry run.
        seconds: of each operation, without its phase; those without any count nothing.
        cluster: whose links carry the messages.
    """
    phases = dict.fromkeys(("forward", "backward", "update"), 0.0)
    calls = phases.copy()
    for operation, times in trace.count.operations.items():
        phases[operation.phase] += times * (seconds[operation._replace(phase="")] or 0.0)
        calls[operation.phase] += times * cluster.device.call
    for phase, host in calls.items():  # a core calls and computes; an accelerator computes while the host calls
        phases[phase] = phases[phase] + host if cluster.device.cores else max(phases[phase], host)
    messages: dict[str, float] = defaultdict(float)
    between: list[float] = []
    for message in trace.count.messages:
        taken = message_seconds(message, trace.plan, trace.world_size, cluster)
        if message.axis == "pp" and message.operation in ("send", "recv"):
            between.append(taken)
        else:
            messages[term_of(message.axis)] += taken
    sent = sum(between) / len(between) if between else 0.0
    return Work(phases["forward"], phases["backward"], phases["update"], dict(messages), sent)


def term_of(axis: str) -> str:
    """The part of a step to which messages of an axis belong."""
    return "cp" if axis.startswith("cp") else axis if axis in ("tp", "ep") else "gradients"


def message_seconds(message: Message, plan: Plan, world_size: int, cluster: ClusterSpec) -> float:
    """What one message takes that nothing hides; its bytes are those of a ring."""
    size, stride = _group(message.axis, plan, world_size)
    ranks = network.group(cluster, size, stride)
    if message.operation in ("send", "recv"):
        return network.point_to_point(ranks, message.bytes)
    whole = message.bytes * size / max(1, size - 1)
    return network.all_to_all(ranks, whole) if message.operation == "all_to_all" else network.all_gather(ranks, whole)


@cache
def _group(axis: str, plan: Plan, world_size: int) -> tuple[int, int]:
    """Ranks of an axis, or of several that were joined, and how far apart they are."""
    for names, shape in ((AXES, mesh_shape(plan)), (EXPERT_AXES, expert_mesh_shape(plan))):
        for count in range(1, len(names) + 1):
            for places in combinations(range(len(names)), count):
                if "_".join(names[place] for place in places) == axis:
                    return prod(shape[place] for place in places), prod(shape[places[-1] + 1 :])
    return world_size, 1


def measured_step(
    traces: Sequence[Trace], seconds: Mapping[Operation, float | None], cluster: ClusterSpec, micro_batches: int
) -> StepTime:
    """Seconds of a step.

    Args:
        traces: dry runs of one rank of each stage, in their order.
        seconds: of each operation, without its phase.
        cluster: with its links, and the cores that ranks share.
        micro_batches: of a step, on each data rank.
    """
    works = [work_of(trace, seconds, cluster) for trace in traces]
    plan, world = traces[0].plan, traces[0].world_size
    inside = [sum(value for term, value in work.messages.items() if term != "gradients") for work in works]
    busiest = max(range(len(works)), key=lambda rank: works[rank].on_core + inside[rank])
    most = works[busiest]
    pipeline = 0.0
    if len(works) > 1:
        schedule = build_schedule(plan.pipeline.schedule, len(works), micro_batches, plan.pipeline.stages_a_rank)
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
    say: Callable[[str], None] = lambda _: None,
) -> StepTime:
    """The step of a plan by its operators, timed now on the device at hand.

    Args:
        job: of the dry runs.
        traces: of one rank of each stage of a pipeline.
        cluster: of devices as this machine has.
        formula: the same step by formula. Accelerators send beside computation: what stays of that is taken from it.
        say: is told of operators that cannot be called for themselves, and count nothing.
    """
    device = cluster.device
    calls = {operation for found in traces for operation in found.count.operations}
    processes = min(cluster.per_host, device.cores) if device.cores else 1
    seconds = time_operations(calls, processes, detect().type)
    if untimed := sorted({operation.name for operation, found in seconds.items() if found is None}):
        say(f"not timed, and counted as nothing: {', '.join(untimed)}")
    micro_batches = job.train.global_batch_size // (job.train.micro_batch_size * traces[0].plan.parallel.data_ranks)
    time = measured_step(traces, seconds, cluster, micro_batches)
    if formula is None or device.cores:
        return time
    return replace(formula, compute=time.compute, optimizer=time.optimizer)
