"""How long a schedule takes: when every slot starts and ends, and how much of the time each rank idles. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import Action, Schedule, Slot, peak_in_flight, run_through
from weft.parallel.pipeline.verify import verify

ByStage = float | Sequence[float]
"""One number for every stage, or one for each."""


@dataclass(frozen=True)
class ActionCosts:
    """Seconds of every kind of action, by stage. Integers and fractions stay exact. A whole backward takes I + W."""

    forward: ByStage = 1
    backward_input: ByStage = 1
    backward_weight: ByStage = 1
    communication: float = 0
    """From the end of an action to the moment that its result is on another rank; no rank is busy with it."""
    joint: ByStage | None = None
    """Of a joint slot, by the stage of its forward; None: the sum of its two actions, that is, nothing overlaps."""

    def of_slots(self, num_stages: int) -> "SlotSeconds":
        """The costs of a pipeline of so many stages.

        Raises:
            PlanError: a sequence has another number of entries.
        """
        forward, inputs, weights = (
            _by_stage(getattr(self, name), num_stages, name)
            for name in ("forward", "backward_input", "backward_weight")
        )
        whole = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        joint = None if self.joint is None else _by_stage(self.joint, num_stages, "joint")
        return SlotSeconds({"F": forward, "B": whole, "I": inputs, "W": weights}, joint)


def _by_stage(value: ByStage, num_stages: int, name: str) -> tuple[float, ...]:
    if not isinstance(value, Sequence):
        return (value,) * num_stages
    if len(value) != num_stages:
        raise PlanError(
            f"{len(value)} costs {name} for {num_stages} stages",
            rule="a cost is one number, or one for each stage",
            fix=f"give {num_stages} numbers",
        )
    return tuple(value)


@dataclass(frozen=True)
class SlotSeconds:
    """Seconds of any slot of one pipeline."""

    of_kind: dict[str, tuple[float, ...]]
    joint: tuple[float, ...] | None

    def __call__(self, slot: Slot) -> float:
        if len(slot) > 1 and self.joint is not None:
            return self.joint[slot[0].stage]
        return sum(self.of_kind[action.kind][action.stage] for action in slot)


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule on a clock that starts at 0."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    """Rank -> seconds at which each of its slots starts."""
    end: tuple[tuple[float, ...], ...]
    """Rank -> seconds at which each of its slots ends."""

    @cached_property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last slot."""
        return max((ends[-1] for ends in self.end if ends), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Rank -> seconds in which it works."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start, self.end, strict=True)
        )

    @property
    def ideal(self) -> float:
        """Seconds that the busiest rank works: no order of the same work takes less."""
        return max(self.busy, default=0)

    @property
    def mean_busy(self) -> float:
        """Seconds that a rank works on average: below `ideal` where the stages are uneven."""
        return sum(self.busy) / max(1, len(self.busy))

    @property
    def bubble(self) -> tuple[float, ...]:
        """Rank -> seconds in which it idles, of `makespan`."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_rate(self) -> tuple[float, ...]:
        """Rank -> part of `makespan` in which it idles."""
        return tuple(bubble / self.makespan if self.makespan else 0 for bubble in self.bubble)

    @property
    def longest_span(self) -> float:
        """Most seconds between the first start and the last end of one rank.

        That is what a step costs where steps follow each other without a barrier: a rank that starts later ends later. A
        schedule of no bubbles is a parallelogram (Qi et al., section 5.3, take it as the cost of a schedule).
        """
        return max((ends[-1] - starts[0] for starts, ends in zip(self.start, self.end, strict=True) if ends), default=0)

    @property
    def span_bubble_rate(self) -> float:
        """Part of `longest_span` above `ideal`: the bubble rate of Qi et al., table 5."""
        return (self.longest_span - self.ideal) / self.longest_span if self.longest_span else 0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Rank -> most micro-batches of one stage whose forward has run and whose B, or W, has not.

        An upper bound of the memory: `peak_until_input` says for how many of them the part that I frees is there too.
        """
        return peak_in_flight(self.schedule)

    @cached_property
    def peak_until_input(self) -> tuple[int, ...]:
        """Rank -> most micro-batches of one stage whose forward has run and whose B, or I, has not."""
        return peak_in_flight(self.schedule, released_by="BI")


def simulate(schedule: Schedule, costs: ActionCosts) -> Timeline:
    """When every slot starts and ends, if each rank starts its next slot as soon as all that it needs is there.

    O(actions): the order that `run_through` gives never meets an action before what it needs, so that the end of every slot
    is known from those before it.

    Args:
        schedule: any that `verify` accepts.
        costs: seconds of its actions.

    Raises:
        PlanError: the schedule waits forever, or `costs` is of another number of stages.
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
                away = rank_of_stage[need.stage] != rank
                start = max(start, end_of[need] + costs.communication if away else end_of[need])
        end = start + seconds(slot)
        starts[rank].append(start)
        ends[rank].append(end)
        for action in slot:
            end_of[action] = end
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
