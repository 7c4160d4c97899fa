"""Messages between the launchers of a job: settings, failures, lost hosts and stragglers. Base of `JobCoordinator`."""

import json
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from weft.errors import RankFailure, RendezvousError, WeftError
from weft.launch.attempt import AttemptSpec, FailureRecord, known_fields
from weft.launch.host_record import HostRecord, HostState
from weft.launch.membership import MembershipStore

REPORT_SECONDS = 2.0  # for the report of another host, when only a consequence is seen on this host
POLL_SECONDS = 0.1
MAX_RESTARTS = "max_restarts"  # key of the published settings
TELLING_HOSTS = 8
"""In a job of more hosts, a failure is printed by the host on which it happened, and by host 0, and not by all others."""


class HostZeroLost(RankFailure):
    """Host 0 was lost before the job ended. It may be replaced: see `follow_host_0`."""


class JobEnded(RendezvousError):
    """The job ended in order while this host waited for its next attempt."""


class HostReports:
    """Announcements of host 0, and reports of the hosts of the current attempt to each other; for the watchdog.

    Args:
        membership: state of all hosts.
        host: number of this host.
        hosts: number of hosts.
    """

    def __init__(self, membership: MembershipStore, host: int, hosts: int):
        self.membership, self.host = membership, host
        self.tells = host == 0 or hosts <= TELLING_HOSTS
        """True if this host prints what happens on other hosts."""
        self.host_label = f"host {host} ({socket.gethostname()})"
        self._spec = AttemptSpec()  # current attempt of this host

    def publish_config(self, config: dict[str, str]) -> None:
        """Send settings to the other hosts before the first attempt, besides earlier ones; host 0 only."""
        self._announce(replace(self._spec, config=self._spec.config | config))

    def wait_for_config(self, key: str = "") -> dict[str, str]:
        """Wait for the settings that host 0 publishes. Without a timeout: host 0 may first have to prepare the data.

        Args:
            key: setting to wait for; "": any.

        Raises:
            WeftError: host 0 has ended or is unreachable.
        """
        while not (config := self._read().config) or (key and key not in config):
            self._check_host_0()
            time.sleep(POLL_SECONDS)
        return config

    def restarts_allowed(self) -> bool:
        """True if host 0 has published that a failed job restarts."""
        return self._read().config.get(MAX_RESTARTS, "0") != "0"

    def confirm_settings(self) -> None:
        """Tell host 0 that this host can run its ranks under the settings that host 0 has published."""
        self.membership.update(is_confirmed=True)

    def wait_for_confirmations(self) -> None:
        """Wait until all other hosts have confirmed the settings; host 0 only.

        Raises:
            RankFailure: the reason for which another host ended.
            RendezvousError: another host ended without a reason.
        """
        self._wait_before_start(lambda record: record.is_confirmed)

    def _wait_before_start(self, is_done: Callable[[HostRecord], bool]) -> None:
        """Wait for all other hosts before the first attempt; raise the reason for which one ended."""
        while waiting := [s for s in self.membership.host_states() if s.host and not is_done(s.record)]:
            for state in waiting:
                if state.report:
                    raise self.to_error(FailureRecord.from_json(state.report))
                if state.gone:
                    raise RendezvousError(
                        f"{label_of(state)} ended before the job started", where="host 0", fix="see its output"
                    )
            time.sleep(POLL_SECONDS)

    def report_failure(self, failure: WeftError, is_cause: bool, log_line: str) -> None:
        """Report a failure of this host to the other hosts, before the ranks of this host are ended.

        Args:
            is_cause: True if the root cause is on this host.
            log_line: line that this host has logged.
        """
        self.membership.report_failure(json.dumps(asdict(FailureRecord.from_error(failure, is_cause, log_line))))

    def to_error(self, failure: FailureRecord) -> RankFailure:
        """Error of this host for a failure on another one."""
        error = failure.to_error()
        error.is_told = not self.tells
        return error

    def remote_failure(self) -> FailureRecord | None:
        """Root cause reported by another host, or the loss of another host, if there is one."""
        others = self._others()
        causes = [failure for failure in _reports(others) if failure.is_cause]
        lost = [self._loss(state) for state in others if state.status == "unreachable"]
        return next(iter(causes + lost), None)

    def reports_are_complete(self, seconds: float) -> bool:
        """True if each other host has had time to report what happened `seconds` ago.

        The record of a host that was lost around that time may be older than the time at which it was read: its age counts from
        the time at which it was written.
        """
        ages = [state.max_record_age for state in self._others() if not state.gone]
        return seconds > max([REPORT_SECONDS, *ages])

    def fallback_failure(self) -> FailureRecord | None:
        """Common failure of all hosts when every host sees only consequences; None if it is the failure of this host."""
        others = self._others()
        left = [self._loss(state) for state in others if state.status == "left"]
        return next(iter(left + _reports(state for state in others if state.host < self.host)), None)

    def report_straggler(self, text: str | None) -> None:
        """Report a rank of this host that is stalled and does not only wait for other hosts; None withdraws the report."""
        self.membership.update(straggler=text)

    def remote_straggler(self) -> str | None:
        """Description of a stalled rank on another host, if there is one."""
        return next((state.record.straggler for state in self._others() if state.record.straggler), None)

    def _others(self) -> list[HostState]:
        """States of the other hosts of the current attempt."""
        states = self.membership.host_states()
        return [state for state in states if state.host in self._spec.members and state.host != self.host]

    def host_of(self, rank: int | None) -> int | None:
        """Host of a rank of the current attempt."""
        return next((host for host, ranks in self._spec.rank_ranges.items() if rank in ranks), None)

    def _read(self) -> AttemptSpec:
        text = self.membership.announcement()
        return AttemptSpec.from_json(text) if text else AttemptSpec()

    def _announce(self, spec: AttemptSpec) -> None:
        self._spec = spec
        self.membership.announce(json.dumps(asdict(spec)))

    def _check_host_0(self, cause: RankFailure | None = None) -> None:
        """Raise if the job or host 0 has ended."""
        host_0 = self.membership.host_states()[0]
        spec = self._read()  # after the state: host 0 leaves after its last announcement
        if spec.ended and spec.failure:
            raise self.to_error(FailureRecord(**known_fields(FailureRecord, spec.failure)))
        if host_0.gone and not spec.ended:
            loss = self._loss(host_0)
            raise HostZeroLost(loss.what, where=loss.where, rule=loss.rule, fix=loss.fix)
        if spec.ended:
            raise cause or JobEnded(
                f"{label_of(host_0)} ended while this host waited for its next attempt",
                where=self.host_label,
                fix="see its output",
            )

    def _loss(self, state: HostState) -> FailureRecord:
        """Failure for a host that is gone without a report."""
        label, ranks = label_of(state), ", ".join(map(str, self._spec.rank_ranges.get(state.host, ())))
        reason = f"no heartbeat for {state.silent_seconds:.0f} s"
        if state.silent_seconds < self.membership.heartbeat_timeout:
            reason = "its connection has ended"
        text = f"{label} has left" if state.record.left else f"{label} is unreachable: {reason}"
        text += f"; its rank{'s' if ',' in ranks else ''} {ranks} did not report a crash" if ranks else ""
        fix = "see its output, and check its power and the network between the hosts"
        if state.host == 0:
            fix += "; a job cannot continue without host 0: start all hosts, host 0 too, with --resume auto"
        return FailureRecord(text, where=f"seen from {self.host_label}", rule=None, fix=fix, log_line=text)


def _reports(states: Iterable[HostState]) -> list[FailureRecord]:
    """Failure reports of hosts."""
    return [FailureRecord.from_json(state.report) for state in states if state.report]


def label_of(state: HostState) -> str:
    """Number and name of a host, for messages."""
    return f"host {state.host} ({state.name})"
