"""Who is to blame when the ranks of a host do not go on: the one that died by itself, or the one that stands still.

    watchdog = Watchdog(log_dir, pulses, Timeouts(), say)      # in the launcher
    failure = watchdog.poll(processes)                       # about ten times a second

A rank that dies takes the others with it, and a rank that stands still makes all of them wait. What they say then is a
consequence. The watchdog tells it from the cause by the exit codes, the reports and the pulses of all ranks, and by what the
guardians of other hosts say.
"""

import json
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from subprocess import Popen
from typing import Any

from weft.errors import RankFailure
from weft.launch.coordinator import FailureRecord, JobCoordinator
from weft.launch.heartbeat import RankStatus, read_status
from weft.launch.oom_kills import ControlGroup, resident_bytes

TAIL_LINES = 12
GRACE_SECONDS = 0.5  # for the cause to be seen, when only a consequence has been seen
SILENT_SECONDS = 3.0  # a pulse beats five times a second
STOPPED = {"T": "stopped by a signal", "t": "held by a debugger"}  # states of /proc/PID/stat
REFUSED = 2  # exit code of refused input: not a failure of the job

# How a rank speaks of a peer that is gone: the consequence of another rank's failure, not the failure.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
    "Timed out waiting",
    "did not come within",
)


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which the watchdog speaks."""

    stopped: float = 5.0
    """A rank that a signal or a debugger has stopped is named."""
    slow: float = 10.0
    """A rank that is still in its step is named, at the earliest."""
    slow_steps: float = 3.0
    """It is named after so many median step times, if that is longer."""
    other: float = 600.0
    """A rank that is in its first two steps, or in anything but a step, and makes no progress there, is named."""
    patience: float = 600.0
    """The job is ended when no rank has made progress. It must be less than the timeout of process groups."""


class Cause(IntEnum):
    """How near an end is to the cause of all; the lowest is blamed."""

    OWN = 0
    ABORT = 1  # gloo and NCCL abort a process that lost its peer
    TERMINATED = 2
    LEFT = 3  # with exit code 0, while others were at work
    CONSEQUENCE = 4


@dataclass
class _Track:
    """What has been seen of one rank."""

    record: RankStatus
    since: float
    """When its phase or step began."""
    active: float
    """When it last made progress."""
    state: str = ""
    """Why it is stopped, or ""."""
    stopped: float = 0.0
    """Since when."""
    left: bool = False
    """Whether it has ended with exit code 0."""
    resident: int = 0
    """Bytes of memory that it had when it was last looked at."""


class Watchdog:
    """Watches the ranks of one host through one attempt of a job.

    Args:
        log_dir: where the ranks log, and where `rank_main` reports errors.
        pulses: folder with the pulse of each rank.
        say: receives what the user must know at once, one line at a time.
        coordinator: the hosts of the job, if there are several.
    """

    def __init__(
        self,
        log_dir: Path,
        pulses: Path,
        limits: Timeouts,
        say: Callable[[str], None],
        coordinator: JobCoordinator | None = None,
    ):
        self.log_dir, self.pulses, self.limits, self.say, self.coordinator = log_dir, pulses, limits, say, coordinator
        self.host = coordinator.place if coordinator else platform.node()
        self.group = ControlGroup.of_this_process()
        self.memory_kills = self.group.kills() if self.group else None  # before this attempt
        self.furthest = -1  # step that a rank has come to
        self.ended: dict[int, float] = {}  # ranks that have ended, and when that was seen
        self.tracks: dict[int, _Track] = {}
        # A rank that was named, or waits for one of another host; its `_standing` at that time; since when it stands still.
        self.incident: tuple[int, Any, float] | None = None
        self.overdue: float | None = None  # since when a rank is

    def poll(self, processes: Mapping[int, "Popen[Any]"]) -> RankFailure | None:
        """Look at all ranks of this host, once; say what is new.

        Args:
            processes: by number of the rank.

        Returns:
            Why the job must end, if it must: a rank failed, none has made progress for too long, or another host is lost. The
            rank or host has been named, and the other hosts know.
        """
        codes = {rank: process.poll() for rank, process in processes.items()}
        for rank, process in processes.items():
            self._follow(rank, process.pid)
        places = self.log_dir, self.pulses  # the second where the disk is full
        found = {rank: [read_report(place, rank) for place in places] for rank in codes}
        reports = {rank: next(filter(None, both)) for rank, both in found.items() if any(both)}
        for rank, code in codes.items():
            if code is not None or rank in reports:
                self.ended.setdefault(rank, time.time())
        if self.coordinator and (trouble := self.coordinator.trouble()):
            return self._repeat(trouble)
        failed = {rank for rank, code in codes.items() if code or rank in reports}
        if failed:
            causes = {rank: _cause(codes[rank], reports.get(rank, {})) for rank in self.ended}
            culprit = min(
                causes, key=lambda rank: (causes[rank], reports.get(rank, {}).get("seconds", self.ended[rank]))
            )
            waited = time.time() - min(self.ended[rank] for rank in failed)
            own = causes[culprit] == Cause.OWN
            if not own and len(self.ended) < len(codes) and waited < GRACE_SECONDS:
                return None
            if not own and self.coordinator:
                if not self.coordinator.has_heard(waited):
                    return None
                if words := self.coordinator.last_words():
                    return self._repeat(words)
            return self._report_death(culprit, codes[culprit] or 0, reports.get(culprit, {}), own)
        for rank, code in codes.items():
            self.tracks[rank].left = code == 0
        return self._watch()

    # After a signal

    def unfinished_work(self) -> str:
        """The work that the ranks of this host finish after a signal, in words; "" if no pulse names a step."""
        records = [read_status(self.pulses / str(rank)) for rank in sorted(self.tracks)]
        record = next((record for record in records if record.step is not None), None)
        if record is None:
            return ""
        if record.phase == "step":
            return f"finishing step {record.step}"
        return f"{record.phase} after step {record.step}, then ending"

    def shows_progress(self, processes: Mapping[int, "Popen[Any]"]) -> bool:
        """True if the pulse of a rank that still runs shows progress within the time that the limits allow."""
        for rank, process in processes.items():
            self._follow(rank, process.pid)
        now = time.monotonic()
        living = [self.tracks[rank] for rank, process in processes.items() if process.poll() is None]
        return any(track.record.pid and now - track.active <= self._patience(track) for track in living)

    # Death

    def _repeat(self, failure: FailureRecord) -> RankFailure:
        """Say what another host has said."""
        if failure.line:
            self.say(failure.line)
        return failure.error()

    def _tell(self, failure: RankFailure, own: bool, line: str) -> RankFailure:
        """Say it, here and to the other hosts."""
        if line:
            self.say(line)
        if self.coordinator:
            self.coordinator.report(failure, own, line)
        return failure

    def _report_death(self, rank: int, code: int, report: dict[str, Any], own: bool) -> RankFailure:
        """Name a dead rank, and make the error of the job."""
        code = report.get("exit_code", code)
        for_memory = self._killed_for_memory(rank) if code == -signal.SIGKILL else ""
        by_signal = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        how = for_memory or by_signal or f"left with exit code {code}"
        if code == 0:
            how += " while others were at work"
        line = ""
        if code != REFUSED or not report.get("fields"):
            stack = report.get("traceback", "").rstrip().splitlines()
            reason = f" ({stack[-1]})" if stack else ""
            line = f"rank {rank} on {self.host} {how}{reason}{self._position(rank)}{self._log(rank, report)}"
        if fields := report.get("fields"):
            error = RankFailure(**fields | {"where": fields["where"] or f"rank {rank}", "rank": rank})
            error.exit_code = code
            return self._tell(error, own, line)
        log = self._log_path(rank, report)
        lines = log.read_text(errors="replace").rstrip().splitlines()[-TAIL_LINES:] if log.exists() else []
        place = f" on {self.host}" if self.coordinator else ""
        fix = "if nobody sent it, the kernel did for want of memory: see dmesg" if code == -signal.SIGKILL else None
        error = RankFailure(
            "\n".join([f"rank {rank}{place} {how}", *(f"  | {text}" for text in lines)]),
            rank=rank,
            where=str(log) if log.exists() else "its output is above",
            fix="allow more memory, or use less of it: `weft memory` says what takes how much" if for_memory else fix,
        )
        return self._tell(error, own, line)

    def _killed_for_memory(self, rank: int) -> str:
        """How a rank was killed, if the counters of its control group prove that it was for want of memory."""
        if self.group is None or (self.group.kills() or 0) <= (self.memory_kills or 0):
            return ""
        limit, had = self.group.limit(), self.tracks[rank].resident
        allowed = f"limit {limit / 2**30:.1f} GiB, " if limit else ""
        return f"was killed by the kernel for memory ({allowed}it had {had / 2**30:.1f} GiB)"

    def _log_path(self, rank: int, report: dict[str, Any]) -> Path:
        return self.log_dir / f"rank-{rank}.{'traceback' if report else 'err'}"

    def _log(self, rank: int, report: dict[str, Any]) -> str:
        log = self._log_path(rank, report)
        return f"; log {log}" if log.exists() else ""

    def _position(self, rank: int) -> str:
        """Where a rank is or was, as far as its pulse says."""
        record = self.tracks[rank].record
        if not record.pid:
            return ""
        text = f"; {_phase(record)}"
        if record.collectives:
            text += f", {'inside' if record.inside else 'after'} {record.collective} (collective {record.collectives})"
        if record.heartbeat < record.began:  # the last sample is of the phase before
            return text
        return (
            text
            + (f", in {record.call}" if record.call and not record.inside else "")
            + f", last seen at {record.where}"
        )

    # Standing still

    def _follow(self, rank: int, pid: int) -> None:
        """Read the pulse of a rank and the state of its process."""
        now, record = time.monotonic(), read_status(self.pulses / str(rank))
        track = self.tracks.setdefault(rank, _Track(record, since=now, active=now))
        before, track.record = track.record, record
        self.furthest = max(self.furthest, -1 if record.step is None else record.step)
        if record.began != before.began:
            track.since = record.began
        state = STOPPED.get(process_state(pid), "")
        if state and not track.state:
            track.stopped = now
        track.state = state
        track.resident = resident_bytes(pid) or track.resident
        no_pulse = not record.pid and not state  # a rank without a pulse is watched for its death and for a stop
        if no_pulse or _progress(record) != _progress(before):
            track.active = now

    def _watch(self) -> RankFailure | None:
        """Name a rank that stands still, once; end the job when none has made progress for too long."""
        now = time.monotonic()
        living = [track for track in self.tracks.values() if not track.left]
        self._note_end_of_incident(now)
        if not any(self._is_overdue(track, now) for track in living):
            self.overdue = None
        elif self.overdue is None:
            self.overdue = now
        if self.incident is None and self.overdue is not None:
            self._name_who_stands_still(now)
        if not living or any(now - track.active <= self._patience(track) for track in living):
            return None
        rank, why, waits = find_straggler(self.tracks, now)
        track = self.tracks[rank]
        elsewhere = None
        if waits and self.coordinator:
            elsewhere = self.coordinator.standing()
            if elsewhere is None and not self.coordinator.has_heard(now - track.active - self._patience(track)):
                return None  # the watchdog of another host may know
        text = f"rank {rank} made no progress for {now - track.active:.0f} s in {_phase(track.record)}: {why}"
        error = RankFailure(
            f"no rank of this host made progress for {now - track.active:.0f} s: {elsewhere}" if elsewhere else text,
            rank=None if elsewhere else rank,
            where=f"rank {rank} on {self.host}{self._log(rank, {})}",
            rule=f"a job is ended when no rank has made progress for {self.limits.patience:g} s",
            fix="look at the place that is named; allow more patience if it needs the time: guard.hang_timeout_seconds",
        )
        return self._tell(error, own=elsewhere is None, line="")

    def _name_who_stands_still(self, now: float) -> None:
        rank, why, waits = find_straggler(self.tracks, now)
        track = self.tracks[rank]
        since = track.stopped if track.state else track.since if _has_step_time(track.record) else track.active
        text = f"rank {rank} on {self.host} stands still in {_phase(track.record)} for {now - since:.0f} s: {why}"
        text += self._log(rank, {})
        if self.coordinator and waits:
            if elsewhere := self.coordinator.standing():
                text = elsewhere
            elif self.overdue is not None and not self.coordinator.has_heard(now - self.overdue):
                return  # the watchdog of another host may know, or the host is lost
        elif self.coordinator:
            self.coordinator.say_standing(text)
        self.incident = rank, self._standing(rank), since
        self.say(text)

    def _note_end_of_incident(self, now: float) -> None:
        if self.incident is None:
            return
        rank, before, since = self.incident
        if self._standing(rank) != before:
            self.say(f"rank {rank} goes on after {now - since:.0f} s")
            self.incident = None
            if self.coordinator:
                self.coordinator.say_standing(None)
            for track in self.tracks.values():  # they have lost the same time
                track.since = track.active = now

    def _standing(self, rank: int) -> Any:
        """What is the same as long as a rank stands still, or as long as others wait for one that has left."""
        ranks = list(self.tracks) if self.tracks[rank].left else [rank]
        tracks = [self.tracks[rank] for rank in ranks]
        return [(t.record.began if _has_step_time(t.record) else _progress(t.record), t.state) for t in tracks]

    def _is_overdue(self, track: _Track, now: float) -> bool:
        if track.state and now - track.stopped > self.limits.stopped:
            return True
        if _has_step_time(track.record):
            return now - track.since > max(self.limits.slow, self.limits.slow_steps * track.record.step_seconds)
        return now - track.active > self.limits.other

    def _patience(self, track: _Track) -> float:
        return max(self.limits.patience, self.limits.slow_steps * track.record.step_seconds)


def find_straggler(tracks: Mapping[int, _Track], now: float) -> tuple[int, str, bool]:
    """The rank for which the others wait, why we believe so, and whether it seems to wait itself.

    First a rank that is stopped or whose heartbeat ended, then one whose main thread is not in a collective, then one that
    has left, then the one that has called the fewest collectives.
    """
    living = {rank: track for rank, track in tracks.items() if not track.left}
    waiting = [rank for rank, track in living.items() if track.record.waits_in]
    stopped = [rank for rank, track in living.items() if track.state]
    silent = [rank for rank, track in living.items() if 0 < track.record.heartbeat < now - SILENT_SECONDS]
    busy = [rank for rank, track in living.items() if track.record.pid and not track.record.waits_in]
    left = [rank for rank in tracks if rank not in living]
    suspects = stopped or silent or busy or left or list(tracks)
    rank = min(suspects, key=lambda rank: (tracks[rank].record.collectives, tracks[rank].since))
    record = tracks[rank].record
    at = f" at {record.where}" if record.where else ""
    if stopped:
        why = f"{tracks[rank].state}{at}"
    elif silent:
        why = f"its heartbeat ended {now - record.heartbeat:.0f} s ago{at}, perhaps in native code that holds Python's lock"
    elif busy:
        why = f"its main thread is{at}, not in a collective"
    elif left:
        why = "it left with exit code 0"
    else:
        why = (
            f"all wait, and no rank has called fewer collectives ({record.collectives}): it is in {record.waits_in}{at}"
        )
        return rank, why, True
    others = [other for other in waiting if other != rank]
    if others:
        names = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
        verb = f"rank {names} waits" if len(others) == 1 else f"ranks {names} wait"
        why += f", while {verb} in {tracks[others[0]].record.waits_in} at {tracks[others[0]].record.where}"
    return rank, why, False


def read_report(log_dir: Path, rank: int) -> dict[str, Any]:
    """What `rank_main` wrote of the error of a rank; {} if it wrote nothing."""
    with suppress(FileNotFoundError):
        return json.loads((log_dir / f"rank-{rank}.error").read_text(encoding="utf-8"))
    return {}


def process_state(pid: int) -> str:
    """One letter, as `ps` shows it: R, S, D, T, Z ...; "" where there is no /proc, or no such process."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return os.fsdecode(file.read().rpartition(b")")[2].split()[0])
    return ""


def _cause(code: int | None, report: dict[str, Any]) -> Cause:
    if report:
        return Cause.CONSEQUENCE if any(mark in report["traceback"] for mark in CONSEQUENCES) else Cause.OWN
    own = {0: Cause.LEFT, -signal.SIGTERM: Cause.TERMINATED, -signal.SIGABRT: Cause.ABORT}
    return own.get(code or 0, Cause.OWN)


def _has_step_time(record: RankStatus) -> bool:
    """Whether a rank is in a step, and how long its steps take is known."""
    return record.phase == "step" and record.step_seconds > 0


def _progress(record: RankStatus) -> tuple[Any, ...]:
    """What changes when a rank goes on. In a step, once their time is known, a loop in its code is no progress."""
    return record.began, record.collectives, "" if _has_step_time(record) else record.where


def _phase(record: RankStatus) -> str:
    if record.step is None:
        return record.phase
    return f"step {record.step}" if record.phase == "step" else f"{record.phase} at step {record.step}"
