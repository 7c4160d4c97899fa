"""Named pipeline schedules: one generator function each, which lists the slots of every rank. Imports no torch."""

import difflib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import WHERE, Action, Schedule, Slot
from weft.parallel.pipeline.search import list_schedule
from weft.parallel.pipeline.simulate import ActionCosts


class Lane:
    """Builder for the slots of one rank; every stage takes its micro-batches in order."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.count: Counter[tuple[int, bool]] = Counter()
        self.weights: list[Action] = []
        """W actions whose I is listed but which are not listed themselves, oldest first."""

    def take(self, stage: int, kind: str) -> Action:
        """Next action of a stage: F has its own counter, B and I share one."""
        action = Action(stage, kind, self.count[stage, kind == "F"])
        self.count[stage, kind == "F"] += 1
        if kind == "I":
            self.weights.append(action._replace(kind="W"))
        return action

    def run(self, stage: int, kind: str) -> None:
        """Append a slot with one F, B or I."""
        self.slots.append((self.take(stage, kind),))

    def joint(self, forward_stage: int, backward_stage: int) -> None:
        """Append a slot with one F and one B."""
        self.slots.append((self.take(forward_stage, "F"), self.take(backward_stage, "B")))

    def weight(self, stage: int | None = None) -> None:
        """Append a slot with the oldest pending W, of one stage or of any; append nothing if no W is pending."""
        oldest = next((action for action in self.weights if stage in (None, action.stage)), None)
        if oldest is not None:
            self.weights.remove(oldest)
            self.slots.append((oldest,))


def one_stage_per_rank(
    num_ranks: int, num_micro_batches: int, in_flight: Callable[[int], int], delay: Callable[[int], int] | None
) -> list[list[Slot]]:
    """Warm-up forwards, then alternating forwards and backwards (1F1B), then the remaining backwards.

    Args:
        num_ranks: number of ranks, and of stages.
        num_micro_batches: micro-batches per step.
        in_flight: rank -> number of forwards up to its first backward, including the forward of that micro-batch.
        delay: rank -> number of micro-batches by which W lags behind I; None: full backwards.
    """
    lanes = []
    for rank in range(num_ranks):
        lane = Lane()
        warm_up = min(in_flight(rank), num_micro_batches) - 1
        for _ in range(warm_up):
            lane.run(rank, "F")
        for step in range(num_micro_batches):
            if warm_up + step < num_micro_batches:
                lane.run(rank, "F")
            lane.run(rank, "B" if delay is None else "I")
            if delay is not None and step >= delay(rank):
                lane.weight()
        while lane.weights:
            lane.weight()
        lanes.append(lane.slots)
    return lanes


def gpipe(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """All forwards, then all backwards (Huang et al., GPipe, 2019). Holds every micro-batch."""
    return one_stage_per_rank(num_ranks, num_micro_batches, lambda rank: num_micro_batches, None)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """1F1B (PipeDream-Flush, Narayanan et al., 2021): rank r holds at most P - r micro-batches."""
    return one_stage_per_rank(num_ranks, num_micro_batches, lambda rank: num_ranks - rank, None)


def zero_bubble_h1(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """ZB-H1 (Qi et al., 2023, figure 3 top): 1F1B with W of rank r delayed by r micro-batches; every rank holds at most P."""
    return one_stage_per_rank(num_ranks, num_micro_batches, lambda rank: num_ranks - rank, lambda rank: rank)


def zero_bubble_h2(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """ZB-H2 (Qi et al., 2023, figure 3 bottom): more warm-up forwards and later W; every rank holds at most 2P - 1."""
    return one_stage_per_rank(
        num_ranks, num_micro_batches, lambda rank: 2 * (num_ranks - rank) - 1, lambda rank: 2 * rank
    )


def zero_bubble_1p(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """ZB-1p (Qi et al., 2023) for F = I = W: best schedule of a greedy search with at most P in flight."""
    best = list_schedule(num_ranks, num_micro_batches, ActionCosts(), max_in_flight=num_ranks)
    return [list(slots) for slots in best.slots]


def zero_bubble_2p(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """ZB-2p (Qi et al., 2023) for F = I = W: best schedule of a greedy search with at most 2P in flight."""
    best = list_schedule(num_ranks, num_micro_batches, ActionCosts(), max_in_flight=2 * num_ranks)
    return [list(slots) for slots in best.slots]


def rounds(num_ranks: int, num_micro_batches: int) -> list[int]:
    """Sizes of the rounds in which all chunks of a rank take the same micro-batches, as even as possible.

    A round has at least as many micro-batches as ranks: in a shorter one, a rank would wait for the output of its previous
    chunk to pass all other ranks. Larger rounds come first, because the warm-up is sized by the first round. A step with fewer
    micro-batches than ranks is one round.
    """
    count = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int, joint: bool = False) -> list[list[Slot]]:
    """Interleaved 1F1B (Narayanan et al., SC21): rank r holds stages r, P + r, 2P + r ... and takes them in rounds.

    With `joint`, one more warm-up forward makes the forward and the backward of every steady step independent, so that they
    share a slot ("one extra warm-up", MindSpeed and Megatron-LM's combined 1F1B).
    """
    sizes = rounds(num_ranks, num_micro_batches)
    chunks = [chunk for size in sizes for chunk in range(virtual_stages) for _ in range(size)]
    total = len(chunks)
    lanes = []
    for rank in range(num_ranks):
        forward = [chunk * num_ranks + rank for chunk in chunks]
        backward = [(virtual_stages - 1 - chunk) * num_ranks + rank for chunk in chunks]
        warm_up = min((virtual_stages - 1) * sizes[0] + 2 * (num_ranks - 1 - rank) + joint, total)
        lane = Lane()
        for stage in forward[:warm_up]:
            lane.run(stage, "F")
        for forward_stage, backward_stage in zip(forward[warm_up:], backward, strict=False):
            if joint:
                lane.joint(forward_stage, backward_stage)
            else:
                lane.run(forward_stage, "F")
                lane.run(backward_stage, "B")
        for stage in backward[total - warm_up :]:
            lane.run(stage, "B")
        lanes.append(lane.slots)
    return lanes


def interleaved_overlap(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """Interleaved 1F1B whose steady steps are joint slots of a forward and a backward."""
    return interleaved(num_ranks, num_micro_batches, virtual_stages, joint=True)


def zero_bubble_v(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """ZBV (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): two stages per rank in a V, memory of 1F1B."""
    # The pattern needs at least 2P - 1 micro-batches: it is generated in full, and surplus micro-batches are removed.
    enough = max(2 * num_ranks - 1, num_micro_batches)
    lanes = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        lane = Lane()
        for _ in range(2 * (num_ranks - rank) - 1):
            lane.run(down, "F")
        for _ in range(rank):
            lane.run(up, "F")
            lane.run(down, "F")
        for _ in range(num_ranks - rank):
            lane.run(up, "F")
            lane.run(up, "I")
            lane.weight()
        for step in range(enough - num_ranks):
            if step < enough - (2 * num_ranks - 1 - rank):
                lane.run(down, "F")
            lane.run(down, "I")
            lane.weight()
            lane.run(up, "F")
            lane.run(up, "I")
            lane.weight()
        for _ in range(rank):
            lane.run(down, "I")
            lane.run(up, "I")
        for _ in range(num_ranks - rank):
            lane.run(down, "I")
            lane.weight(down)
        for _ in range(rank):
            lane.weight(up)
        while lane.weights:
            lane.weight()
        lanes.append([slot for slot in lane.slots if slot[0].micro_batch < num_micro_batches])
    return lanes


def dual_pipe_v(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[list[Slot]]:
    """DualPipeV (DeepSeek, DualPipe, 2025, after Sea AI Lab): two stages per rank in a V, joint slots in the steady phase."""
    lanes = []
    for rank in range(num_ranks):
        after = num_ranks - 1 - rank
        down, up = rank, 2 * num_ranks - 1 - rank
        lane = Lane()
        for _ in range(2 * after):
            lane.run(down, "F")
        for _ in range(rank + 1):
            lane.run(down, "F")
            lane.run(up, "F")
        for _ in range(after):
            lane.run(up, "I")
            lane.weight()
            lane.run(up, "F")
        for step in range(num_micro_batches - 2 * num_ranks + rank + 1):
            if step == 0 and after == 0:  # at the turn of the V, a B that waits for this F may not share its slot
                lane.run(down, "F")
                lane.run(up, "B")
            else:
                lane.joint(down, up)
            lane.joint(up, down)
        for _ in range(after):
            lane.run(up, "B")
            lane.joint(up, down)
        for step in range(
            2 * (rank + 1)
        ):  # backwards of the second half are split, so that their W fill the later gaps
            lane.run(down if step % 2 else up, "B" if step < rank + 1 else "I")
        for _ in range(after):
            lane.weight()
            lane.run(down, "I")
        while lane.weights:
            lane.weight()
        lanes.append(lane.slots)
    return lanes


def loop_placement(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Rank of each stage if the stages are assigned round-robin."""
    return tuple(range(num_ranks)) * virtual_stages


def v_placement(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Rank of each stage if the stages go down the ranks and back up: rank r holds stages r and 2P - 1 - r."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


class ScheduleKind(NamedTuple):
    """Generator and limits of a named schedule."""

    generate: Callable[[int, int, int], list[list[Slot]]]
    """(num_ranks, num_micro_batches, virtual_stages) -> slots of every rank."""
    placement: Callable[[int, int], tuple[int, ...]] = loop_placement
    """(num_ranks, virtual_stages) -> rank of every stage."""
    virtual_stages: tuple[int, int | None] = (1, 1)
    """Minimum and maximum number of stages per rank; None: no maximum."""
    micro_batches_per_rank: int = 0
    """Minimum number of micro-batches, as a multiple of the number of ranks; at least one micro-batch in any case."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_forward_one_backward),
    "interleaved": ScheduleKind(interleaved, virtual_stages=(2, None)),
    "interleaved-overlap": ScheduleKind(interleaved_overlap, virtual_stages=(1, None)),
    "zb-h1": ScheduleKind(zero_bubble_h1),
    "zb-h2": ScheduleKind(zero_bubble_h2),
    "zb-1p": ScheduleKind(zero_bubble_1p),
    "zb-2p": ScheduleKind(zero_bubble_2p),
    "zbv": ScheduleKind(zero_bubble_v, v_placement, virtual_stages=(2, 2)),
    "dualpipev": ScheduleKind(dual_pipe_v, v_placement, virtual_stages=(2, 2), micro_batches_per_rank=2),
}
"""Named schedules, for the Plan, the planner and the docs."""


def schedule_kind(name: str, virtual_stages: int) -> ScheduleKind:
    """Look up a named schedule.

    Raises:
        PlanError: unknown name, or a number of stages per rank that the schedule does not support.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.3)
        raise PlanError(
            f"unknown schedule {name!r}",
            where=WHERE,
            rule=f"the schedules are {', '.join(SCHEDULES)}",
            fix=f"did you mean {near[0]!r}?" if near else "use one of these names",
        )
    kind = SCHEDULES[name]
    fewest, most = kind.virtual_stages
    if virtual_stages < fewest or (most is not None and virtual_stages > most):
        supported = f"{fewest} or more" if most is None else f"exactly {fewest}"
        raise PlanError(
            f"virtual_stages {virtual_stages} with {name}",
            where="plan.pipeline.virtual_stages",
            rule=f"{name} has {supported} stages per rank",
            fix=f"set plan.pipeline.virtual_stages to {fewest}"
            + (', or plan.pipeline.schedule to "1f1b"' if name == "interleaved" else ""),
        )
    return kind


def build_schedule(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Build a named schedule.

    Args:
        name: key of `SCHEDULES`.
        num_ranks: number of pipeline ranks, P.
        num_micro_batches: micro-batches per step, M; at least 1, for dualpipev at least 2P.
        virtual_stages: stages per rank: 2 for zbv and dualpipev, 2 or more for interleaved, 1 or more for
            interleaved-overlap, 1 for all other schedules.

    Raises:
        PlanError: unknown name, no rank, too few micro-batches, or a number of stages per rank that the schedule does not
            support.
    """
    kind = schedule_kind(name, virtual_stages)
    if num_ranks < 1:
        raise PlanError(
            f"a pipeline of {num_ranks} ranks",
            where="plan.parallel.pp",
            rule="a pipeline has at least one rank",
            fix="set pp to 1 or more",
        )
    enough = max(1, kind.micro_batches_per_rank * num_ranks)
    if num_micro_batches < enough:
        raise PlanError(
            f"{num_micro_batches} micro-batches with {name} on {num_ranks} ranks",
            where=WHERE,
            rule=f"{name} needs at least {enough} micro-batches per step"
            + (f", {kind.micro_batches_per_rank} per rank" if kind.micro_batches_per_rank else ""),
            fix=f"split the rows of a step into {enough} or more micro-batches"
            + (", or use zbv, which supports any number" if kind.placement is v_placement else ""),
        )
    slots = tuple(map(tuple, kind.generate(num_ranks, num_micro_batches, virtual_stages)))
    return Schedule(name, num_micro_batches, kind.placement(num_ranks, virtual_stages), slots)
