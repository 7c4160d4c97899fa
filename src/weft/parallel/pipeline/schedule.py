"""Pipeline schedule as data: the actions of each rank, in order. Imports no torch.

Actions are written in the notation of torch.distributed.pipelining: `2F3` is the forward of stage 2 for micro-batch 3, `B` a
full backward, `I` the gradient of the inputs only, `W` the gradient of the weights only (Qi et al., Zero Bubble Pipeline
Parallelism, 2023). A slot is one action, or a forward and a backward that may run jointly, `(2F3;0B1)OVERLAP_F_B`.

Dependencies of an action on a micro-batch:

    F of stage s         F of stage s - 1
    B or I of stage s    F of stage s, and B or I of stage s + 1
    W of stage s         I of stage s

A rank runs its slots in order and starts a slot when all dependencies of the slot are done. Sends never block.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.errors import PlanError

WHERE = "plan.pipeline.schedule"
JOINT = "OVERLAP_F_B"
ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
JOINT_CELL = re.compile(rf"\(([^;()]*);([^;()]*)\){JOINT}")
REDUCE = re.compile(r"([0-9]{1,9})REDUCE_GRAD")
MESSAGE = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD)\d*")
SHOWN = 40  # characters of a cell in a message


class Action(NamedTuple):
    """One unit of work of a stage on a micro-batch."""

    stage: int
    kind: str
    """F forward, B full backward, I gradient of the inputs only, W gradient of the weights only."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Slot = tuple[Action, ...]
"""One action, or an independent forward and backward that may run jointly."""


def slot_text(slot: Slot) -> str:
    """Slot in CSV notation: `2F3`, or `(2F3;0B1)OVERLAP_F_B`."""
    return str(slot[0]) if len(slot) == 1 else f"({';'.join(map(str, slot))}){JOINT}"


@dataclass(frozen=True)
class Schedule:
    """Actions of each rank in one training step, in order."""

    name: str
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    """Rank of each stage."""
    slots: tuple[tuple[Slot, ...], ...]
    """Slots of each rank, in order."""

    @property
    def num_ranks(self) -> int:
        return len(self.slots)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, index of the slot, action) of every action, rank by rank."""
        for rank, slots in enumerate(self.slots):
            for position, slot in enumerate(slots):
                for action in slot:
                    yield rank, position, action

    @cached_property
    def needs(self) -> dict[Action, tuple[Action, ...]]:
        """Dependencies of each action: the actions, on any rank, that must end before it may start."""
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
        """Schedule as CSV: one line per rank, one cell per slot. `parse_schedule` and torch's pipeline runtime can read it."""
        return "".join(",".join(map(slot_text, slots)) + "\n" for slots in self.slots)


