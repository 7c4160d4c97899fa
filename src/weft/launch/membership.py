"""Launchers of several hosts tell each other how they are: who is there, who failed and why, who has left.

    store = SocketStore(path)                              # of a server on host 0; from other hosts, through a door
    board = MembershipStore.join(store, host=0, hosts=2, ranks=4)    # waits for all hosts
    first_rank, world_size = board.layout()
    ...
    board.report("rank 3 was killed by SIGKILL at step 17")
    for state in board.look(): ...
    board.post("attempt 1 has 4 ranks")                    # on host 0: a notice that all hosts read
    board.leave()

Each launcher writes one key, a JSON object with a count that grows, and reads those of all others once a second. Whether a
host is silent is judged by the clock of who looks: clocks of hosts need not agree. A host that is gone may be replaced: host
0 frees its number, and a launcher that comes later takes it.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Literal

import torch.distributed as dist

from weft.errors import RendezvousError

NOBODY = "null"
NOTICE = "notice"
Status = Literal["here", "failed", "left", "unreachable"]


@dataclass(frozen=True)
class HostRecord:
    """What a host writes into the store. `id` tells one launcher from another of the same name and process number."""

    id: str
    name: str
    pid: int
    ranks: int
    attempt: int = 0
    """The one under way here."""
    beat: int = 0
    left: bool = False
    report: str | None = None
    failed_attempt: int = -1
    ready: int = -1
    """The attempt that this host could take part in next."""
    done: int = -1
    """The last attempt whose ranks have all ended well here."""
    standing: str | None = None
    """Which of its ranks stands still, if one does and does not just wait for others."""


@dataclass(frozen=True)
class HostState:
    """A host as another one sees it.

    `status` is "left" if the host has said goodbye, "failed" if it has reported a failure of the attempt of who looks (or of
    a later one), "unreachable" if neither and nothing was heard of it for too long, else "here".
    """

    host: int
    name: str
    pid: int
    ranks: int
    attempt: int
    status: Status
    report: str | None
    silent_seconds: float
    """Since something new was read of it."""
    spoke_seconds: float
    """Since that was written, at most: it was not there when this host read before."""
    gone: bool
    """Whether it has left, or cannot be reached, whatever it has reported before."""
    entry: HostRecord
    """All that it says."""


class MembershipStore:
    """What this launcher knows of the launchers of all hosts. A daemon thread keeps it up; `look` never waits."""

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
        silence_seconds: float = 15.0,
    ) -> "MembershipStore":
        """Say that this host is there, and wait for all others; a host that takes the place of one that is gone need not.

        Args:
            store: of this board alone, the same for all hosts; it lives on host 0.
            host: number of this host, from 0.
            hosts: how many there are.
            ranks: how many this host starts.
            timeout: seconds to wait.
            interval: seconds between heartbeats.
            silence_seconds: without a heartbeat for that long, a host counts as unreachable.

        Raises:
            RendezvousError: hosts do not agree how many they are, the number is taken, or somebody does not come.
        """
        own_version = version("weft-train")
        if host == 0:
            for key in (NOTICE, *map(_key, range(hosts))):
                store.set(key, NOBODY)
            store.set("version", own_version)
            store.set("hosts", str(hosts))
        try:
            store.wait(["hosts"], timedelta(seconds=timeout))
        except dist.DistError:
            raise RendezvousError(
                f"host 0 did not come within {timeout:g} s", where=f"host {host}", fix="see the output of host 0"
            ) from None
        if (other := store.get("version").decode()) != own_version:
            raise RendezvousError(
                f"host 0 has Weft {other}, this host has Weft {own_version}",
                where=f"host {host}",
                rule="all hosts of a job have the same version: another may compute or send something else",
                fix=f"install weft-train=={other} here, or the other version there",
            )
        if (told := int(store.get("hosts"))) != hosts or not 0 <= host < hosts:
            raise RendezvousError(
                f"this is host {host} of {hosts}, and host 0 speaks of {told} hosts",
                where=f"host {host}",
                rule="all hosts are started with the same number of hosts, and have numbers from 0",
                fix=f"start {told} hosts with --nnodes {told} and --node-rank 0 to {told - 1}",
            )
        under_way = store.get(NOTICE).decode()
        board = cls(store, host, hosts, ranks, interval, silence_seconds)
        try:
            board._publish()
            if under_way == NOBODY:
                board._wait_for_all(timeout)
        except BaseException:
            board.leave(timeout=0)
            raise
        return board

    def __init__(
        self, store: dist.Store, host: int, hosts: int, ranks: int, interval: float, silence_seconds: float
    ) -> None:
        """Use `join`."""
        self.host = host
        self._store, self._interval, self.silence_seconds = store, interval, silence_seconds
        self._keys = [_key(number) for number in range(hosts)]
        self._mine = HostRecord(secrets.token_hex(8), socket.gethostname(), os.getpid(), ranks)
        self._text = json.dumps(asdict(self._mine))  # as it stands in the store
        if (there := store.compare_set(_key(host), NOBODY, self._text).decode()) != self._text:
            other = json.loads(there)
            raise RendezvousError(
                f"host number {host} is taken by {other['name']} (process {other['pid']})",
                where=f"host {host}",
                rule="each host has a number of its own",
                fix="give every host another --node-rank, and end what an earlier start has left",
            )
        self._entries: list[HostRecord | None] = [None] * hosts
        self._heard = [time.monotonic()] * hosts
        self._spoke, self._looked = list(self._heard), time.monotonic()
        self._texts = [NOBODY] * hosts
        self._notice = self._written = NOBODY
        self._freed: dict[int, str] = {}
        self._changes = self._published = 0
        self._lost = self._ended = False
        self._news = threading.Condition()  # guards all of the above
        self._thread = threading.Thread(target=self._keep_up, name="MembershipStore", daemon=True)
        self._thread.start()

    def _wait_for_all(self, timeout: float) -> None:
        def missing() -> list[int]:
            return [number for number, entry in enumerate(self._entries) if not entry]

        def gone() -> dict[int, str]:
            words = {"left": "has left", "unreachable": "cannot be reached"}
            return {state.host: words[state.status] for state in self._look() if state.status in words}

        with self._news:
            self._wait(lambda: self._lost or not missing() or bool(gone()), timeout)
            late = dict.fromkeys(missing(), f"did not come within {timeout:g} s")
            lost = dict.fromkeys(missing(), "cannot be reached") if self._lost else gone()
        if late:
            texts = [f"host {number} {how}" for number, how in (lost or late).items()]
            raise RendezvousError(
                f"the job cannot begin: {', '.join(texts)}",
                where=f"host {self.host}",
                rule="all hosts of a job begin together",
                fix="start every host; see the output of those that are missing, and the network between the hosts",
            )

    def layout(self) -> tuple[int, int]:
        """The first rank of this host and the number of ranks of all hosts: ranks are numbered host by host."""
        ranks = [state.ranks for state in self.look()]
        return sum(ranks[: self.host]), sum(ranks)

    def report(self, text: str) -> None:
        """Tell all hosts that this one has failed in the attempt under way, and how. Comes back when it is told."""
        self._publish(report=text, failed_attempt=self._mine.attempt)

    def note(self, **changes: Any) -> None:
        """Change the fields of this host's `HostRecord`: attempt, ranks, ready, done, standing. Does not wait."""
        with self._news:
            self._change(changes)

    def post(self, text: str) -> None:
        """On host 0: put up a notice for all hosts, instead of the last one. Comes back when it is there."""
        with self._news:
            self._notice = text
        self._publish()

    def notice(self) -> str | None:
        """What host 0 has put up last."""
        with self._news:
            return None if self._notice == NOBODY else self._notice

    def free(self, host: int) -> None:
        """On host 0: let another launcher take the number of a host that is gone."""
        with self._news:
            self._freed[host] = self._texts[host]
            self._change({})

    def look(self) -> list[HostState]:
        """Every host that has been seen, by number, as of the last heartbeats."""
        with self._news:
            return self._look()

    def leave(self, timeout: float = 30.0) -> None:
        """Say goodbye. Host 0, where the store lives, waits until the others are gone too, at most `timeout` seconds.

        A second call does nothing.
        """
        if self._ended:
            return
        self._publish(left=True)
        with self._news:
            if self.host == 0:
                gone = ("left", "unreachable")
                self._wait(lambda: all(state.status in gone for state in self._look()), timeout)
            self._ended = True
            self._news.notify_all()
        self._thread.join(self._interval)  # not for ever: the store may be out of reach

    def _publish(self, **changes: Any) -> None:
        """Change what this host says, and wait until it stands in the store, or cannot."""
        with self._news:
            mine = self._change(changes)
            self._wait(lambda: self._lost or self._published >= mine, self.silence_seconds)

    def _change(self, changes: dict[str, Any]) -> int:
        """The caller holds the lock; the number of this change."""
        self._mine = replace(self._mine, **changes)
        self._changes += 1
        self._news.notify_all()
        return self._changes

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait for a condition, at most so long. The caller holds the lock."""
        end = time.monotonic() + timeout
        while not condition() and (left := end - time.monotonic()) > 0:
            self._news.wait(min(left, self._interval))  # a host becomes silent without news

    def _look(self) -> list[HostState]:
        return [self._state(number, entry) for number, entry in enumerate(self._entries) if entry]

    def _state(self, host: int, entry: HostRecord) -> HostState:
        silent = 0.0 if host == self.host else time.monotonic() - self._heard[host]
        failed = entry.failed_attempt >= self._mine.attempt
        silent_too_long = host != self.host and (self._lost or silent > self.silence_seconds)
        status: Status = "here"
        if entry.left:
            status = "left"
        elif failed:
            status = "failed"
        elif silent_too_long:
            status = "unreachable"
        return HostState(
            host,
            entry.name,
            entry.pid,
            entry.ranks,
            entry.attempt,
            status,
            report=entry.report if failed else None,
            silent_seconds=silent,
            spoke_seconds=0.0 if host == self.host else time.monotonic() - self._spoke[host],
            gone=entry.left or silent_too_long,
            entry=entry,
        )

    def _keep_up(self) -> None:
        """The thread. Whatever ends it, who looks is told that other hosts cannot be heard any more."""
        try:
            self._talk()
        finally:
            self._give_up()

    def _talk(self) -> None:
        """Until the end. No other thread uses the store, which may keep this one waiting."""
        while not self._ended:
            with self._news:
                self._mine = replace(self._mine, beat=self._mine.beat + 1)
                changes, text, notice = self._changes, json.dumps(asdict(self._mine)), self._notice
                freed, self._freed = self._freed, {}
            looks = time.monotonic()
            try:
                texts, notice = self._exchange(text, notice, freed)
            except (dist.DistError, _Replaced):
                return
            with self._news:
                for host, other in enumerate(texts):
                    if other != self._texts[host]:
                        self._entries[host] = (
                            None if other == NOBODY else HostRecord(**known_fields(HostRecord, json.loads(other)))
                        )
                        self._texts[host], self._heard[host], self._spoke[host] = other, time.monotonic(), self._looked
                self._looked = looks
                if self.host:
                    self._notice = notice
                self._published = changes
                self._news.notify_all()
                self._wait(lambda: self._ended or self._changes > self._published, self._interval)

    def _give_up(self) -> None:
        """Nothing more will be heard of other hosts."""
        with self._news:
            self._lost = True
            self._news.notify_all()

    def _exchange(self, text: str, notice: str, freed: dict[int, str]) -> tuple[list[str], str]:
        """Write what this host says, and read what all hosts say, and the notice."""
        there = self._store.compare_set(self._keys[self.host], self._text, text).decode()
        if there != text:
            raise _Replaced
        self._text = text
        for host, gone in freed.items():
            self._store.compare_set(self._keys[host], gone, NOBODY)
        if self.host == 0 and notice != self._written:
            self._store.set(NOTICE, notice)
            self._written = notice
        *texts, notice = (found.decode() for found in self._store.multi_get([*self._keys, NOTICE]))
        return texts, notice


def known_fields(table: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Keep the fields that this version of a dataclass has, of what another host has written."""
    return {name: fields[name] for name in table.__dataclass_fields__.keys() & fields.keys()}  # type: ignore[attr-defined]


class _Replaced(Exception):
    """Another launcher has taken the number of this host."""


def _key(host: int) -> str:
    return f"host-{host}"
