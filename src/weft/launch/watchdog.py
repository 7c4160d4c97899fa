"""Root-cause detection for dead or hung ranks of a host.

    watchdog = Watchdog(log_dir, heartbeat_dir, Timeouts(), log)      # in the launcher
    failure = watchdog.poll(processes)                                # about ten times a second

A rank that dies takes the other ranks with it, and all ranks wait for a rank that is stalled. The errors of the other ranks are
then only consequences. The watchdog finds the cause from the exit codes, error reports and heartbeats of all ranks of this
host, and from the reports of the watchdogs on other hosts.
"""

import json
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from weft.errors import RankFailure
from weft.launch.attempt import FailureRecord
from weft.launch.causes import Cause, describe_signal, find_cause
from weft.launch.oom_kills import ControlGroup, resident_bytes
from weft.launch.rank_status import RankStatus, read_status
from weft.launch.straggler import RankTrack, find_straggler

if TYPE_CHECKING:  # it imports torch, which the watchdog of a node does without
    from weft.launch.coordinator import JobCoordinator

TAIL_LINES = 12
GRACE_SECONDS = 0.5  # time for the cause to appear after a consequence
STOPPED = {"T": "stopped by a signal", "t": "held by a debugger"}  # states of /proc/PID/stat
REFUSED = 2  # exit code of refused input: not a failure of the job


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the watchdog in seconds."""

    stopped: float = 5.0
    """Report a rank that a signal or a debugger has stopped."""
    slow_step: float = 10.0
    """Report a rank that is still in its step; the minimum for this case."""
    slow_step_factor: float = 3.0
    """Report a rank that is still in its step after this many median step times, if this is longer than `slow_step`."""
    other: float = 600.0
    """Report a rank without progress in one of its first two steps, or in a phase that is not a step."""
    hang: float = 600.0
    """End the job when no rank has made progress. Must be shorter than the timeout of process groups."""


class Watchdog:
    """Monitor of the ranks of one host during one attempt of a job.

    Args:
        log_dir: directory of the ranks' logs and of the error reports of `rank_main`.
        heartbeat_dir: directory with the heartbeat file of each rank.
        log: prints messages for the user, one line per call.
        coordinator: connection to the other hosts of the job, if there are several.
        sees_all_ranks: False if the job has ranks on other hosts whose watchdogs send no reports.
    """

    def __init__(
        self,
        log_dir: Path,
        heartbeat_dir: Path,
        timeouts: Timeouts,
        log: Callable[[str], None],
        coordinator: "JobCoordinator | None" = None,
        sees_all_ranks: bool = True,
    ):
        self.log_dir, self.heartbeat_dir, self.timeouts, self.log = log_dir, heartbeat_dir, timeouts, log
        self.coordinator, self.sees_all_ranks = coordinator, sees_all_ranks
        self.report_dirs = (log_dir, heartbeat_dir)  # ranks report to the second one when the disk is full
        self.host = coordinator.host_label if coordinator else platform.node()
        self.cgroup = ControlGroup.of_this_process()
        self.oom_kills = self.cgroup.kills() if self.cgroup else None  # before this attempt
        self.furthest_step = -1  # over all ranks
        self.ended_at: dict[int, float] = {}  # time at which a rank was first seen to have ended
        self.tracks: dict[int, RankTrack] = {}
        # The straggler that was reported, or a rank that waits for a straggler on another host: the rank, its progress marker
        # at that time, the time since when it is stalled, and True if only other hosts print it.
        self.incident: tuple[int, Any, float, bool] | None = None
        self.overdue_since: float | None = None

    def poll(self, processes: Mapping[int, "Popen[Any]"]) -> RankFailure | None:
        """Check all ranks of this host once and report changes.

        Args:
            processes: process of each rank, by global rank.

        Returns:
            The failure that ends the job, if any: a rank failed, no rank has made progress for too long, or another host is
            lost. The failure has then been logged and reported to the other hosts.
        """
        codes = {rank: process.poll() for rank, process in processes.items()}
        for rank, process in processes.items():
            self._update(rank, process.pid)
        found = {rank: [read_report(folder, rank) for folder in self.report_dirs] for rank in codes}
        reports = {rank: next(filter(None, both)) for rank, both in found.items() if any(both)}
        for rank, code in codes.items():
            if code is not None or rank in reports:
                self.ended_at.setdefault(rank, time.time())
        if self.coordinator and (remote := self.coordinator.remote_failure()):
            return self._adopt(remote)
        if any(code or rank in reports for rank, code in codes.items()):
            return self._blame_dead(codes, reports)
        for rank, code in codes.items():
            self.tracks[rank].exited = code == 0
        return self._check_progress()

    def _blame_dead(self, codes: dict[int, int | None], reports: dict[int, dict[str, Any]]) -> RankFailure | None:
        """Failure of the rank whose end explains that of the others; None while an earlier cause may still be reported.

        Args:
            codes: exit code of each rank of this host; None while it runs.
            reports: reports of the ranks that wrote why they failed.
        """
        causes = {rank: find_cause(codes[rank], reports.get(rank, {})) for rank in self.ended_at}
        culprit = min(
            causes, key=lambda rank: (causes[rank], reports.get(rank, {}).get("seconds", self.ended_at[rank]))
        )
        waited = time.time() - min(self.ended_at[rank] for rank, code in codes.items() if code or rank in reports)
        is_cause = causes[culprit] == Cause.OWN
        if not is_cause and len(self.ended_at) < len(codes) and waited < GRACE_SECONDS:
            return None
        if not is_cause and self.coordinator:
            if not self.coordinator.reports_are_complete(waited):
                return None
            if fallback := self.coordinator.fallback_failure():
                return self._adopt(fallback)
        return self._report_death(culprit, codes[culprit] or 0, reports.get(culprit, {}), is_cause)

    # After a signal

    def unfinished_work(self) -> str:
        """Description of the work that the ranks of this host finish after a signal; "" if no heartbeat names a step."""
        records = [read_status(self.heartbeat_dir / str(rank)) for rank in sorted(self.tracks)]
        status = next((status for status in records if status.step is not None), None)
        if status is None:
            return ""
        if status.phase == "step":
            return f"finishing step {status.step}"
        return f"{status.phase} after step {status.step}, then ending"

    def shows_progress(self, processes: Mapping[int, "Popen[Any]"]) -> bool:
        """True if a running rank has made progress within the hang timeout, according to its heartbeat."""
        for rank, process in processes.items():
            self._update(rank, process.pid)
        now = time.monotonic()
        running = [self.tracks[rank] for rank, process in processes.items() if process.poll() is None]
        return any(track.status.pid and now - track.last_progress <= self._hang_seconds(track) for track in running)

    # Dead ranks

    def _adopt(self, failure: FailureRecord) -> RankFailure:
        """Log the failure of another host, and return it as the failure of this host."""
        assert self.coordinator is not None
        if failure.log_line and self.coordinator.tells:
            self.log(failure.log_line)
        return self.coordinator.to_error(failure)

    def _report(self, failure: RankFailure, is_cause: bool, log_line: str) -> RankFailure:
        """Log a failure of this host and report it to the other hosts."""
        if log_line:
            self.log(log_line)
        if self.coordinator:
            self.coordinator.report_failure(failure, is_cause, log_line)
        return failure

    def _report_death(self, rank: int, code: int, report: dict[str, Any], is_cause: bool) -> RankFailure:
        """Report a dead rank and return the error of the job."""
        code = report.get("exit_code", code)
        by_oom = self._describe_oom_kill(rank) if code == -signal.SIGKILL else ""
        by_signal = describe_signal(code) if code < 0 else ""
        description = by_oom or by_signal or f"exited with code {code}"
        if code == 0:
            description += " while other ranks were still running"
        log_line = ""
        if code != REFUSED or not report.get("fields"):
            stack = report.get("traceback", "").rstrip().splitlines()
            reason = f" ({stack[-1]})" if stack else ""
            position, log_reference = self._last_position(rank), self._log_reference(rank, report)
            log_line = f"rank {rank} on {self.host} {description}{reason}{position}{log_reference}"
        if not is_cause and not self.sees_all_ranks:
            error = RankFailure(
                f"no rank on {self.host} failed first: the ranks lost a rank on another host, or their launcher ended them",
                where=log_line or f"rank {rank} on {self.host} {description}",
                rule="a rank that lost its peer, or that SIGTERM ended, is not the cause of a failure",
                fix="see the output of the other hosts and of the launcher",
            )
            return self._report(error, is_cause, "")
        if fields := report.get("fields"):
            error = RankFailure(**fields | {"where": fields["where"] or f"rank {rank}", "rank": rank})
            error.exit_code = code
            return self._report(error, is_cause, log_line)
        log = self._log_path(rank, report)
        lines, nothing = _read_tail(log), f"rank {rank} on {self.host}, which wrote nothing to stderr"
        on_host = f" on {self.host}" if self.coordinator or not self.sees_all_ranks else ""
        fix = "if nobody sent this signal, the kernel was out of memory: see dmesg" if code == -signal.SIGKILL else None
        error = RankFailure(
            "\n".join([f"rank {rank}{on_host} {description}", *(f"  | {text}" for text in lines)]),
            rank=rank,
            where=str(log) if lines else nothing if os.path.exists(log) else "see its output above",
            fix="raise the memory limit or use less memory: `weft memory` shows the largest parts" if by_oom else fix,
        )
        return self._report(error, is_cause, log_line)

    def _describe_oom_kill(self, rank: int) -> str:
        """Description of an out-of-memory kill, if the counters of the control group prove one; else ""."""
        if self.cgroup is None or (self.cgroup.kills() or 0) <= (self.oom_kills or 0):
            return ""
        limit, resident = self.cgroup.limit(), self.tracks[rank].resident
        limit_text = f"limit {limit / 2**30:.1f} GiB, " if limit else ""
        return f"was killed by the kernel: out of memory ({limit_text}resident {resident / 2**30:.1f} GiB)"

    def _log_path(self, rank: int, report: dict[str, Any]) -> Path:
        return self.log_dir / f"rank-{rank}.{'traceback' if report else 'err'}"

    def _log_reference(self, rank: int, report: dict[str, Any]) -> str:
        log = self._log_path(rank, report)
        return f"; log {log}" if os.path.exists(log) and os.path.getsize(log) else ""

    def _last_position(self, rank: int) -> str:
        """Phase, collective and location of a rank, as far as its heartbeat contains them."""
        status = self.tracks[rank].status
        if not status.pid:
            return ""
        text = f"; {_phase(status)}"
        if status.collectives:
            relation = "inside" if status.in_collective else "after"
            text += f", {relation} {status.last_collective} (collective {status.collectives})"
        if status.sampled_at < status.phase_start:  # the last sample belongs to the previous phase
            return text
        return (
            text
            + (f", in {status.communication}" if status.communication and not status.in_collective else "")
            + f", last seen at {status.location}"
        )

    # Stalled ranks

    def _update(self, rank: int, pid: int) -> None:
        """Update the track of a rank from its heartbeat and its process state."""
        now, status = time.monotonic(), read_status(self.heartbeat_dir / str(rank))
        track = self.tracks.setdefault(rank, RankTrack(status, phase_start=now, last_progress=now))
        before, track.status = track.status, status
        self.furthest_step = max(self.furthest_step, -1 if status.step is None else status.step)
        if status.phase_start != before.phase_start:
            track.phase_start = status.phase_start
        stop_reason = STOPPED.get(process_state(pid), "")
        if stop_reason and not track.stop_reason:
            track.stopped_at = now
        track.stop_reason = stop_reason
        track.resident = resident_bytes(pid) or track.resident
        # A rank without a heartbeat is monitored only for its end and for a stop.
        no_heartbeat = not status.pid and not stop_reason
        if no_heartbeat or _progress(status) != _progress(before):
            track.last_progress = now

    def _check_progress(self) -> RankFailure | None:
        """Report a stalled rank once; return a failure when no rank has made progress within the hang timeout."""
        now = time.monotonic()
        running = [track for track in self.tracks.values() if not track.exited]
        self._check_incident_over(now)
        if not any(self._is_overdue(track, now) for track in running):
            self.overdue_since = None
        elif self.overdue_since is None:
            self.overdue_since = now
        if self.incident is None and self.overdue_since is not None:
            self._report_straggler(now)
        if not running or any(now - track.last_progress <= self._hang_seconds(track) for track in running):
            return None
        rank, reason, waits = find_straggler(self.tracks, now)
        track = self.tracks[rank]
        remote = None
        if waits and self.coordinator:
            remote = self.coordinator.remote_straggler()
            hanging = now - track.last_progress - self._hang_seconds(track)
            if remote is None and not self.coordinator.reports_are_complete(hanging):
                return None  # the watchdog of another host may know the straggler
        seconds = f"{now - track.last_progress:.0f} s"
        text = f"rank {rank} made no progress for {seconds} in {_phase(track.status)}: {reason}"
        if waits and not self.sees_all_ranks:
            text = (
                f"no rank on {self.host} made progress for {seconds}: all wait, most likely for a rank on another host"
            )
        error = RankFailure(
            f"no rank of this host made progress for {seconds}: {remote}" if remote else text,
            rank=None if remote else rank,
            where=f"rank {rank} on {self.host}{self._log_reference(rank, {})}",
            rule=f"a job ends when no rank has made progress for {self.timeouts.hang:g} s",
            fix="see the code at the location above; if it needs more time, raise guard.hang_timeout_seconds",
        )
        return self._report(error, is_cause=remote is None, log_line="")

    def _report_straggler(self, now: float) -> None:
        rank, reason, waits = find_straggler(self.tracks, now)
        track = self.tracks[rank]
        phase_start = track.phase_start if _has_step_time(track.status) else track.last_progress
        since = track.stopped_at if track.stop_reason else phase_start
        text = (
            f"rank {rank} on {self.host} has been stalled in {_phase(track.status)} for {now - since:.0f} s: {reason}"
        )
        text += self._log_reference(rank, {})
        is_told = False
        if waits and not self.sees_all_ranks:
            text = f"the ranks on {self.host} have waited in {_phase(track.status)} for {now - since:.0f} s"
            text += ", most likely for a rank on another host"
        elif self.coordinator and waits:
            if remote := self.coordinator.remote_straggler():
                text, is_told = remote, not self.coordinator.tells
            elif self.overdue_since is not None and not self.coordinator.reports_are_complete(now - self.overdue_since):
                return  # the watchdog of another host may know the straggler, or that host is lost
        elif self.coordinator:
            self.coordinator.report_straggler(text)
        self.incident = rank, self._progress_marker(rank), since, is_told
        if not is_told:
            self.log(text)

    def _check_incident_over(self, now: float) -> None:
        if self.incident is None:
            return
        rank, before, since, is_told = self.incident
        if self._progress_marker(rank) != before:
            if not is_told:
                self.log(f"rank {rank} continues after {now - since:.0f} s")
            self.incident = None
            if self.coordinator:
                self.coordinator.report_straggler(None)
            for track in self.tracks.values():  # all ranks have lost the same time
                track.phase_start = track.last_progress = now

    def _progress_marker(self, rank: int) -> Any:
        """Value that is constant as long as a rank is stalled, or as long as other ranks wait for a rank that has exited."""
        ranks = list(self.tracks) if self.tracks[rank].exited else [rank]
        tracks = [self.tracks[rank] for rank in ranks]
        return [
            (t.status.phase_start if _has_step_time(t.status) else _progress(t.status), t.stop_reason) for t in tracks
        ]

    def _is_overdue(self, track: RankTrack, now: float) -> bool:
        if track.stop_reason and now - track.stopped_at > self.timeouts.stopped:
            return True
        if _has_step_time(track.status):
            slow_seconds = self.timeouts.slow_step_factor * track.status.step_seconds
            return now - track.phase_start > max(self.timeouts.slow_step, slow_seconds)
        return now - track.last_progress > self.timeouts.other

    def _hang_seconds(self, track: RankTrack) -> float:
        return max(self.timeouts.hang, self.timeouts.slow_step_factor * track.status.step_seconds)


def read_report(log_dir: Path, rank: int) -> dict[str, Any]:
    """Read the error report that `rank_main` wrote for a rank; {} if there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        return json.loads((log_dir / f"rank-{rank}.error").read_text(encoding="utf-8"))
    return {}


def _read_tail(log: Path) -> list[str]:
    """Last lines of a log; a line that says why it cannot be read."""
    try:
        return log.read_text(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{log} cannot be read: {error.strerror}"]


def process_state(pid: int) -> str:
    """State letter of a process, as printed by `ps`: R, S, D, T, Z ...; "" without /proc or without such a process."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return os.fsdecode(file.read().rpartition(b")")[2].split()[0])
    return ""


def _has_step_time(status: RankStatus) -> bool:
    """True if a rank is in a step and its median step time is known."""
    return status.phase == "step" and status.step_seconds > 0


def _progress(status: RankStatus) -> tuple[Any, ...]:
    """Value that changes when a rank makes progress.

    In a step whose usual duration is known, the location does not count: a loop within the step is no progress.
    """
    return status.phase_start, status.collectives, status.issued, "" if _has_step_time(status) else status.location


def _phase(status: RankStatus) -> str:
    if status.step is None:
        return status.phase
    return f"step {status.step}" if status.phase == "step" else f"{status.phase} at step {status.step}"
