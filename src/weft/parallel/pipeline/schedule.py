"""A pipeline schedule as data: which rank runs which action, in which order. Imports no torch.

The notation of an action is that of torch.distributed.pipelining: `2F3` is the forward of stage 2 for micro-batch 3, `B` a
whole backward, `I` the gradient of the inputs only, `W` the gradient of the weights only (Qi et al., Zero Bubble Pipeline
Parallelism, 2023). A slot is one action, or a forward and a backward that may run jointly, `(2F3;0B1)OVERLAP_F_B`.

What an action needs: F of stage s the F of stage s-1, B or I of stage s the B or I of stage s+1 and its own F, W its own I.
A rank runs its slots in order and starts a slot when all that it needs is there; sends never block.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.errors import PlanError

WHERE = "plan.pipeline.schedule"
JOINT = "OVERLAP_F_B"
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
JOINT_CELL = re.compile(rf"\(([^;()]*);([^;()]*)\){JOINT}")
REDUCE = re.compile(r"(\d+)REDUCE_GRAD")
MESSAGE = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD)\d*")


class Action(NamedTuple):
    """One piece of work of one stage on one micro-batch."""

    stage: int
    kind: str
    """F forward, B whole backward, I gradient of the inputs only, W gradient of the weights only."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Slot = tuple[Action, ...]
"""One action, or a forward and a backward of which neither needs the other and that may be executed jointly."""


def slot_text(slot: Slot) -> str:
    """`2F3`, or `(2F3;0B1)OVERLAP_F_B`."""
    return str(slot[0]) if len(slot) == 1 else f"({';'.join(map(str, slot))}){JOINT}"


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order, in one training step."""

    name: str
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    """Stage -> rank."""
    slots: tuple[tuple[Slot, ...], ...]
    """Rank -> its slots, in order."""

    @property
    def num_ranks(self) -> int:
        return len(self.slots)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Rank, position of the slot, action: of every action, rank by rank."""
        for rank, slots in enumerate(self.slots):
            for position, slot in enumerate(slots):
                for action in slot:
                    yield rank, position, action

    @cached_property
    def needs(self) -> dict[Action, tuple[Action, ...]]:
        """For every action, those that must have ended before it may start, on this rank or on another."""
        split = {(action.stage, action.micro_batch) for _, _, action in self.actions() if action.kind == "I"}

        def needed(action: Action) -> tuple[Action, ...]:
            stage, kind, batch = action
            if kind == "W":
                return (Action(stage, "I", batch),)
            if kind == "F":
                return (Action(stage - 1, "F", batch),) if stage else ()
            own = Action(stage, "F", batch)
            if stage == self.num_stages - 1:
                return (own,)
            return (own, Action(stage + 1, "I" if (stage + 1, batch) in split else "B", batch))

        return {action: needed(action) for _, _, action in self.actions()}

    def to_csv(self) -> str:
        """One line a rank, one cell a slot; `parse_schedule` and torch's pipeline runtime read it."""
        return "".join(",".join(map(slot_text, slots)) + "\n" for slots in self.slots)


