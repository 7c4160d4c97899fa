"""Text that says why a layout hides the messages of its experts, or replicates hot experts, and what both cost."""

from dataclasses import replace

from weft.observe.figures import format_bytes
from weft.planner.costmodel import network
from weft.planner.costmodel.experts import imbalance, replica_bytes, replica_times, rows_that_pay
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.timeline import refined
from weft.planner.search.space import Space


def expert_reasons(space: Space, layout: TrainingLayout, scalar: float = 1.0) -> list[str]:
    """Lines that compare a layout with and without joint lanes and replicas, in seconds and bytes; empty without ep.

    Args:
        layout: the chosen layout.
        scalar: measured / predicted step time of this machine.
    """
    if layout.ep == 1 or not space.shape.num_moe:
        return []
    return [_overlap(space, layout, scalar), *_balance(space, layout, scalar)]


def _difference(space: Space, layout: TrainingLayout, other: TrainingLayout, scalar: float) -> tuple[float, float]:
    """Seconds of a step and bytes of a device that `layout` needs more than `other`."""
    seconds = [refined(space, one, space.time(one)).seconds for one in (layout, other)]
    sizes = [space.memory(one).total for one in (layout, other)]
    return scalar * (seconds[0] - seconds[1]), sizes[0] - sizes[1]


def _overlap(space: Space, layout: TrainingLayout, scalar: float) -> str:
    """Line about joint forwards and backwards; in a pipeline, about the joint slots of the schedule."""
    layer, layers = space.layer(layout), layout.micro_batches * space.shape.layers / layout.pp
    what = f"messages of experts take {scalar * layers * layer.ep.sum:.3g} s a step"
    if layout.pp > 1:
        if not layout.joint_experts:
            return f"{what}: not hidden, schedule {layout.schedule} has no joint slots"
        return (
            f"{what}: a joint slot of {layout.schedule} hides {layer.hidden / layer.ep.sum:.0%} of those of its actions"
        )
    if layout.micro_batches < 2:
        return f"{what}: not hidden, a step has one micro-batch"
    joint, plain = (replace(layout, joint_experts=value) for value in (True, False))
    seconds, size = _difference(space, joint, plain, scalar)
    chosen = "joint" if layout.joint_experts else "not joint"
    return (
        f"{what}: {chosen}; forwards and backwards together take {seconds:+.3g} s, and {format_bytes(size)} more memory "
        "for two micro-batches in flight"
    )


def _balance(space: Space, layout: TrainingLayout, scalar: float) -> list[str]:
    """Lines about replicas of hot experts; none if the space has no replicas."""
    slots = max(options.slots for options in space.expert_options)
    if not slots:
        return []
    shape, balanced, alone = space.shape, replace(layout, expert_slots=slots), replace(layout, expert_slots=0)
    rows = f"{imbalance(alone, space.stack):g} -> {imbalance(balanced, space.stack):g} x the mean"
    seconds, size = _difference(space, balanced, alone, scalar)
    chosen = "replicas" if layout.expert_slots else "no replicas"
    forward, backward = replica_times(shape, balanced, space.cluster, space.stack)
    repeats = 1 + layout.recompute_share * (layout.recompute in ("mlp", "full"))
    cost = scalar * layout.micro_batches * shape.num_moe / layout.pp * (repeats * forward + backward)
    one = replica_bytes(shape)
    where = "between hosts" if network.group(space.cluster, layout.ep, layout.etp).hosts > 1 else "inside a host"
    mean = layout.tokens / layout.tp * shape.top_k / shape.experts
    return [
        f"rows of the busiest rank {rows}, assumed: {chosen}; in {slots} slots they take {seconds:+.3g} s, "
        f"of which {cost:.3g} s are their own messages, and {format_bytes(size)} more memory",
        f"a replica sends {format_bytes(repeats * one)} of weights and {format_bytes(one)} of gradients {where}; it saves "
        f"bytes from {rows_that_pay(shape):,.0f} rows of a rank for the expert, and the mean is {mean:,.0f}",
    ]
