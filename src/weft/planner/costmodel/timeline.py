"""Event-by-event simulation of one pipeline step: the runtime's schedule with action times from the cost model."""

import json
from pathlib import Path

from weft.parallel.pipeline.balance import split_blocks
from weft.parallel.pipeline.schedules import build_schedule
from weft.parallel.pipeline.simulate import ActionCosts, Timeline, simulate
from weft.plan import Pipeline
from weft.planner.costmodel import network
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.step_time import StepTime, head_time
from weft.planner.search.space import Space


def head_cost(space: Space, layout: TrainingLayout) -> float:
    """Time of head and loss in units of one block's time; used to balance stages, so that the last one has fewer blocks."""
    head = head_time(space.shape, layout, space.cluster, space.stack)
    return round(head.sum / space.layer(layout).total.sum, 2)


def timeline_of(space: Space, layout: TrainingLayout) -> Timeline:
    """Simulate one step of the pipeline, with the runtime's division into stages.

    Raises:
        PlanError: the schedule does not support this number of ranks, stages or micro-batches.
    """
    layer = space.layer(layout)
    total = layer.total
    head = head_time(space.shape, layout, space.cluster, space.stack)
    stages = layout.pp * layout.vpp
    cut = split_blocks(space.shape.layers, stages, Pipeline(head_cost=head_cost(space, layout)))
    blocks = [len(part) for part in cut]
    forward = [count * total.forward for count in blocks]
    weights = [count * layer.weights for count in blocks]
    inputs = [count * (total.backward - layer.weights) for count in blocks]
    forward[-1] += head.forward
    inputs[-1] += head.backward
    ends = network.group(space.cluster, layout.pp, layout.num_devices // layout.pp)
    sent = (
        network.point_to_point(ends, 2.0 * layout.tokens * space.shape.hidden / layout.tp) / space.stack.bandwidth_share
    )
    schedule = build_schedule(layout.schedule, layout.pp, layout.micro_batches, layout.vpp)
    waits = ([count * wait for count in blocks] for wait in layer.waits)
    return simulate(schedule, ActionCosts(forward, inputs, weights, sent, None, *waits))


def refined(space: Space, layout: TrainingLayout, time: StepTime) -> StepTime:
    """Replace the bubble of a step time, which is by formula, by that of the simulated schedule."""
    if layout.pp == 1:
        return time
    busy = time.compute + time.tp + time.cp + time.ep
    return StepTime(**{**vars(time), "pipeline": max(0.0, timeline_of(space, layout).makespan - busy)})


def write_trace(timeline: Timeline, time: StepTime, path: Path) -> None:
    """Write a step as a trace for Perfetto or Chrome: one thread per pipeline rank, with gradients and update at the end."""
    bars = [
        (rank, start, end, str(slot[0]), slot[0].kind)
        for rank, slots in enumerate(timeline.schedule.slots)
        for slot, start, end in zip(slots, timeline.start[rank], timeline.end[rank], strict=True)
    ]
    end, done = timeline.makespan, timeline.makespan + time.gradients
    for rank in range(timeline.schedule.num_ranks):
        bars += [(rank, end, done, "gradients", "gradients"), (rank, done, done + time.optimizer, "update", "update")]
    events = [
        {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for rank, start, end, name, kind in bars
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
