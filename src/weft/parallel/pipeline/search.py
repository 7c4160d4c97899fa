"""Greedy search for zero-bubble schedules, given measured times and a memory limit. Imports no torch.

The heuristic of Qi et al., Zero Bubble Pipeline Parallelism (2023), section 3.1, for one stage per rank and split backwards:

1. Fill the time before the first backward with forwards.
2. Run one forward and one backward of every rank in turn, in waves down and up the pipeline. Run W where a rank would idle
   or has no memory for the next forward.
3. Run the remaining W.

Three decisions are left open; all eight combinations are tried.
"""

from itertools import count, product
from math import ceil

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import WHERE, Action, Schedule, Slot
from weft.parallel.pipeline.simulate import ActionCosts


def list_schedule(
    num_ranks: int,
    num_micro_batches: int,
    costs: ActionCosts,
    max_in_flight: int,
    weight_share: float = 1,
    name: str = "list",
) -> Schedule:
    """Best schedule of the heuristic: the one with the shortest `Timeline.longest_span`.

    Args:
        num_ranks: number of ranks, and of stages.
        num_micro_batches: micro-batches per step.
        costs: seconds of F, I and W per stage, and of the communication between ranks.
        max_in_flight: maximum number of micro-batches whose activations a rank may hold; P gives ZB-1p, 2P gives ZB-2p.
        weight_share: part of a micro-batch's activations that I leaves for W, from 0 to 1. With 1, the default, all of them
            count until W; Qi et al. count 32 h of 34 h + 5 a s (a heads, s tokens, h hidden size).
        name: schedule name.

    Raises:
        PlanError: `max_in_flight` is less than the number of ranks.
    """
    if max_in_flight < num_ranks:
        raise PlanError(
            f"at most {max_in_flight} micro-batches in flight on {num_ranks} ranks",
            where=WHERE,
            rule="all ranks can be busy only if rank 0 may hold one micro-batch per rank",
            fix=f"allow {num_ranks} or more in flight, or use fewer ranks",
        )
    states = [
        _build(SearchState(num_ranks, num_micro_batches, costs, max_in_flight, weight_share), *choices)
        for choices in product((True, False), repeat=3)
    ]
    best = min(states, key=SearchState.longest_span)
    return Schedule(name, num_micro_batches, tuple(range(num_ranks)), best.slots())


class SearchState:
    """Partial schedule of all ranks, with their clocks."""

    def __init__(
        self, num_ranks: int, num_micro_batches: int, costs: ActionCosts, max_in_flight: int, weight_share: float
    ) -> None:
        self.num_ranks, self.num_micro_batches = num_ranks, num_micro_batches
        self.max_in_flight, self.weight_share = max_in_flight, weight_share
        self.seconds = costs.of_slots(num_ranks).of_kind
        self.communication = costs.communication
        self.order: list[list[str]] = [[] for _ in range(num_ranks)]
        """Kinds of the actions of each rank so far; every kind takes its micro-batches in order."""
        self.end: dict[str, list[list[float]]] = {kind: [[] for _ in range(num_ranks)] for kind in "FIW"}
        """End of each action, by kind and rank."""
        self.clock: list[float] = [0] * num_ranks
        self.begin: list[float] = [0] * num_ranks
        self.idle: list[float] = [0] * num_ranks
        self.most_idle: float = 0

    def longest_span(self) -> float:
        return max(clock - begin for clock, begin in zip(self.clock, self.begin, strict=True))

    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        micro_batch = {kind: [count() for _ in range(self.num_ranks)] for kind in self.end}
        return tuple(
            tuple((Action(rank, kind, next(micro_batch[kind][rank])),) for kind in kinds)
            for rank, kinds in enumerate(self.order)
        )

    def ran(self, rank: int, kind: str) -> int:
        return len(self.end[kind][rank])

    def arrival(self, rank: int, kind: str) -> float:
        """Time at which the input of the next F or I of a rank arrives from the neighboring rank."""
        neighbor = rank - 1 if kind == "F" else rank + 1
        if not 0 <= neighbor < self.num_ranks:
            return 0
        return self.end[kind][neighbor][self.ran(rank, kind)] + self.communication

    def append(self, rank: int, kind: str) -> None:
        """Append the next action of a kind, as early as it can start."""
        start = self.clock[rank] if kind == "W" else max(self.clock[rank], self.arrival(rank, kind))
        if self.order[rank]:
            self.idle[rank] += start - self.clock[rank]
            self.most_idle = max(self.most_idle, self.idle[rank])
        else:
            self.begin[rank] = start
        self.clock[rank] = start + self.seconds[kind][rank]
        self.end[kind][rank].append(self.clock[rank])
        self.order[rank].append(kind)

    def waiting_weights(self, rank: int) -> int:
        return self.ran(rank, "I") - self.ran(rank, "W")

    def weights_to_fit(self, rank: int) -> int:
        """Number of W that must run before the memory limit allows one more forward."""
        waiting = self.waiting_weights(rank)
        held = self.ran(rank, "F") - self.ran(rank, "I") + self.weight_share * waiting
        over = held + 1 - self.max_in_flight
        return min(waiting, ceil(over / self.weight_share)) if over > 0 else 0

    def fill_gap(self, rank: int, until: float, eager: bool) -> None:
        """Run W until a time. Run one beyond it if the remaining gap would raise the maximum idle time, or if eager."""
        weight = self.seconds["W"][rank]
        while self.waiting_weights(rank) and self.clock[rank] + weight <= until:
            self.append(rank, "W")
        gap = until - self.clock[rank]
        if self.waiting_weights(rank) and gap > 0 and (eager or self.idle[rank] + gap > self.most_idle):
            self.append(rank, "W")


