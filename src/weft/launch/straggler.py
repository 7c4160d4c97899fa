"""The rank that the other ranks of a host wait for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.group_progress import GroupProgress
from weft.launch.rank_status import RankStatus

MAX_SAMPLE_AGE = 3.0  # seconds; a heartbeat samples five times a second


@dataclass
class RankTrack:
    """History of one rank, as seen by the watchdog. Times are seconds of CLOCK_MONOTONIC."""

    status: RankStatus
    phase_start: float
    """Time at which the rank's phase or step began."""
    last_progress: float
    """Time at which the rank last made progress."""
    stop_reason: str = ""
    """Reason why the process is stopped, or ""."""
    stopped_at: float = 0.0
    exited: bool = False
    """True if the rank has exited with code 0."""
    resident: int = 0
    """Bytes of resident memory at the last poll."""


def find_straggler(tracks: Mapping[int, RankTrack], now: float) -> tuple[int, str, bool]:
    """Find the rank that the other ranks wait for.

    The candidates are, in this order: ranks that are stopped, ranks whose heartbeat ended, ranks whose main thread is not in a
    collective, ranks that have exited, all ranks. A rank whose accelerator has not completed a collective counts as in it.
    Those of the candidates that are behind in a process group (`find_behind`) come first. Among them it is the rank that has
    called the fewest collectives; collectives of accelerators count when they are issued.

    Returns:
        rank: the straggler.
        reason: evidence for this choice.
        waits: True if the straggler seems to wait for other ranks itself.
    """
    running = {rank: track for rank, track in tracks.items() if not track.exited}
    waiting = [rank for rank, track in running.items() if track.status.waits_in]
    stopped = [rank for rank, track in running.items() if track.stop_reason]
    silent = [rank for rank, track in running.items() if 0 < track.status.sampled_at < now - MAX_SAMPLE_AGE]
    busy = [rank for rank, track in running.items() if track.status.pid and not track.status.waits_in]
    exited = [rank for rank in tracks if rank not in running]
    behind = find_behind({rank: track.status for rank, track in running.items()})
    suspects = stopped or silent or busy or exited or list(tracks)
    suspects = [rank for rank in suspects if rank in behind] or suspects
    rank = min(
        suspects,
        key=lambda rank: (tracks[rank].status.collectives + tracks[rank].status.issued, tracks[rank].phase_start),
    )
    status = tracks[rank].status
    at = f" at {status.location}" if status.location else ""
    if stopped:
        reason = f"{tracks[rank].stop_reason}{at}"
    elif silent:
        reason = (
            f"its heartbeat ended {now - status.sampled_at:.0f} s ago{at}; native code may be holding Python's lock"
        )
    elif busy:
        reason = f"its main thread is{at}, not in a collective"
    elif exited:
        reason = "it exited with code 0"
    else:
        order = _order_of_waiting(rank, status, behind)
        return rank, f"all ranks wait, and {order}{at}{_also_behind(rank, behind)}", True
    reason += f"; {behind[rank]}" if rank in behind else ""
    if others := [other for other in waiting if other != rank]:
        first = tracks[others[0]].status
        reason += f", while {_subject(others, 'waits', 'wait')} in {first.waits_in} at {first.location}"
    return rank, reason, False


def _order_of_waiting(rank: int, status: RankStatus, behind: Mapping[int, str]) -> str:
    """Reason for a rank where all ranks wait."""
    if rank in behind:
        return f"it is behind: {behind[rank]}; it is in {status.waits_in or 'no collective'}"
    return f"no rank has called fewer collectives ({status.collectives + status.issued}): it is in {status.waits_in}"


def _also_behind(rank: int, behind: Mapping[int, str]) -> str:
    """Other rank with fewer collectives than the rest, beside `rank`; "" without one."""
    other = next((other for other in behind if other != rank), None) if rank in behind else None
    return "" if other is None else f"; rank {other} is behind as well: {behind[other]}"


def find_behind(ranks: Mapping[int, RankStatus]) -> dict[int, str]:
    """Find the ranks that are behind the other ranks of a process group; those that do not wait themselves, if there are any.

    A rank is behind if it has issued fewer collectives of the group; or, where all have issued equally many, if its accelerator
    has started fewer. Totals over all groups do not show it: pipeline stages, for example, issue different numbers. A rank that
    is ahead in another group waits there for a rank that is behind.

    Args:
        ranks: status of each running rank of this host.

    Returns:
        Evidence for each rank that is behind.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank, status in ranks.items():
        for group in status.groups:
            groups.setdefault(group.name, {})[rank] = group
    behind, ahead = dict[int, str](), set[int]()
    for members in groups.values():
        issued = {rank: group.issued for rank, group in members.items()}
        is_issued = len(set(issued.values())) > 1
        number = issued if is_issued else {rank: group.started for rank, group in members.items()}
        most = max(number.values())
        if min(number.values()) == most or (not is_issued and -1 in number.values()):
            continue
        leaders = [rank for rank in members if number[rank] == most]
        ahead.update(leaders)
        done = "issued" if is_issued else "started on its device"
        for rank in (rank for rank in members if number[rank] < most):
            have = f"{_subject(leaders, 'has', 'have')} {done.split()[0]} {most}"
            text = f"in group {members[rank].description} it has {done} {number[rank]} collectives, and {have}"
            behind.setdefault(rank, text)
    roots = {rank: text for rank, text in behind.items() if rank not in ahead}
    return roots or behind


def _subject(ranks: Sequence[int], singular: str, plural: str) -> str:
    """Subject and verb of a clause about some ranks."""
    names = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {names} {singular}" if len(ranks) == 1 else f"ranks {names} {plural}"
