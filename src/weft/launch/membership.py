"""Membership and failure detection for the launchers of a multi-host job.

    store = SocketStore(path)                              # served by host 0; other hosts reach it through a tunnel
    membership = MembershipStore.join(store, host=0, hosts=2, ranks=4)    # waits for all hosts
    membership.report_failure("rank 3 was killed by SIGKILL at step 17")
    for state in membership.host_states(): ...
    membership.announce("attempt 1 has 4 ranks")           # host 0 only: one text that all hosts read
    membership.leave()

Each launcher writes one key, a JSON object, when it changes, and waits for changes of the others in one request a second. The
request is its heartbeat: the store of host 0 tells which hosts are silent, by its own clock, so the clocks of hosts need not
agree. Hosts of a large job ask more rarely, and hear of changes as soon. A host that is gone may be replaced: host 0 releases
its host number, and a launcher that starts later takes that number.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.errors import RendezvousError
from weft.launch.attempt import known_fields
from weft.launch.host_record import HostRecord, HostState, Status
from weft.launch.store import SocketStore
from weft.own_code import package_version

EMPTY = "null"
ANNOUNCEMENT = "announcement"
LAST_CALL_SECONDS = 30.0
"""Time in which further hosts may start with the least number of hosts, as in torchrun."""
HOSTS_PER_SECOND = 256  # heartbeats that host 0 answers with a few per cent of a core
STATES_PER_SECOND = 2560  # that a launcher computes without news: its watchdog looks ten times a second


class MembershipStore:
    """State of all hosts, as known to this launcher. A daemon thread updates it; `host_states` never blocks on the network."""

    @classmethod
    def join(
        cls,
        store: SocketStore,
        *,
        host: int,
        hosts: int,
        ranks: int,
        min_hosts: int = 0,
        timeout: float = 300.0,
        last_call: float = LAST_CALL_SECONDS,
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
            hosts: number of hosts, at most.
            ranks: number of ranks that this host starts.
            min_hosts: number of hosts that start the job; 0: all. Then the others have `last_call` seconds to start with them.
            timeout: maximum wait for the other hosts in seconds.
            interval: seconds between heartbeats, or hosts / 256 if that is longer.
            heartbeat_timeout: seconds without a heartbeat after which a host counts as unreachable.
            same_version: refuse a host with another version of Weft.
            epoch: on host 0, its epoch (see `job_state`); on other hosts, the lowest epoch of a host 0 that they follow.
            announcement: newest announcement of the host 0 that this host 0 replaces.

        Raises:
            RendezvousError: host 0 was replaced by another one, hosts disagree about the number of hosts, the host number is in
                use, or a host does not connect.
        """
        own_version, wanted = package_version(), f"{min_hosts}:{hosts}" if min_hosts else str(hosts)
        if host == 0:
            for key in map(_key, range(hosts)):
                store.set(key, EMPTY)
            store.set(ANNOUNCEMENT, announcement)
            store.set("epoch", str(epoch))
            store.set("version", own_version)
            store.set("hosts", wanted)  # last: the other hosts wait for it
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
        if (expected := store.get("hosts").decode()) != wanted or not 0 <= host < hosts:
            raise RendezvousError(
                f"this host was started as host {host} of {wanted}, but host 0 expects {expected} hosts",
                where=f"host {host}",
                rule="all hosts are started with the same number of hosts; host numbers start at 0",
                fix=f"start each host with --nnodes {expected}, and --node-rank from 0",
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
            if host == 0 and min_hosts and announcement == EMPTY:
                membership._wait_for_some(min_hosts, timeout, last_call)
            else:
                membership._wait_for([0] if min_hosts or announcement != EMPTY else range(hosts), timeout)
        except BaseException:
            membership.leave(timeout=0)
            raise
        return membership

    def __init__(
        self,
        store: SocketStore,
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
        self._store, self.heartbeat_timeout = store, heartbeat_timeout
        self._interval = max(interval, hosts / HOSTS_PER_SECOND)
        self._keys = [_key(index) for index in range(hosts)]
        self._own_record = HostRecord(secrets.token_hex(8), socket.gethostname(), os.getpid(), ranks)
        self._own_text = json.dumps(asdict(self._own_record))  # value of this host's key in the store
        store.changes(_key(host), 0, 0.0)  # a first heartbeat, before there is a record
        if (current := store.compare_set(_key(host), EMPTY, self._own_text).decode()) != self._own_text:
            other = json.loads(current)
            raise RendezvousError(
                f"host number {host} is in use by {other['name']} (process {other['pid']})",
                where=f"host {host}",
                rule="each host has a different number",
                fix="give each host a different --node-rank, and stop processes left by an earlier start",
            )
        self._records: list[HostRecord | None] = [None] * hosts
        self._ages: dict[str, float] = {}  # at `_answered`, of the hosts that are late
        self._answered = self._age_bound = time.monotonic()
        self._texts = [EMPTY] * hosts
        self._announcement = self._written_announcement = announcement
        self._kept: tuple[float, list[HostState]] | None = None  # time and states; None after news
        self._released: dict[int, str] = {}
        self._freed: set[int] = set()  # hosts whose numbers another launcher may take
        self._version = self._published_version = 0
        self._lost = self._stopped = False
        self._changed = threading.Condition()  # guards all attributes above
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="MembershipStore", daemon=True)
            for work in (self._read_until_stopped, self._write_until_stopped)
        ]
        for thread in self._threads:
            thread.start()

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

    def _wait_for_some(self, min_hosts: int, timeout: float, last_call: float) -> None:
        """Wait for a number of hosts, and then for the other ones as long as `last_call`."""

        def present() -> int:
            return sum(not state.gone for state in self._states())

        with self._changed:
            self._wait(lambda: self._lost or present() >= min_hosts, timeout)
            self._wait(lambda: self._lost or present() == len(self._keys), last_call if present() >= min_hosts else 0.0)
            found = present()
        if found < min_hosts:
            raise RendezvousError(
                f"the job cannot start: {found} of at least {min_hosts} hosts connected within {timeout:g} s",
                where=f"host {self.host}",
                rule="a job starts when the first number of --nnodes MIN:MAX has connected",
                fix="start more hosts; see their output, and check the network between the hosts",
            )

    def report_failure(self, text: str) -> None:
        """Report a failure of this host in the current attempt to all hosts. Returns when the report is in the store."""
        self._publish(report=text, failed_attempt=self._own_record.attempt)

    def update(self, **changes: Any) -> None:
        """Change fields of this host's `HostRecord`. Returns at once; a thread publishes the change."""
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
        """States of all known hosts by host number, as of the last heartbeats; of many hosts for hosts / 2,560 seconds."""
        with self._changed:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > len(self._keys) / STATES_PER_SECOND:
                self._kept = now, self._states()
            return self._kept[1]

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
        for thread in self._threads:
            thread.join(self._interval)  # bounded: a call to an unreachable store may block the thread

    def _publish(self, **changes: Any) -> None:
        """Change the record of this host, and wait until it is in the store or the store is lost."""
        with self._changed:
            own_version = self._change(changes)
            self._wait(lambda: self._lost or self._published_version >= own_version, self.heartbeat_timeout)

    def _change(self, changes: dict[str, Any]) -> int:
        """Change the record of this host and return its new version. The caller holds the lock."""
        self._own_record, self._kept = replace(self._own_record, **changes), None
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
        now, age = time.monotonic(), self._ages.get(self._keys[host])
        silent = 0.0 if host == self.host else (age or 0.0) + now - self._answered
        max_age = 2 * self._interval if age is None else age
        failed = record.failed_attempt >= self._own_record.attempt
        is_silent = self._lost or host in self._freed or silent > self.heartbeat_timeout
        silent_too_long = host != self.host and is_silent
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
            max_record_age=0.0 if host == self.host else max_age + now - self._age_bound,
            gone=record.left or silent_too_long,
            record=record,
        )

    def _run(self, work: Callable[[], None]) -> None:
        """Main function of a thread. Marks the store as lost when the thread ends for any reason."""
        try:
            with suppress(dist.DistError, _Replaced):
                work()
        finally:
            self._mark_lost()

    def _read_until_stopped(self) -> None:
        """Wait for new records and the announcement; each request is a heartbeat."""
        version = 0
        while not self._stopped:
            began = time.monotonic()
            version, waited, ages, values = self._store.changes(self._keys[self.host], version, self._interval)
            with self._changed:
                for host, key in enumerate(self._keys):
                    if key in values:
                        self._read_record(host, values[key])
                if self.host:
                    self._announcement = values.get(ANNOUNCEMENT, self._announcement)
                self._kept = None if values else self._kept
                self._ages, self._answered = ages, time.monotonic()
                self._age_bound = began + waited  # the server has answered then, or later
                self._changed.notify_all()

    def _read_record(self, host: int, text: str) -> None:
        """Read a new record of a host. The caller holds the lock."""
        record = None if text == EMPTY else HostRecord(**known_fields(HostRecord, json.loads(text)))
        if host == self.host and (record is None or record.id != self._own_record.id):
            raise _Replaced
        self._texts[host] = text
        if record is not None:
            self._records[host] = record
            self._freed.discard(host)
        elif self._records[host]:  # host 0 has seen its loss, this host perhaps not yet
            self._freed.add(host)

    def _write_until_stopped(self) -> None:
        """Write the record of this host, and on host 0 the announcement, when they have changed."""
        while not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._version > self._published_version)
                own_version, text = self._version, json.dumps(asdict(self._own_record))
                announcement = self._announcement
                released, self._released = self._released, {}
            self._write(text, announcement, released)
            with self._changed:
                self._published_version = own_version
                self._changed.notify_all()

    def _mark_lost(self) -> None:
        """Mark all other hosts as unreachable: no record of another host will be read again."""
        with self._changed:
            self._lost, self._kept = True, None
            self._changed.notify_all()

    def _write(self, text: str, announcement: str, released: dict[int, str]) -> None:
        """Write the record of this host, and on host 0 free the numbers of hosts and write the announcement."""
        if self._store.compare_set(self._keys[self.host], self._own_text, text).decode() != text:
            raise _Replaced
        self._own_text = text
        for host, last_text in released.items():
            self._store.compare_set(self._keys[host], last_text, EMPTY)
        if self.host == 0 and announcement != self._written_announcement:
            self._store.set(ANNOUNCEMENT, announcement)
            self._written_announcement = announcement


class _Replaced(Exception):
    """Another launcher has taken the number of this host."""


def _key(host: int) -> str:
    return f"host-{host}"