def _build(state: SearchState, short_of_backward: bool, skip_forwards: bool, eager: bool) -> SearchState:
    """Build one schedule.

    Args:
        state: empty state.
        short_of_backward: stop the warm-up forwards before they delay the first backward, at the cost of a short idle time.
        skip_forwards: skip a forward of a wave where the rank is ahead and loses no time.
        eager: fill a gap shorter than a W even if other ranks idle longer.
    """
    ranks, total = range(state.num_ranks), state.num_micro_batches
    for rank in ranks:
        state.append(rank, "F")
    for rank, more in enumerate(_first_forwards(state, short_of_backward)):
        for _ in range(more):
            state.append(rank, "F")
    for rank in reversed(ranks):
        state.append(rank, "I")
    for _ in range(1, total):
        for rank in _wave(state, skip_forwards):
            for _ in range(state.weights_to_fit(rank)):
                state.append(rank, "W")
            state.fill_gap(rank, state.arrival(rank, "F"), eager)
            state.append(rank, "F")
        for rank in reversed(ranks):
            state.fill_gap(rank, state.arrival(rank, "I"), eager)
            if rank == 0 and state.ran(0, "F") == total:  # no rank waits for the I of rank 0
                while state.waiting_weights(0):
                    state.append(0, "W")
            state.append(rank, "I")
    for rank in ranks:
        while state.waiting_weights(rank):
            state.append(rank, "W")
    return state


def _first_forwards(state: SearchState, short_of_backward: bool) -> list[int]:
    """Number of further warm-up forwards per rank that fit before the first backward, decreasing from rank to rank."""
    more = [0] * state.num_ranks
    last = state.num_ranks - 1
    backward = state.clock[last] + state.seconds["I"][last]
    for rank in reversed(range(last)):
        forward, clock, arrival = state.seconds["F"][rank], state.clock[rank], backward + state.communication
        most = min(state.max_in_flight, state.num_micro_batches) - 1
        while more[rank] < most and (clock + forward <= arrival if short_of_backward else clock < arrival):
            more[rank] += 1
            clock += forward
        backward = max(clock, arrival) + state.seconds["I"][rank]
    for rank in range(1, state.num_ranks):
        if more[rank] + 1 < state.num_micro_batches:
            more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
    return more


def _wave(state: SearchState, skip_forwards: bool) -> list[int]:
    """Ranks that run a forward in this wave: ranks with a forward left that do not skip it."""
    chosen = []
    runs = True
    for rank in reversed(range(state.num_ranks)):
        left = state.ran(rank, "F") < state.num_micro_batches
        runs = runs and left and not (skip_forwards and _may_skip(state, rank))
        if runs:
            chosen.append(rank)
    return chosen[::-1]


def _may_skip(state: SearchState, rank: int) -> bool:
    """True if a rank is two forwards ahead of the next rank and loses no time by waiting for its next backward."""
    if rank + 1 == state.num_ranks or state.ran(rank, "F") < state.ran(rank + 1, "F") + 2:
        return False
    seconds = state.seconds
    backward = state.clock[rank + 1] + seconds["F"][rank + 1] + seconds["I"][rank + 1] + state.communication
    if state.clock[rank] >= backward:
        return True
    forward = state.clock[rank] + seconds["F"][rank] + state.weights_to_fit(rank) * seconds["W"][rank]
    return forward > backward and state.idle[rank] + backward - state.clock[rank] <= state.most_idle
