"""Membership and failure detection for the launchers of a multi-host job.

    store = SocketStore(path)                              # served by host 0; other hosts reach it through a tunnel
    membership = MembershipStore.join(store, host=0, hosts=2, ranks=4)    # waits for all hosts
    first_rank, world_size = membership.layout()
    ...
    membership.report_failure("rank 3 was killed by SIGKILL at step 17")
    for state in membership.host_states(): ...
    membership.announce("attempt 1 has 4 ranks")           # host 0 only: one text that all hosts read
    membership.leave()

Each launcher writes one key, a JSON object with an increasing heartbeat count, and reads the keys of all hosts once a second.
Each host measures the silence of another host with its own clock, so the clocks of hosts need not agree. A host that is gone
may be replaced: host 0 releases its host number, and a launcher that starts later takes that number.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from weft.errors import RendezvousError
from weft.launch.attempt import known_fields
from weft.own_code import package_version

EMPTY = "null"
ANNOUNCEMENT = "announcement"
Status = Literal["alive", "failed", "left", "unreachable"]


@dataclass(frozen=True)
class HostRecord:
    """Record that a host writes into the store. `id` distinguishes launchers with the same host name and process number."""

    id: str
    name: str
    pid: int
    ranks: int
    attempt: int = 0
    """Attempt under way on this host."""
    heartbeats: int = 0
    left: bool = False
    report: str | None = None
    failed_attempt: int = -1
    ready_attempt: int = -1
    """Next attempt that this host can take part in."""
    done_attempt: int = -1
    """Last attempt whose ranks have all exited with code 0 on this host."""
    is_confirmed: bool = False
    """True if this host can run its ranks under the settings that host 0 has published."""
    straggler: str | None = None
    """Description of a stalled rank of this host; None if no rank is stalled, or if ranks only wait for other hosts."""


@dataclass(frozen=True)
class HostState:
    """State of a host as seen by another host.

    `status` is the first of these that applies:

    - "left": the host has left the job.
    - "failed": the host has reported a failure in the observer's attempt, or in a later attempt.
    - "unreachable": no heartbeat of the host was read for longer than the heartbeat timeout.
    - "alive": none of the above.
    """

    host: int
    name: str
    pid: int
    ranks: int
    attempt: int
    status: Status
    report: str | None
    silent_seconds: float
    """Time since a new record of the host was read."""
    max_record_age: float
    """Upper bound of the age of the newest record in seconds: time since the last read that did not contain it yet."""
    gone: bool
    """True if the host has left or is unreachable, even if its status is "failed"."""
    record: HostRecord
    """Newest record of the host."""


class MembershipStore:
    """State of all hosts, as known to this launcher. A daemon thread updates it; `host_states` never blocks on the network."""

    @classmethod
    def join(
        cls,
        store: dist.Store,
        *,
        host: int,
        hosts: int,
        ranks: int,
        timeout: float = 300.0,
        interval: float = 1.0,
        heartbeat_timeout: float = 15.0,
        same_version: bool = True,
        epoch: int = 0,
        announcement: str = EMPTY,
    ) -> "MembershipStore":
        """Register this host and wait for all other hosts. A host that replaces another one during a job does not wait.

        Args:
            store: store used by this class only, the same for all hosts and served by host 0.
            host: number of this host, from 0.
            hosts: number of hosts.
            ranks: number of ranks that this host starts.
            timeout: maximum wait for the other hosts in seconds.
            interval: seconds between heartbeats.
            heartbeat_timeout: seconds without a heartbeat after which a host counts as unreachable.
            same_version: refuse a host with another version of Weft.
            epoch: on host 0, its epoch (see `job_state`); on other hosts, the lowest epoch of a host 0 that they follow.
            announcement: newest announcement of the host 0 that this host 0 replaces.

        Raises:
            RendezvousError: host 0 was replaced by another one, hosts disagree about the number of hosts, the host number is in
                use, or a host does not connect.
        """
        own_version = package_version()
        if host == 0:
            for key in map(_key, range(hosts)):
                store.set(key, EMPTY)
            store.set(ANNOUNCEMENT, announcement)
            store.set("epoch", str(epoch))
            store.set("version", own_version)
            store.set("hosts", str(hosts))  # last: the other hosts wait for it
        try:
            store.wait(["hosts"], timedelta(seconds=timeout))
        except dist.DistError:
            raise RendezvousError(
                f"host 0 did not connect within {timeout:g} s", where=f"host {host}", fix="see the output of host 0"
            ) from None
        if (other := store.get("version").decode()) != own_version and same_version:
            raise RendezvousError(
                f"host 0 has Weft {other}, this host has Weft {own_version}",
                where=f"host {host}",
                rule="all hosts of a job have the same version: results and messages differ between versions",
                fix=f"install weft-train=={other} on this host, or weft-train=={own_version} on host 0",
            )
        if (expected := int(store.get("hosts"))) != hosts or not 0 <= host < hosts:
            raise RendezvousError(
                f"this host was started as host {host} of {hosts}, but host 0 expects {expected} hosts",
                where=f"host {host}",
                rule="all hosts are started with the same number of hosts; host numbers start at 0",
                fix=f"start {expected} hosts with --nnodes {expected} and --node-rank 0 to {expected - 1}",
            )
        if (found := int(store.get("epoch"))) < epoch:
            raise RendezvousError(
                f"the host 0 at this address has epoch {found}, and this host has followed a host 0 of epoch {epoch}",
                where=f"host {host}",
                rule="hosts follow the newest host 0 of their job",
                fix="stop the host 0 that was replaced",
            )
        announcement = store.get(ANNOUNCEMENT).decode()
        membership = cls(store, host, hosts, ranks, interval, heartbeat_timeout, found, announcement)
        try:
            membership._publish()
            membership._wait_for(range(hosts) if announcement == EMPTY else [0], timeout)
        except BaseException:
            membership.leave(timeout=0)
            raise
        return membership

    def __init__(
        self,
        store: dist.Store,
        host: int,
        hosts: int,
        ranks: int,
        interval: float,
        heartbeat_timeout: float,
        epoch: int,
        announcement: str,
    ) -> None:
        """Use `join` instead."""
        self.host, self.epoch = host, epoch
        self._store, self._interval, self.heartbeat_timeout = store, interval, heartbeat_timeout
        self._keys = [_key(index) for index in range(hosts)]
        self._own_record = HostRecord(secrets.token_hex(8), socket.gethostname(), os.getpid(), ranks)
        self._own_text = json.dumps(asdict(self._own_record))  # value of this host's key in the store
        if (current := store.compare_set(_key(host), EMPTY, self._own_text).decode()) != self._own_text:
            other = json.loads(current)
            raise RendezvousError(
                f"host number {host} is in use by {other['name']} (process {other['pid']})",
                where=f"host {host}",
                rule="each host has a different number",
                fix="give each host a different --node-rank, and stop processes left by an earlier start",
            )
        self._records: list[HostRecord | None] = [None] * hosts
        self._read_at = [time.monotonic()] * hosts
        self._written_after, self._last_read = list(self._read_at), time.monotonic()
        self._texts = [EMPTY] * hosts
        self._announcement = self._written_announcement = announcement
        self._released: dict[int, str] = {}
        self._version = self._published_version = 0
        self._lost = self._stopped = False
        self._changed = threading.Condition()  # guards all attributes above
        self._thread = threading.Thread(target=self._run, name="MembershipStore", daemon=True)
        self._thread.start()

    def _wait_for(self, hosts: Sequence[int], timeout: float) -> None:
        def missing() -> list[int]:
            return [host for host in hosts if not self._records[host]]

        def gone() -> dict[int, str]:
            descriptions = {"left": "has left", "unreachable": "is unreachable"}
            states = [state for state in self._states() if state.host in hosts]
            return {state.host: descriptions[state.status] for state in states if state.status in descriptions}

        with self._changed:
            self._wait(lambda: self._lost or not missing() or bool(gone()), timeout)
            late = dict.fromkeys(missing(), f"did not connect within {timeout:g} s")
            lost = dict.fromkeys(missing(), "is unreachable") if self._lost else gone()
        if late:
            texts = [f"host {host} {description}" for host, description in (lost or late).items()]
            raise RendezvousError(
                f"the job cannot start: {', '.join(texts)}",
                where=f"host {self.host}",
                rule="a job starts when all of its hosts have connected",
                fix="start all hosts; see the output of the missing hosts, and check the network between the hosts",
            )

    def layout(self) -> tuple[int, int]:
        """First rank of this host, and total number of ranks. Ranks are numbered host by host."""
        ranks = [state.ranks for state in self.host_states()]
        return sum(ranks[: self.host]), sum(ranks)

    def report_failure(self, text: str) -> None:
        """Report a failure of this host in the current attempt to all hosts. Returns when the report is in the store."""
        self._publish(report=text, failed_attempt=self._own_record.attempt)

    def update(self, **changes: Any) -> None:
        """Change fields of this host's `HostRecord`. Returns at once; the thread publishes the change."""
        with self._changed:
            self._change(changes)

    def announce(self, text: str) -> None:
        """Replace the announcement that all hosts read; host 0 only. Returns when the announcement is in the store."""
        with self._changed:
            self._announcement = text
        self._publish()

    def announcement(self) -> str | None:
        """Newest announcement of host 0."""
        with self._changed:
            return None if self._announcement == EMPTY else self._announcement

    def release(self, host: int) -> None:
        """Allow another launcher to take the number of a host that is gone; host 0 only."""
        with self._changed:
            self._released[host] = self._texts[host]
            self._change({})

    def host_states(self) -> list[HostState]:
        """States of all known hosts by host number, as of the last heartbeats."""
        with self._changed:
            return self._states()

    def leave(self, timeout: float = 30.0) -> None:
        """Leave the job. Host 0, which serves the store, first waits up to `timeout` seconds until all other hosts are gone.

        A second call does nothing.
        """
        if self._stopped:
            return
        self._publish(left=True)
        with self._changed:
            if self.host == 0:
                gone = ("left", "unreachable")
                self._wait(lambda: all(state.status in gone for state in self._states()), timeout)
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(self._interval)  # bounded: a call to an unreachable store may block the thread

    def _publish(self, **changes: Any) -> None:
        """Change the record of this host, and wait until it is in the store or the store is lost."""
        with self._changed:
            own_version = self._change(changes)
            self._wait(lambda: self._lost or self._published_version >= own_version, self.heartbeat_timeout)

    def _change(self, changes: dict[str, Any]) -> int:
        """Change the record of this host and return its new version. The caller holds the lock."""
        self._own_record = replace(self._own_record, **changes)
        self._version += 1
        self._changed.notify_all()
        return self._version

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait for a condition, up to `timeout` seconds. The caller holds the lock."""
        end = time.monotonic() + timeout
        while not condition() and (left := end - time.monotonic()) > 0:
            self._changed.wait(min(left, self._interval))  # no notification comes when a host falls silent

    def _states(self) -> list[HostState]:
        return [self._state(host, record) for host, record in enumerate(self._records) if record]

    def _state(self, host: int, record: HostRecord) -> HostState:
        silent = 0.0 if host == self.host else time.monotonic() - self._read_at[host]
        failed = record.failed_attempt >= self._own_record.attempt
        silent_too_long = host != self.host and (self._lost or silent > self.heartbeat_timeout)
        status: Status = "alive"
        if record.left:
            status = "left"
        elif failed:
            status = "failed"
        elif silent_too_long:
            status = "unreachable"
        return HostState(
            host,
            record.name,
            record.pid,
            record.ranks,
            record.attempt,
            status,
            report=record.report if failed else None,
            silent_seconds=silent,
            max_record_age=0.0 if host == self.host else time.monotonic() - self._written_after[host],
            gone=record.left or silent_too_long,
            record=record,
        )

    def _run(self) -> None:
        """Main function of the thread. Marks the store as lost when the thread ends for any reason."""
        try:
            self._exchange_until_stopped()
        finally:
            self._mark_lost()

    def _exchange_until_stopped(self) -> None:
        """Exchange records once per interval. Only this thread uses the store, whose calls may block."""
        while not self._stopped:
            with self._changed:
                self._own_record = replace(self._own_record, heartbeats=self._own_record.heartbeats + 1)
                own_version, text, announcement = (
                    self._version,
                    json.dumps(asdict(self._own_record)),
                    self._announcement,
                )
                released, self._released = self._released, {}
            read_start = time.monotonic()
            try:
                texts, announcement = self._exchange(text, announcement, released)
            except (dist.DistError, _Replaced):
                return
            with self._changed:
                for host, other in enumerate(texts):
                    if other == EMPTY != self._texts[host]:  # host 0 has seen its loss, this host perhaps not yet
                        self._read_at[host] = min(self._read_at[host], time.monotonic() - self.heartbeat_timeout)
                    elif other != self._texts[host]:
                        self._records[host] = HostRecord(**known_fields(HostRecord, json.loads(other)))
                        self._read_at[host], self._written_after[host] = time.monotonic(), self._last_read
                    self._texts[host] = other
                self._last_read = read_start
                if self.host:
                    self._announcement = announcement
                self._published_version = own_version
                self._changed.notify_all()
                self._wait(lambda: self._stopped or self._version > self._published_version, self._interval)

    def _mark_lost(self) -> None:
        """Mark all other hosts as unreachable: no record of another host will be read again."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _exchange(self, text: str, announcement: str, released: dict[int, str]) -> tuple[list[str], str]:
        """Write the record of this host, and read the records of all hosts and the announcement."""
        current = self._store.compare_set(self._keys[self.host], self._own_text, text).decode()
        if current != text:
            raise _Replaced
        self._own_text = text
        for host, last_text in released.items():
            self._store.compare_set(self._keys[host], last_text, EMPTY)
        if self.host == 0 and announcement != self._written_announcement:
            self._store.set(ANNOUNCEMENT, announcement)
            self._written_announcement = announcement
        *texts, announcement = (value.decode() for value in self._store.multi_get([*self._keys, ANNOUNCEMENT]))
        return texts, announcement


class _Replaced(Exception):
    """Another launcher has taken the number of this host."""


def _key(host: int) -> str:
    return f"host-{host}"
