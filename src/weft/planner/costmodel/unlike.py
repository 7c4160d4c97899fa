"""Step time of a layout on unlike hosts: rows of data ranks and blocks of stages in proportion to speed.

A cell is the part of the ranks with one pipeline stage and one data rank: its tp x cp ranks. Its time for a micro-batch is

    blocks of the stage x rows of the data rank x seconds of a block and row on its hosts,

plus head and loss in the last stage. Rows and blocks are whole numbers such that the slowest cell is as fast as possible.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.data.row_split import proportional
from weft.errors import PlanError
from weft.parallel.pipeline.schedules import build_schedule
from weft.parallel.pipeline.simulate import ActionCosts, simulate
from weft.planner.costmodel import network
from weft.planner.costmodel.cluster_file import HostGroup
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.step_time import ForwardBackward, head_time
from weft.planner.search.space import Space

ROUNDS = 2  # of blocks for given rows, and rows for these blocks
LAYER_TERMS = ("compute", "tp", "cp", "ep")


@dataclass(frozen=True)
class Placement:
    """Layout on unlike hosts."""

    layout: TrainingLayout
    """Layout; its micro-batch is that of the data rank with the most rows."""
    order: tuple[HostGroup, ...]
    """Host groups in the order of node ranks."""
    rows: tuple[int, ...]
    """Rows of a global batch for each data rank."""
    blocks: tuple[int, ...]
    """Blocks of each pipeline stage."""
    num_micro_batches: int
    terms: dict[str, float]
    """Step time by term, in seconds."""
    memory: dict[tuple[int, int], float]
    """Predicted peak bytes of a rank, by stage and data rank."""

    @property
    def seconds(self) -> float:
        """Predicted step time."""
        return sum(self.terms.values())


def cells_of(layout: TrainingLayout, order: Sequence[HostGroup]) -> list[list[set[str]]] | None:
    """Names of the host groups of each cell, [stage][data rank]; None if experts would be divided over unlike hosts.

    Ranks of ep get about equal numbers of tokens, whatever their rows, so that the slow ones would be waited for.
    """
    names = [group.name for group in order for _ in range(group.cluster.num_devices)]
    inner, together = layout.tp * layout.cp, layout.ep * layout.etp
    if layout.ep > 1 and any(len(set(names[at : at + together])) > 1 for at in range(0, len(names), together)):
        return None
    cells = [set(names[at : at + inner]) for at in range(0, len(names), inner)]
    return [cells[stage * layout.dp : (stage + 1) * layout.dp] for stage in range(layout.pp)]


def place(
    layout: TrainingLayout, order: Sequence[HostGroup], spaces: Mapping[str, Space], equal: bool = False
) -> Placement | None:
    """Rows, blocks and step time of a layout on unlike hosts; None if it cannot be run there.

    Args:
        layout: layout with one stage per rank.
        order: host groups in the order of node ranks.
        spaces: search space of the job by host group, with the number of hosts of the whole cluster.
        equal: True for equal rows and blocks, for comparison.
    """
    cells = cells_of(layout, order)
    if cells is None:
        return None
    scalars = {group.name: group.scalar for group in order}

    def slowest(
        stage: int, part: int, rows: float, of: Callable[[Space, TrainingLayout], ForwardBackward]
    ) -> ForwardBackward:
        """Time for a micro-batch of `rows` rows on the slowest hosts of a cell."""
        whole = replace(layout, micro_batch=max(1, math.ceil(rows)))
        times = (of(spaces[name], whole).times(scalars[name]) for name in cells[stage][part])
        return max(times, key=lambda time: time.sum).times(rows / whole.micro_batch)

    def of_block(stage: int, part: int, rows: float) -> ForwardBackward:
        return slowest(stage, part, rows, lambda space, whole: space.layer(whole).total)

    def of_head(stage: int, part: int, rows: float) -> ForwardBackward:
        is_last = stage == layout.pp - 1
        return slowest(stage, part, rows, _head) if is_last else ForwardBackward(0.0, 0.0)

    space, typical = spaces[order[0].name], float(layout.micro_batch)
    num_blocks, stages, parts = space.shape.layers, range(layout.pp), range(layout.dp)
    rows, blocks = proportional(layout.global_batch, [1.0] * layout.dp), proportional(num_blocks, [1.0] * layout.pp)
    block_seconds, head_seconds = (
        np.array([[of(stage, part, typical).sum for part in parts] for stage in stages]) for of in (of_block, of_head)
    )
    for _ in range(0 if equal else ROUNDS):
        each = (block_seconds * rows).max(1)
        blocks = divide_blocks(num_blocks, each.tolist(), float((head_seconds[-1] * rows).max()))
        slowest_stage = (np.array(blocks)[:, None] * block_seconds + head_seconds).max(0)
        rows = proportional(layout.global_batch, (1 / slowest_stage).tolist())
    count = min(-(-max(rows) // layout.micro_batch), min(rows))
    times = [
        [
            of_block(stage, part, rows[part] / count)
            .times(blocks[stage])
            .plus(of_head(stage, part, rows[part] / count))
            for part in parts
        ]
        for stage in stages
    ]
    placed = replace(layout, micro_batch=math.ceil(max(rows) / count))
    busiest, stage, part = max((times[stage][part].sum, stage, part) for stage in stages for part in parts)
    terms = _layer_terms(count * busiest, spaces[min(cells[stage][part])], placed)
    if layout.pp > 1:
        try:
            spans = [_makespan(placed, count, [line[part] for line in times], space, rows[part]) for part in parts]
        except PlanError:  # the schedule needs more micro-batches
            return None
        terms["pipeline"] = max(0.0, max(spans) - count * busiest)
    terms |= _terms_of_all_ranks(layout, order, spaces, count)
    memory = {
        (stage, part): _peak(space, layout, math.ceil(rows[part] / count), blocks[stage] * layout.pp / num_blocks)
        for stage in stages
        for part in parts
    }
    return Placement(
        placed, tuple(order), rows, blocks, count, {name: value for name, value in terms.items() if value}, memory
    )


def _terms_of_all_ranks(
    layout: TrainingLayout, order: Sequence[HostGroup], spaces: Mapping[str, Space], count: int
) -> dict[str, float]:
    """Seconds of messages and updates, which the slowest hosts determine, of a step of `count` micro-batches."""
    times = [(spaces[group.name].time(layout), group.scalar) for group in order]
    return {
        "zero": max(time.zero * scalar for time, scalar in times) * count / layout.micro_batches,
        "gradients": max(time.gradients * scalar for time, scalar in times),
        "optimizer": max(time.optimizer * scalar for time, scalar in times),
    }


def _head(space: Space, layout: TrainingLayout) -> ForwardBackward:
    return head_time(space.shape, layout, space.cluster, space.stack)


def _peak(space: Space, layout: TrainingLayout, micro_batch: int, share: float) -> float:
    """Peak bytes of a rank whose stage has `share` x the mean number of blocks; not below those of the mean."""
    memory = space.memory(replace(layout, micro_batch=micro_batch))
    return memory.framework + (memory.total - memory.framework) * max(1.0, share)


def divide_blocks(num_blocks: int, seconds: Sequence[float], last: float) -> tuple[int, ...]:
    """Blocks of each stage, at least one, such that the slowest stage is as fast as possible.

    Args:
        num_blocks: number of blocks.
        seconds: seconds of one block in each stage.
        last: further seconds of the last stage.
    """
    counts = [1] * len(seconds)
    more = [0.0] * (len(seconds) - 1) + [last]
    for _ in range(num_blocks - len(seconds)):
        least = min(range(len(seconds)), key=lambda stage: ((counts[stage] + 1) * seconds[stage] + more[stage], stage))
        counts[least] += 1
    return tuple(counts)


def _layer_terms(seconds: float, space: Space, layout: TrainingLayout) -> dict[str, float]:
    """Divide the time of the slowest cell into computation and messages, in proportion to those of a layer."""
    layer = space.layer(layout)
    return {name: seconds * getattr(layer, name).sum / layer.total.sum for name in LAYER_TERMS}


def _makespan(
    layout: TrainingLayout, micro_batches: int, times: Sequence[ForwardBackward], space: Space, rows: int
) -> float:
    """Seconds of the pipeline of one data rank, by simulation of its schedule."""
    layer = space.layer(layout)
    weights = [time.backward * layer.weights / layer.total.backward for time in times]
    inputs = [time.backward - own for time, own in zip(times, weights, strict=True)]
    ends = network.group(space.cluster, layout.pp, layout.num_devices // layout.pp)
    tokens = rows / micro_batches * layout.seq / layout.cp
    sent = network.point_to_point(ends, 2.0 * tokens * space.shape.hidden / layout.tp) / space.stack.bandwidth_share
    schedule = build_schedule(layout.schedule, layout.pp, micro_batches, 1)
    return float(simulate(schedule, ActionCosts([time.forward for time in times], inputs, weights, sent)).makespan)