def parse_schedule(text: str, num_ranks: int, num_micro_batches: int, name: str = "table") -> Schedule:
    """Read a schedule from a table: one line a rank, one cell a slot, in torch's notation. Empty cells are ignored.

    A stage lives on the rank whose line names it. Call `verify` on the result: the table may still be wrong. torch's
    `0REDUCE_GRAD` is read, and not kept: gradients are reduced when a rank has all of them, whatever the table says.

    Args:
        text: as `Schedule.to_csv` writes it.
        num_ranks: ranks of the pipeline.
        num_micro_batches: of one step.
        name: of the schedule.

    Raises:
        PlanError: a cell cannot be read (its line and cell, both from 1), the number of lines is not that of the ranks, a
            stage is on two ranks or on none, or a `REDUCE_GRAD` is on another rank than its stage, or before a backward of it.
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) != num_ranks:
        raise PlanError(
            f"a schedule of {len(lines)} lines for {num_ranks} ranks",
            where=WHERE,
            rule="a table of a schedule has one line a rank",
            fix=f"write {num_ranks} lines",
        )
    slots = tuple(_read_line(row, line) for line, row in enumerate(lines, 1))
    owners: dict[int, int] = {}
    for rank, of_rank in enumerate(slots):
        for action in (action for slot in of_rank for action in slot):
            owner = owners.setdefault(action.stage, rank)
            if owner != rank:
                raise PlanError(
                    f"{action} on rank {rank}, but stage {action.stage} is on rank {owner}",
                    where=f"{WHERE}, line {rank + 1}",
                    rule="a stage lives on one rank: a bidirectional pipeline (DualPipe, Chimera), in which two ranks hold "
                    "each stage, takes twice the memory for weights, and is not supported",
                    fix=f"move {action} to line {owner + 1}, or use dualpipev, which keeps each stage on one rank",
                )
    for stage in range(max(owners, default=-1) + 1):
        if stage not in owners:
            raise PlanError(
                f"no rank runs stage {stage}, but one runs stage {max(owners)}",
                where=WHERE,
                rule="stages are numbered from 0 without a gap",
                fix=f"add the actions of stage {stage}",
            )
    return Schedule(name, num_micro_batches, tuple(owners[stage] for stage in sorted(owners)), slots)


def _read_line(text: str, line: int) -> tuple[Slot, ...]:
    """The slots of one rank, from a line of a table."""
    slots: list[Slot] = []
    reduced: set[int] = set()
    for number, cell in enumerate(map(str.strip, text.split(",")), 1):
        place = f"line {line}, cell {number}"
        if reduces := REDUCE.fullmatch(cell):
            reduced.add(int(reduces[1]))
        elif cell:
            slots.append(_read_cell(cell, place))
            late = next((action for action in slots[-1] if action.kind in "BW" and action.stage in reduced), None)
            if late:
                raise PlanError(
                    f"{late} behind {late.stage}REDUCE_GRAD",
                    where=f"{WHERE}, {place}",
                    rule="gradients of a stage are reduced when all of them have been computed",
                    fix=f"move {late.stage}REDUCE_GRAD to the end of the line, or leave it out",
                )
    if elsewhere := reduced - {action.stage for slot in slots for action in slot}:
        raise PlanError(
            f"{min(elsewhere)}REDUCE_GRAD on a rank without stage {min(elsewhere)}",
            where=f"{WHERE}, line {line}",
            rule="a rank reduces the gradients of its own stages",
            fix=f"move {min(elsewhere)}REDUCE_GRAD to the line of its stage, or leave it out",
        )
    return tuple(slots)


def _read_cell(cell: str, place: str) -> Slot:
    if MESSAGE.fullmatch(cell):
        raise PlanError(
            f"{cell} in a schedule",
            where=f"{WHERE}, {place}",
            rule="a table says what ranks compute; Weft adds messages and gathered weights by itself",
            fix='leave out SEND, RECV, UNSHARD and RESHARD: torch writes such a table with _dump_csv(format="compute_only")',
        )
    joint = JOINT_CELL.fullmatch(cell)
    parts = [ACTION.fullmatch(part.strip()) for part in (joint.groups() if joint else (cell,))]
    read = [Action(int(part[1]), part[2], int(part[3])) for part in parts if part]
    if len(read) < len(parts):
        raise PlanError(
            f"cannot read the slot {cell!r}",
            where=f"{WHERE}, {place}",
            rule="a slot is stage, F, B, I or W, micro-batch, or a forward and a backward in joint brackets",
            fix=f"write for example 2F3, or (2F3;0B1){JOINT}",
        )
    return tuple(read)


class ScheduleProgress(NamedTuple):
    """How far the ranks of a schedule get when each runs its slots in order."""

    order: list[tuple[int, int]]
    """(rank, position) of every slot that can run, each after all that it needs."""
    position: list[int]
    """By rank: the slot it stops at; the number of its slots where it ends."""
    waits_for: list[Action | None]
    """By rank: the action it waits for in the end."""


def run_through(schedule: Schedule) -> ScheduleProgress:
    """Run a schedule without time: the order of all slots, or where it gets stuck. O(actions)."""
    needs = schedule.needs
    progress = ScheduleProgress([], [0] * schedule.num_ranks, [None] * schedule.num_ranks)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        slots = schedule.slots[rank]
        missing = None
        while missing is None and progress.position[rank] < len(slots):
            slot = slots[progress.position[rank]]
            missing = next((need for action in slot for need in needs[action] if need not in done), None)
            if missing is None:
                progress.order.append((rank, progress.position[rank]))
                progress.position[rank] += 1
                for action in slot:
                    done.add(action)
                    ready.extend(waiting.pop(action, ()))
        progress.waits_for[rank] = missing
        if missing is not None:
            waiting[missing].append(rank)
    return progress


def peak_in_flight(schedule: Schedule, released_by: str = "BW") -> tuple[int, ...]:
    """Most activations that each rank holds at once, counted in micro-batches of one stage.

    A forward keeps all that its backward reads. B frees it. Where the backward is split, I frees what only the gradient of
    the inputs reads (the scores of attention, the inputs of activation functions and norms), and W frees the rest: the inputs
    of the matrices, and the gradients of their outputs, which I leaves (Qi et al., table 1). In a joint slot, the forward
    counts before the backward has freed anything.

    Args:
        schedule: any.
        released_by: "BW" counts until the last of it is free, "BI" until the first part is.
    """
    peaks = [0] * schedule.num_ranks
    held = [0] * schedule.num_ranks
    for rank, _, action in schedule.actions():
        held[rank] += (action.kind == "F") - (action.kind in released_by)
        peaks[rank] = max(peaks[rank], held[rank])
    return tuple(peaks)
