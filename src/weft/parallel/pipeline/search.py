"""Zero-bubble schedules for measured times and a limit of memory, by greedy search. Imports no torch.

The heuristic of Qi et al., Zero Bubble Pipeline Parallelism (2023), section 3.1, one stage a rank and split backwards: fill the
time before the first backward with forwards; then one forward and one backward of every rank in turn, in waves down and up
the pipeline, with W where a rank would idle or has no room; in the end the W that are left. Three choices are open, and all
eight combinations are tried.
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
    """The schedule of the shortest `Timeline.longest_span` that the heuristic finds.

    Args:
        num_ranks: ranks, and stages.
        num_micro_batches: of one step.
        costs: seconds of F, I and W by stage, and of the communication between ranks.
        max_in_flight: most micro-batches whose activations a rank may hold; P of them make ZB-1p, 2P ZB-2p.
        weight_share: part of a micro-batch's activations that I leaves for W, from 0 to 1. With 1, the default, all of it
            counts until W; Qi et al. count 32 h of 34 h + 5 a s (a heads, s tokens, h hidden size).
        name: of the schedule.

    Raises:
        PlanError: `max_in_flight` is below the number of ranks.
    """
    if max_in_flight < num_ranks:
        raise PlanError(
            f"at most {max_in_flight} micro-batches in flight on {num_ranks} ranks",
            where=WHERE,
            rule="every rank keeps busy only if the first holds a micro-batch for each rank",
            fix=f"allow {num_ranks} or more in flight, or use fewer ranks",
        )
    boards = [
        _fill(SearchState(num_ranks, num_micro_batches, costs, max_in_flight, weight_share), *choices)
        for choices in product((True, False), repeat=3)
    ]
    best = min(boards, key=SearchState.longest_span)
    return Schedule(name, num_micro_batches, tuple(range(num_ranks)), best.slots())


class SearchState:
    """The ranks of a pipeline while their slots are chosen, with their clocks."""

    def __init__(
        self, num_ranks: int, num_micro_batches: int, costs: ActionCosts, max_in_flight: int, weight_share: float
    ) -> None:
        self.num_ranks, self.num_micro_batches = num_ranks, num_micro_batches
        self.max_in_flight, self.weight_share = max_in_flight, weight_share
        self.seconds = costs.of_slots(num_ranks).of_kind
        self.communication = costs.communication
        self.order: list[list[str]] = [[] for _ in range(num_ranks)]
        """Rank -> the kinds of its actions so far; every kind takes its micro-batches in order."""
        self.end: dict[str, list[list[float]]] = {kind: [[] for _ in range(num_ranks)] for kind in "FIW"}
        """Kind -> rank -> when each of its actions ends."""
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
        """When the next F or I of a rank has what it needs from the rank beside it."""
        neighbor = rank - 1 if kind == "F" else rank + 1
        if not 0 <= neighbor < self.num_ranks:
            return 0
        return self.end[kind][neighbor][self.ran(rank, kind)] + self.communication

    def put(self, rank: int, kind: str) -> None:
        """The next action of a kind, as early as it can start."""
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

    def weights_for_room(self, rank: int) -> int:
        """How many W must run before there is room for one more forward."""
        waiting = self.waiting_weights(rank)
        held = self.ran(rank, "F") - self.ran(rank, "I") + self.weight_share * waiting
        over = held + 1 - self.max_in_flight
        return min(waiting, ceil(over / self.weight_share)) if over > 0 else 0

    def fill_gap(self, rank: int, until: float, eager: bool) -> None:
        """Run W until a moment; one more beyond it if a gap stays that makes the most idle rank idle longer, or if eager."""
        weight = self.seconds["W"][rank]
        while self.waiting_weights(rank) and self.clock[rank] + weight <= until:
            self.put(rank, "W")
        gap = until - self.clock[rank]
        if self.waiting_weights(rank) and gap > 0 and (eager or self.idle[rank] + gap > self.most_idle):
            self.put(rank, "W")


def _fill(board: SearchState, short_of_backward: bool, skip_forwards: bool, eager: bool) -> SearchState:
    """One schedule.

    Args:
        board: empty.
        short_of_backward: stop the first forwards before they delay the first backward, and idle a little.
        skip_forwards: leave a forward out of a wave where the rank is ahead and loses no time.
        eager: fill a gap shorter than a W even where other ranks idle longer.
    """
    ranks, total = range(board.num_ranks), board.num_micro_batches
    for rank in ranks:
        board.put(rank, "F")
    for rank, more in enumerate(_first_forwards(board, short_of_backward)):
        for _ in range(more):
            board.put(rank, "F")
    for rank in reversed(ranks):
        board.put(rank, "I")
    for _ in range(1, total):
        for rank in _wave(board, skip_forwards):
            for _ in range(board.weights_for_room(rank)):
                board.put(rank, "W")
            board.fill_gap(rank, board.arrival(rank, "F"), eager)
            board.put(rank, "F")
        for rank in reversed(ranks):
            board.fill_gap(rank, board.arrival(rank, "I"), eager)
            if rank == 0 and board.ran(0, "F") == total:  # no rank waits for the I of rank 0
                while board.waiting_weights(0):
                    board.put(0, "W")
            board.put(rank, "I")
    for rank in ranks:
        while board.waiting_weights(rank):
            board.put(rank, "W")
    return board


def _first_forwards(board: SearchState, short_of_backward: bool) -> list[int]:
    """By rank: forwards after the first one that fit before the first backward, fewer on every next rank."""
    more = [0] * board.num_ranks
    last = board.num_ranks - 1
    backward = board.clock[last] + board.seconds["I"][last]
    for rank in reversed(range(last)):
        forward, clock, arrival = board.seconds["F"][rank], board.clock[rank], backward + board.communication
        room = min(board.max_in_flight, board.num_micro_batches) - 1
        while more[rank] < room and (clock + forward <= arrival if short_of_backward else clock < arrival):
            more[rank] += 1
            clock += forward
        backward = max(clock, arrival) + board.seconds["I"][rank]
    for rank in range(1, board.num_ranks):
        if more[rank] + 1 < board.num_micro_batches:
            more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
    return more


def _wave(board: SearchState, skip_forwards: bool) -> list[int]:
    """The ranks that run a forward in this wave: those that have one left, but for those that better skip it."""
    chosen = []
    runs = True
    for rank in reversed(range(board.num_ranks)):
        left = board.ran(rank, "F") < board.num_micro_batches
        runs = runs and left and not (skip_forwards and _may_skip(board, rank))
        if runs:
            chosen.append(rank)
    return chosen[::-1]


def _may_skip(board: SearchState, rank: int) -> bool:
    """Whether a rank is ahead of the next by two forwards and loses no time if it waits for its next backward."""
    if rank + 1 == board.num_ranks or board.ran(rank, "F") < board.ran(rank + 1, "F") + 2:
        return False
    seconds = board.seconds
    backward = board.clock[rank + 1] + seconds["F"][rank + 1] + seconds["I"][rank + 1] + board.communication
    if board.clock[rank] >= backward:
        return True
    forward = board.clock[rank] + seconds["F"][rank] + board.weights_for_room(rank) * seconds["W"][rank]
    return forward > backward and board.idle[rank] + backward - board.clock[rank] <= board.most_idle
