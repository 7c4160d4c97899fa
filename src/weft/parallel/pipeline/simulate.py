"""Simulated timeline of a schedule: start and end of every slot, and idle time of each rank. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import Action, Schedule, Slot, peak_in_flight, run_through
from weft.parallel.pipeline.verify import verify

ByStage = float | Sequence[float]
"""One value for all stages, or one per stage."""


@dataclass(frozen=True)
class ActionCosts:
    """Seconds of each kind of action, per stage. Integers and fractions stay exact. A full backward takes I + W."""

    forward: ByStage = 1
    backward_input: ByStage = 1
    backward_weight: ByStage = 1
    communication: float = 0
    """Seconds from the end of an action until its result is on another rank; no rank is busy during this time."""
    joint: ByStage | None = None
    """Seconds of a joint slot, by the stage of its forward; None: the sum of its two actions, less what is hidden."""
    forward_wait: ByStage = 0
    """Part of `forward` in which the rank waits for rows of experts. In a joint slot it overlaps with the other action's
    computation (`weft.comm.lanes`)."""
    backward_wait: ByStage = 0
    """The same part of a full backward."""

    def of_slots(self, num_stages: int) -> "SlotSeconds":
        """Costs of all slots of a pipeline with this number of stages.

        Raises:
            PlanError: a sequence has another length than the number of stages.
        """
        forward, inputs, weights = (
            _by_stage(getattr(self, name), num_stages, name)
            for name in ("forward", "backward_input", "backward_weight")
        )
        full = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        joint = None if self.joint is None else _by_stage(self.joint, num_stages, "joint")
        waits = {
            "F": _by_stage(self.forward_wait, num_stages, "forward_wait"),
            "B": _by_stage(self.backward_wait, num_stages, "backward_wait"),
        }
        return SlotSeconds({"F": forward, "B": full, "I": inputs, "W": weights}, joint, waits)


def _by_stage(value: ByStage, num_stages: int, name: str) -> tuple[float, ...]:
    if not isinstance(value, Sequence):
        return (value,) * num_stages
    if len(value) != num_stages:
        raise PlanError(
            f"{len(value)} costs {name} for {num_stages} stages",
            rule="a cost is one value for all stages, or one per stage",
            fix=f"give {num_stages} values",
        )
    return tuple(value)


@dataclass(frozen=True)
class SlotSeconds:
    """Seconds of any slot of a pipeline."""

    of_kind: dict[str, tuple[float, ...]]
    joint: tuple[float, ...] | None
    waits: dict[str, tuple[float, ...]]

    def __call__(self, slot: Slot) -> float:
        if len(slot) > 1 and self.joint is not None:
            return self.joint[slot[0].stage]
        total = sum(self.of_kind[action.kind][action.stage] for action in slot)
        if len(slot) == 1:
            return total
        parts = [
            (self.of_kind[a.kind][a.stage], self.waits[a.kind][a.stage] if a.kind in self.waits else 0) for a in slot
        ]
        (first, first_wait), (second, second_wait) = parts
        return total - min(first_wait, second - second_wait) - min(second_wait, first - first_wait)


@dataclass(frozen=True)
class Timeline:
    """Start and end of all slots of one step, from time 0."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    """Start of each slot in seconds, by rank."""
    end: tuple[tuple[float, ...], ...]
    """End of each slot in seconds, by rank."""

    @cached_property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last slot."""
        return max((ends[-1] for ends in self.end if ends), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy seconds of each rank."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start, self.end, strict=True)
        )

    @property
    def ideal(self) -> float:
        """Busy seconds of the busiest rank: a lower bound of the makespan for any order of the same work."""
        return max(self.busy, default=0)

    @property
    def mean_busy(self) -> float:
        """Mean busy seconds of a rank: less than `ideal` if the stages are uneven."""
        return sum(self.busy) / max(1, len(self.busy))

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle seconds of each rank, within `makespan`."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_rate(self) -> tuple[float, ...]:
        """Idle share of `makespan`, by rank."""
        return tuple(bubble / self.makespan if self.makespan else 0 for bubble in self.bubble)

    @property
    def longest_span(self) -> float:
        """Longest time between the first start and the last end of a rank, in seconds.

        This is the cost of a step if steps follow each other without a barrier: a rank that starts later ends later. A
        schedule without bubbles is then a parallelogram (Qi et al., section 5.3, use it as the cost of a schedule).
        """
        return max((ends[-1] - starts[0] for starts, ends in zip(self.start, self.end, strict=True) if ends), default=0)

    @property
    def span_bubble_rate(self) -> float:
        """Share of `longest_span` above `ideal`: the bubble rate of Qi et al., table 5."""
        return (self.longest_span - self.ideal) / self.longest_span if self.longest_span else 0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Peak number of micro-batches of one stage between their F and their B or W, by rank.

        An upper bound of the memory: `peak_until_input` counts the micro-batches that also hold the part freed by I.
        """
        return peak_in_flight(self.schedule)

    @cached_property
    def peak_until_input(self) -> tuple[int, ...]:
        """Peak number of micro-batches of one stage between their F and their B or I, by rank."""
        return peak_in_flight(self.schedule, released_by="BI")


def simulate(schedule: Schedule, costs: ActionCosts) -> Timeline:
    """Simulate a schedule: each rank starts its next slot as soon as all dependencies of the slot are done.

    O(actions): `run_through` orders every action after its dependencies, so that the end of a slot follows from the ends of
    earlier slots.

    Args:
        schedule: schedule that `verify` accepts.
        costs: seconds of its actions.

    Raises:
        PlanError: the schedule deadlocks, or `costs` is for another number of stages.
    """
    seconds = costs.of_slots(schedule.num_stages)
    needs, rank_of_stage = schedule.needs, schedule.rank_of_stage
    starts: list[list[float]] = [[] for _ in schedule.slots]
    ends: list[list[float]] = [[] for _ in schedule.slots]
    end_of: dict[Action, float] = {}
    order = run_through(schedule).order
    if len(order) < sum(map(len, schedule.slots)):
        verify(schedule)
    for rank, position in order:
        slot = schedule.slots[rank][position]
        start = ends[rank][-1] if position else 0
        for action in slot:
            for need in needs[action]:
                is_remote = rank_of_stage[need.stage] != rank
                start = max(start, end_of[need] + costs.communication if is_remote else end_of[need])
        end = start + seconds(slot)
        starts[rank].append(start)
        ends[rank].append(end)
        for action in slot:
            end_of[action] = end
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