def parse_schedule(text: str, num_ranks: int, num_micro_batches: int, name: str = "table") -> Schedule:
    """Parse a schedule from CSV: one line per rank, one cell per slot, in torch's notation. Empty cells are ignored.

    A stage belongs to the rank whose line names it. Call `verify` on the result, since a table that can be parsed may still be
    wrong. torch's `0REDUCE_GRAD` is accepted and ignored: gradients are reduced once a rank has all of them, wherever the
    table puts the reduction.

    Args:
        text: CSV in the format of `Schedule.to_csv`.
        num_ranks: ranks of the pipeline.
        num_micro_batches: micro-batches per step.
        name: schedule name, for messages.

    Raises:
        PlanError: a cell cannot be read (the message has its line and cell, both counted from 1), the number of lines differs
            from the number of ranks, a rank has no stage, a stage is on two ranks or on none, or a `REDUCE_GRAD` is on another
            rank than its stage or before a backward of its stage.
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) != num_ranks:
        raise PlanError(
            f"a schedule of {len(lines)} lines for {num_ranks} ranks",
            where=WHERE,
            rule="a schedule table has one line per rank",
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
                    rule="each stage is on one rank: a bidirectional pipeline (DualPipe, Chimera), in which two ranks hold "
                    "each stage, takes twice the memory for weights and is not supported",
                    fix=f"move {action} to line {owner + 1}, or use dualpipev, which keeps each stage on one rank",
                )
    for rank, of_rank in enumerate(slots):
        if not of_rank:
            raise PlanError(
                f"no action on rank {rank}",
                where=f"{WHERE}, line {rank + 1}",
                rule="each rank runs at least one stage",
                fix=f"write the actions of a stage into line {rank + 1}, or set plan.parallel.pp to the ranks with stages",
            )
    for stage in range(max(owners) + 1):
        if stage not in owners:
            raise PlanError(
                f"no rank runs stage {stage}, but a rank runs stage {max(owners)}",
                where=WHERE,
                rule="stages are numbered from 0 without a gap",
                fix=f"add the actions of stage {stage}",
            )
    return Schedule(name, num_micro_batches, tuple(owners[stage] for stage in sorted(owners)), slots)


def _read_line(text: str, line: int) -> tuple[Slot, ...]:
    """Slots of one rank, from its line of the table."""
    slots: list[Slot] = []
    reduced: set[int] = set()
    for column, cell in enumerate(map(str.strip, text.split(",")), 1):
        location = f"line {line}, cell {column}"
        if reduces := REDUCE.fullmatch(cell):
            reduced.add(int(reduces[1]))
        elif cell:
            slots.append(_read_cell(cell, location))
            late = next((action for action in slots[-1] if action.kind in "BW" and action.stage in reduced), None)
            if late:
                raise PlanError(
                    f"{late} after {late.stage}REDUCE_GRAD",
                    where=f"{WHERE}, {location}",
                    rule="the gradients of a stage are reduced after all of them have been computed",
                    fix=f"move {late.stage}REDUCE_GRAD to the end of the line, or remove it",
                )
    if misplaced := reduced - {action.stage for slot in slots for action in slot}:
        raise PlanError(
            f"{min(misplaced)}REDUCE_GRAD on a rank without stage {min(misplaced)}",
            where=f"{WHERE}, line {line}",
            rule="a rank reduces the gradients of its own stages",
            fix=f"move {min(misplaced)}REDUCE_GRAD to the line of its stage, or remove it",
        )
    return tuple(slots)


def _read_cell(cell: str, location: str) -> Slot:
    if MESSAGE.fullmatch(cell):
        raise PlanError(
            f"{cell} in a schedule",
            where=f"{WHERE}, {location}",
            rule="a table lists computations only; Weft adds the communication itself",
            fix='remove SEND, RECV, UNSHARD and RESHARD: torch writes such a table with _dump_csv(format="compute_only")',
        )
    joint = JOINT_CELL.fullmatch(cell)
    parts = [ACTION.fullmatch(part.strip()) for part in (joint.groups() if joint else (cell,))]
    read = [Action(int(part[1]), part[2], int(part[3])) for part in parts if part]
    if len(read) < len(parts):
        raise PlanError(
            f"cannot read the slot {cell[:SHOWN]!r}" + " ..." * (len(cell) > SHOWN),
            where=f"{WHERE}, {location}",
            rule="a slot is a stage, a kind (F, B, I or W) and a micro-batch, or a forward and a backward in joint brackets",
            fix=f"write for example 2F3, or (2F3;0B1){JOINT}",
        )
    return tuple(read)


class ScheduleProgress(NamedTuple):
    """Progress of each rank when all ranks run their slots in order."""

    order: list[tuple[int, int]]
    """(rank, index of the slot) of every slot that can run, each after its dependencies."""
    position: list[int]
    """Index of the slot at which each rank stops; the number of its slots if it finishes."""
    waits_for: list[Action | None]
    """Action that each rank still waits for at the end; None if it finishes."""


def run_through(schedule: Schedule) -> ScheduleProgress:
    """Run a schedule without time: a valid order of all slots, or the point where the ranks deadlock. O(actions)."""
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
    """Peak number of activations held by each rank, in micro-batches of one stage.

    A forward saves everything that its backward reads, and B frees it. If the backward is split, I frees what only the input
    gradient reads (attention scores, inputs of activation functions and norms). W frees the rest: the inputs of the matrices,
    and the output gradients that I leaves for W (Qi et al., table 1). In a joint slot, the forward counts before the backward
    frees anything.

    Args:
        schedule: any schedule.
        released_by: "BW" counts a micro-batch until all of its activations are free, "BI" until the first part is free.
    """
    peaks = [0] * schedule.num_ranks
    held = [0] * schedule.num_ranks
    for rank, _, action in schedule.actions():
        held[rank] += (action.kind == "F") - (action.kind in released_by)
        peaks[rank] = max(peaks[rank], held[rank])
    return tuple(peaks)


def forward_order(rank_of_stage: Sequence[int], num_micro_batches: int) -> list[Action]:
    """Order of all forwards of an evaluation, over all ranks.

    Each rank runs a forward whenever an input is ready, of its last stage that has one, so that few micro-batches are in
    flight. If every rank issues its sends and receives in this order, each message has a later place than the messages that it
    depends on, and no rank waits for a rank that waits for it, even where a send blocks until it is received.

    Args:
        rank_of_stage: rank of each stage.
        num_micro_batches: micro-batches of the evaluation.
    """
    order: list[Action] = []
    done = [0] * len(rank_of_stage)
    """Micro-batches that each stage has run."""
    while done[-1] < num_micro_batches:
        ready = {
            rank: stage
            for stage, rank in enumerate(rank_of_stage)
            if done[stage] < (done[stage - 1] if stage else num_micro_batches)
        }
        for stage in sorted(ready.values()):
            order.append(Action(stage, "F", done[stage]))
        for stage in ready.values():
            done[stage] += 1
    return order
