"""The hosts of one job, seen by the launcher of one of them: they meet, blame the same rank, and go on together.

    coordinator = JobCoordinator.join(RendezvousConfig(host=0, hosts=2, address="10.0.0.1", port=29400, token=token), ranks=4)
    launch(argv, ranks=4, log_dir=..., coordinator=coordinator)
    coordinator.end(None)

Host 0 decides: which hosts take part in an attempt, with how many ranks each, and when the job ends. It says so by a notice on
the `MembershipStore`; the others follow it. What a host has seen of its own ranks it reports to all others before it ends them, so that
a failure that is only a consequence is told from its cause.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import RankFailure, RendezvousError, WeftError
from weft.launch.membership import HostState, MembershipStore, known_fields
from weft.launch.rendezvous import RendezvousConfig, interface_address, interface_of, own_address
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreRendezvous, StoreServer
from weft.launch.tls import gloo_variables
from weft.launch.tunnel import TunnelClient, TunnelServer

MEETING_SECONDS = 300.0  # for all hosts to come at the start
BEGIN_SECONDS = 60.0  # for agents and ranks of an attempt to find each other
HEARING_SECONDS = 2.0  # for the report of another host, when only a consequence is seen here
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class AttemptSpec:
    """What host 0 says to all."""

    attempt: int = -1
    """The newest; -1: none has begun."""
    shares: list[tuple[int, int]] = field(default_factory=list)
    """(host, ranks) of those that take part, in the order of their ranks."""
    seconds: float = 0.0
    """Until it begins."""
    facts: dict[str, str] = field(default_factory=dict)
    """What hosts must agree on before the first attempt; empty until then."""
    ended: bool = False
    failure: dict[str, Any] | None = None
    """Why the job has ended, as fields of `FailureRecord`; None: all is well."""

    @property
    def members(self) -> dict[int, int]:
        """Ranks by host."""
        return dict(self.shares)


@dataclass(frozen=True)
class FailureRecord:
    """A `RankFailure` on its way between hosts."""

    what: str
    where: str | None
    rule: str | None
    fix: str | None
    exit_code: int = 1
    rank: int | None = None
    own: bool = True
    """Whether it is a cause; else perhaps a consequence of what happened on another host."""
    line: str = ""
    """What was said at once."""

    @classmethod
    def of(cls, error: WeftError, own: bool = True, line: str = "") -> "FailureRecord":
        """From an error."""
        rank = error.rank if isinstance(error, RankFailure) else None
        return cls(error.what, error.where, error.rule, error.fix, error.exit_code, rank, own, line)

    def error(self) -> RankFailure:
        """The error again."""
        failure = RankFailure(self.what, rank=self.rank, where=self.where, rule=self.rule, fix=self.fix)
        failure.exit_code = self.exit_code
        return failure


class JobCoordinator:
    """The hosts of a job. Made by `join`; its methods are called by one thread."""

    @classmethod
    def join(
        cls, rendezvous: RendezvousConfig, ranks: int, *, node_rejoin_seconds: float = 60.0, **options: Any
    ) -> "JobCoordinator":
        """Meet the other hosts.

        Args:
            ranks: how many this host can run.
            node_rejoin_seconds: a host that is lost may come back, or be replaced, for so long.
            options: for `MembershipStore.join`.

        Raises:
            RendezvousError: the token is wrong, a host does not come, numbers do not fit, or there is no such interface.
        """
        interface = rendezvous.interface or interface_of(own_address(rendezvous))
        interface_address(interface)  # refuses a name that is none
        options = {
            "host": rendezvous.host,
            "hosts": rendezvous.hosts,
            "ranks": ranks,
            "timeout": MEETING_SECONDS,
        } | options
        with ExitStack() as stack:
            folder, gate = stack.enter_context(scratch_folder()), None
            if rendezvous.host == 0:
                gate = stack.enter_context(
                    TunnelServer(rendezvous.address, rendezvous.port, rendezvous.token, encrypt=rendezvous.encrypt)
                )
                gate.open("board", stack.enter_context(StoreServer(folder / "board")).path)
            else:
                way = rendezvous.address, rendezvous.port, rendezvous.token, "board"
                door = TunnelClient(*way, folder / "board", timeout=options["timeout"], encrypt=rendezvous.encrypt)
                stack.enter_context(door)
            board = MembershipStore.join(SocketStore(folder / "board"), **options)
            return cls(rendezvous, board, ranks, node_rejoin_seconds, interface, folder, gate, stack.pop_all())

    def __init__(
        self,
        rendezvous: RendezvousConfig,
        board: MembershipStore,
        ranks: int,
        node_rejoin_seconds: float,
        interface: str,
        folder: Path,
        gate: TunnelServer | None,
        open_until_end: ExitStack,
    ):
        self.rendezvous, self.board, self.ranks, self.node_rejoin_seconds = (
            rendezvous,
            board,
            ranks,
            node_rejoin_seconds,
        )
        self.host, self.interface = rendezvous.host, interface
        self.place = f"host {self.host} ({socket.gethostname()})"
        self._folder, self._gate, self._open_until_end = folder, gate, open_until_end
        # The store of an attempt, or the door to it: on host 0 it must outlive the agents of the others.
        self._attempt: StoreServer | TunnelClient | None = None
        self._notice = self._read()  # a host that replaces another finds that of an attempt without it

    # The beginning

    def all_ranks(self) -> int:
        """Ranks of all hosts."""
        return self.board.layout()[1]

    def ranks_by_host(self) -> list[int]:
        """Ranks of each host, in the order of their ranks."""
        return [state.ranks for state in self.board.look()]

    def rank_network(self) -> dict[str, str]:
        """Environment variables of ranks: the interface for their traffic, and TLS where this job and its gloo have it.

        Raises:
            RendezvousError: TLS needs a library that is not installed.
        """
        variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), self.interface)
        if self.rendezvous.encrypt:
            variables |= gloo_variables(self.rendezvous.token, self._folder, self.interface)
        return variables

    def announce(self, facts: dict[str, str]) -> None:
        """On host 0: what the others must know before the first attempt."""
        self._post(AttemptSpec(facts=facts))

    def facts(self) -> dict[str, str]:
        """On another host: what host 0 has announced. It may have much to do before, and is waited for.

        Raises:
            WeftError: host 0 has ended, or cannot be reached.
        """
        while not (notice := self._read()).facts:
            self._check_host_0(notice)
            time.sleep(POLL_SECONDS)
        return notice.facts

    def begin(self) -> tuple[int, int]:
        """The first attempt that this host takes part in, and its ranks in it.

        Raises:
            WeftError: a host has ended before the job began.
        """
        if self.host:
            return self.wait_for_attempt()[:2]
        while waiting := [state for state in self.board.look() if state.host and state.entry.ready < 0]:
            for state in waiting:
                if state.gone:
                    raise RendezvousError(
                        f"{_name(state)} has ended before the job began", where="host 0", fix="see its output"
                    )
            time.sleep(POLL_SECONDS)
        return 0, self.go_on(0, {state.host: state.ranks for state in self.board.look()}, 0.0)

    def meet(self) -> StoreRendezvous:
        """The rendezvous of the agents of the attempt under way: it has a store of its own.

        Raises:
            RendezvousError: there was no way to host 0.
        """
        name = f"ranks-{self._notice.attempt}"
        if self._gate and isinstance(self._attempt, StoreServer):
            self._gate.shut(self._attempt.path.name)
        if self._attempt:
            self._attempt.close()
        if self._gate:
            self._attempt = StoreServer(self._folder / name)
            self._gate.open(name, self._attempt.path)
        else:
            way = self.rendezvous.address, self.rendezvous.port, self.rendezvous.token, name
            self._attempt = TunnelClient(*way, self._folder / name, encrypt=self.rendezvous.encrypt)
        members = list(self._notice.members)
        return StoreRendezvous(self._attempt.path, members.index(self.host), len(members), BEGIN_SECONDS)

    # While an attempt is under way: for the watchdog

    def report(self, failure: RankFailure, own: bool, line: str) -> None:
        """Tell the other hosts how this one has failed, before its ranks are ended.

        Args:
            own: whether the cause is here.
            line: what was said.
        """
        self.board.report(json.dumps(asdict(FailureRecord.of(failure, own, line))))

    def trouble(self) -> FailureRecord | None:
        """The failure of another host that is no consequence, or a host that cannot be reached."""
        causes = [failure for failure in self._reports() if failure.own]
        lost = [self._loss(state) for state in self._others() if state.status == "unreachable"]
        return next(iter(causes + lost), None)

    def has_heard(self, seconds: float) -> bool:
        """Whether each other host has had the time, within the last `seconds`, to say what it knows.

        What is read of a host that was lost at that time may have been written before: it counts from when it was written.
        """
        spoke = [state.spoke_seconds for state in self._others() if not state.gone]
        return seconds > max([HEARING_SECONDS, *spoke])

    def last_words(self) -> FailureRecord | None:
        """When only consequences are seen on all hosts: what all of them should say."""
        left = [self._loss(state) for state in self._others() if state.status == "left"]
        return next(iter(left + self._reports(before=self.host)), None)

    def say_standing(self, text: str | None) -> None:
        """Tell the other hosts which rank stands still here, and does not just wait; None: no rank does."""
        self.board.note(standing=text)

    def standing(self) -> str | None:
        """Which rank stands still on another host."""
        return next((state.entry.standing for state in self._others() if state.entry.standing), None)

    def all_done(self) -> bool:
        """Say that the ranks of this host have ended well, and look whether those of the others have."""
        attempt = self._notice.attempt
        self.board.note(done=attempt)
        return all(state.entry.done >= attempt or state.status == "left" for state in self._others())

    # After a failure

    def wait_for_attempt(self, cause: RankFailure | None = None) -> tuple[int, int, float]:
        """On another host than 0: the next attempt that this host takes part in, its ranks in it, and seconds until then.

        Raises:
            WeftError: the job has ended; or host 0 has.
        """
        seen = self._notice.attempt
        self.board.note(ready=seen + 1, standing=None)
        while True:
            notice = self._read()
            self._check_host_0(notice, cause)
            if notice.attempt > seen:
                if self.host in notice.members:
                    return notice.attempt, self._take(notice), notice.seconds
                seen = notice.attempt
                self.board.note(ready=seen + 1)
            time.sleep(POLL_SECONDS)

    def wait_for_hosts(self, attempt: int, say: Callable[[str], None]) -> dict[int, int]:
        """On host 0: ranks of each host that can take part in the next attempt; those that are lost have time to come back."""
        end, freed = time.monotonic() + self.node_rejoin_seconds, set[str]()
        while True:
            states = {state.host: state for state in self.board.look()}
            ready = {
                host: state.ranks
                for host, state in states.items()
                if host == 0 or (state.entry.ready >= attempt and not state.gone)
            }
            missing = [host for host in self._notice.members if host not in ready]
            if not missing or time.monotonic() > end:
                return ready
            for host in missing:
                if host in states and states[host].gone and states[host].entry.id not in freed:
                    freed.add(states[host].entry.id)
                    self.board.free(host)
                    say(
                        f"host {host} may come back, or be replaced, within {self.node_rejoin_seconds:g} s: start it anew"
                    )
            time.sleep(POLL_SECONDS)

    def go_on(self, attempt: int, shares: Mapping[int, int], seconds: float) -> int:
        """On host 0: begin an attempt with so many ranks of each host; those of this one."""
        pairs = [(host, ranks) for host, ranks in sorted(shares.items()) if ranks]
        self._post(AttemptSpec(attempt, pairs, seconds, self._notice.facts))
        return self._take(self._notice)

    def host_of(self, rank: int | None) -> int | None:
        """The host that a rank of the attempt under way is on."""
        return next((host for host, ranks in self._ranks().items() if rank in ranks), None)

    def end(self, failure: WeftError | None) -> None:
        """Leave the others; on host 0 the job ends with it, for the same reason on every host."""
        if self.host == 0:
            self._post(
                AttemptSpec(
                    **asdict(self._notice) | {"ended": True, "failure": failure and asdict(FailureRecord.of(failure))}
                )
            )
        self.board.leave()
        if self._attempt:
            self._attempt.close()
        self._open_until_end.close()

    # How it is done

    def _read(self) -> AttemptSpec:
        text = self.board.notice()
        return AttemptSpec(**known_fields(AttemptSpec, json.loads(text))) if text else AttemptSpec()

    def _post(self, notice: AttemptSpec) -> None:
        self._notice = notice
        self.board.post(json.dumps(asdict(notice)))

    def _take(self, notice: AttemptSpec) -> int:
        self._notice, ranks = notice, notice.members[self.host]
        self.board.note(attempt=notice.attempt, ranks=ranks, standing=None)
        return ranks

    def _others(self) -> list[HostState]:
        """Of this attempt."""
        return [state for state in self.board.look() if state.host in self._notice.members and state.host != self.host]

    def _reports(self, before: int | None = None) -> list[FailureRecord]:
        """Of other hosts, or of those with lower numbers than `before`."""
        return [
            FailureRecord(**known_fields(FailureRecord, json.loads(state.report)))
            for state in self._others()
            if state.report and (before is None or state.host < before)
        ]

    def _ranks(self) -> dict[int, range]:
        found, first = {}, 0
        for host, ranks in self._notice.members.items():
            found[host] = range(first, first + ranks)
            first += ranks
        return found

    def _loss(self, state: HostState) -> FailureRecord:
        """A host that has gone, and has not said why."""
        name, ranks = _name(state), ", ".join(map(str, self._ranks().get(state.host, ())))
        silent = f"nothing heard for {state.silent_seconds:.0f} s"
        if state.silent_seconds < self.board.silence_seconds:
            silent = "its connection has ended"
        text = f"{name} has left" if state.entry.left else f"{name} is unreachable: {silent}"
        text += f"; its rank{'s' if ',' in ranks else ''} {ranks} did not report a crash" if ranks else ""
        fix = "see its output, its power and the network between the hosts"
        if state.host == 0:
            fix += "; the job lives with host 0: start all hosts again with --resume auto, on host 0 too"
        return FailureRecord(text, where=f"seen from {self.place}", rule=None, fix=fix, line=text)

    def _check_host_0(self, notice: AttemptSpec, cause: RankFailure | None = None) -> None:
        """Raise if the job, or host 0, has ended."""
        if notice.ended and notice.failure:
            raise FailureRecord(**known_fields(FailureRecord, notice.failure)).error()
        head = self.board.look()[0]
        if head.gone and not head.entry.left:
            raise self._loss(head).error()
        if notice.ended or head.gone:
            raise cause or RendezvousError(
                f"{_name(head)} has ended while this host waited for its turn", where=self.place, fix="see its output"
            )


def assign_ranks(available: Mapping[int, int], total: int, blamed: int | None) -> dict[int, int]:
    """Ranks of each host when only `total` are wanted: the host to blame gives some up first, then the last ones.

    Args:
        available: ranks by host; their sum is at least `total`.
    """
    shares, surplus = dict(available), sum(available.values()) - total
    order = sorted(available, key=lambda host: (host != blamed, -host))
    for host in order:
        given = min(surplus, shares[host] - (host == 0))  # rank 0 is on host 0, which holds the stores
        shares[host], surplus = shares[host] - given, surplus - given
    return shares


def _name(state: HostState) -> str:
    return f"host {state.host} ({state.name})"
