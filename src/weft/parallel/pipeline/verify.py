"""Validation of schedules: completeness, order, deadlocks and peak memory. Imports no torch."""

from collections import Counter

from weft.errors import Refusal, raise_if_refused
from weft.parallel.pipeline.schedule import WHERE, Action, Schedule, peak_in_flight, run_through, slot_text


def verify(schedule: Schedule, max_in_flight: int | None = None) -> None:
    """Check a schedule before anything runs.

    Args:
        schedule: generated schedule, or a user-defined table.
        max_in_flight: maximum number of micro-batches of one stage whose activations a rank may hold, until B or W
            (`peak_in_flight`).

    Raises:
        PlanError: one of these:

            - unknown stage, rank, kind or micro-batch
            - missing or duplicate action; W without I; B together with I or W
            - slot that is neither one action nor a forward and a backward
            - action before one of its dependencies on the same rank
            - deadlock (the message has the cycle)
            - more micro-batches in flight than `max_in_flight`
    """
    raise_if_refused(
        _unknown_names(schedule)
        or _missing_actions(schedule)
        or _wrong_order(schedule)
        or _deadlock(schedule)
        or _too_many_in_flight(schedule, max_in_flight)
    )


def _refusal(schedule: Schedule, what: str, rule: str, fix: str) -> Refusal:
    return Refusal(f"schedule {schedule.name}: {what}", where=WHERE, rule=rule, fix=fix)


def _unknown_names(schedule: Schedule) -> Refusal | None:
    for stage, owner in enumerate(schedule.rank_of_stage):
        if not 0 <= owner < schedule.num_ranks:
            return _refusal(
                schedule,
                f"stage {stage} is on rank {owner}",
                f"ranks are 0 to {schedule.num_ranks - 1}, one per line of slots",
                f"move stage {stage} to one of these ranks",
            )
    for rank, position, action in schedule.actions():
        known = 0 <= action.stage < schedule.num_stages and 0 <= action.micro_batch < schedule.num_micro_batches
        if not known or action.kind not in tuple("FBIW"):
            return _refusal(
                schedule,
                f"{action} in slot {position} of rank {rank} is unknown",
                f"stages are 0 to {schedule.num_stages - 1}, micro-batches 0 to {schedule.num_micro_batches - 1}, "
                "kinds F, B, I and W",
                "remove the action, or change the number of stages or micro-batches",
            )
        if schedule.rank_of_stage[action.stage] != rank:
            return _refusal(
                schedule,
                f"{action} in slot {position} of rank {rank}",
                f"stage {action.stage} is on rank {schedule.rank_of_stage[action.stage]}",
                f"move the action to rank {schedule.rank_of_stage[action.stage]}",
            )
    for rank, slots in enumerate(schedule.slots):
        for position, slot in enumerate(slots):
            kinds = "".join(action.kind for action in slot)
            if len(kinds) != 1 and kinds not in ("FB", "FI"):
                return _refusal(
                    schedule,
                    f"slot {position} of rank {rank} holds {slot_text(slot) if slot else 'nothing'}",
                    "a slot is one action, or a forward and a B or I that may run jointly",
                    "put each action in a separate slot",
                )
    return None


def _missing_actions(schedule: Schedule) -> Refusal | None:
    count = Counter(action for _, _, action in schedule.actions())
    for action, times in count.items():
        if times > 1:
            return _refusal(
                schedule,
                f"{action} occurs {times} times",
                "every action runs once per step",
                f"keep its first occurrence on rank {schedule.rank_of_stage[action.stage]}",
            )
    for stage in range(schedule.num_stages):
        for batch in range(schedule.num_micro_batches):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, kind, batch) in count)
            if kinds not in ("FB", "FIW"):
                rank = schedule.rank_of_stage[stage]
                return _refusal(
                    schedule,
                    f"stage {stage} on rank {rank} has {' and '.join(kinds) or 'nothing'} of micro-batch {batch}",
                    "a stage runs F and B, or F, I and W, for every micro-batch",
                    _fix_kinds(stage, kinds, batch),
                )
    return None


def _fix_kinds(stage: int, kinds: str, batch: int) -> str:
    if "B" in kinds and kinds != "B":
        return f"remove {stage}B{batch}, or remove its parts {stage}I{batch} and {stage}W{batch}"
    wanted = "FB" if kinds in ("", "F", "B") else "FIW"
    return "add " + " and ".join(f"{stage}{kind}{batch}" for kind in wanted if kind not in kinds)


def _wrong_order(schedule: Schedule) -> Refusal | None:
    location = {action: (rank, position) for rank, position, action in schedule.actions()}
    for rank, position, action in schedule.actions():
        for need in schedule.needs[action]:
            owner, other = location[need]
            if owner == rank and other >= position:
                together = other == position
                return _refusal(
                    schedule,
                    f"rank {rank} runs {action} in slot {position}, "
                    + (f"jointly with {need}" if together else f"but {need} in slot {other}"),
                    f"{action} depends on {need}, which must run in an earlier slot",
                    f"move {need} before {action}",
                )
    return None


def _deadlock(schedule: Schedule) -> Refusal | None:
    progress = run_through(schedule)
    awaited = {rank: action for rank, action in enumerate(progress.waits_for) if action is not None}
    if not awaited:
        return None
    rank, path = min(awaited), []
    while rank not in path:  # the rank that another rank waits for is waiting too, so the path closes
        path.append(rank)
        rank = schedule.rank_of_stage[awaited[rank].stage]
    cycle = path[path.index(rank) :]
    links = [
        f"waits with {slot_text(schedule.slots[rank][progress.position[rank]])} for {awaited[rank]} "
        f"on rank {schedule.rank_of_stage[awaited[rank].stage]}"
        for rank in cycle
    ]
    return _refusal(
        schedule,
        f"deadlock: rank {cycle[0]} " + ", which ".join(links),
        "a rank runs its slots in order, and starts a slot when all its dependencies are done",
        "move one of the awaited actions before the slot in which its rank waits",
    )


def _too_many_in_flight(schedule: Schedule, max_in_flight: int | None) -> Refusal | None:
    if max_in_flight is None:
        return None
    peaks = peak_in_flight(schedule)
    worst = max(range(schedule.num_ranks), key=peaks.__getitem__, default=0)
    if peaks and peaks[worst] > max_in_flight:
        return _refusal(
            schedule,
            f"rank {worst} holds the activations of {peaks[worst]} micro-batches of a stage at once",
            f"at most {max_in_flight} may be in flight on a rank",
            "run backwards earlier, or allow more in flight",
        )
    return None
