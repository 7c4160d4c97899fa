"""The rank that the other ranks of a host wait for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.launch.heartbeat import RankStatus

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
    collective, ranks that have exited, all ranks. Among them it is the rank that has called the fewest collectives. Collectives
    of accelerators count when they are issued: ranks that wait for the accelerator are not in a collective.

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
    suspects = stopped or silent or busy or exited or list(tracks)
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
        reason = (
            f"all ranks wait, and no rank has called fewer collectives ({status.collectives}): "
            f"it is in {status.waits_in}{at}"
        )
        return rank, reason, True
    others = [other for other in waiting if other != rank]
    ahead = [other for other, track in running.items() if track.status.issued > status.issued]
    if others:
        first = tracks[others[0]].status
        reason += f", while {_subject(others, 'waits', 'wait')} in {first.waits_in} at {first.location}"
    elif ahead:
        first = tracks[ahead[0]].status
        reason += (
            f"; it has issued {status.issued} collectives, and {_subject(ahead, 'has', 'have')} issued {first.issued} "
            f"and last ran {first.location}"
        )
    return rank, reason, False


def _subject(ranks: Sequence[int], singular: str, plural: str) -> str:
    """Subject and verb of a clause about some ranks."""
    names = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {names} {singular}" if len(ranks) == 1 else f"ranks {names} {plural}"
