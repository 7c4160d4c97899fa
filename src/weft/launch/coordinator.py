"""Coordination between the launchers of a multi-host job: rendezvous, failure reports and restarts.

    rendezvous = RendezvousConfig(host=0, hosts=2, address="10.0.0.1", port=29400, token=token)
    coordinator = JobCoordinator.join(rendezvous, ranks=4)
    launch(argv, ranks=4, log_dir=..., coordinator=coordinator)
    coordinator.close(None)

Host 0 decides which hosts take part in an attempt, with how many ranks each, and when the job ends. It announces these
decisions through the `MembershipStore`. Each host reports a failure of its ranks to all other hosts before it ends these ranks,
so that every host can tell the cause of a failure from its consequences.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.errors import RankFailure, RendezvousError, WeftError
from weft.launch.attempt import AttemptSpec, FailureRecord
from weft.launch.environment import INTERFACE_VARIABLES
from weft.launch.host_record import HostState
from weft.launch.host_reports import POLL_SECONDS, HostReports, label_of
from weft.launch.job_state import StateFile, replaced_error
from weft.launch.log import log
from weft.launch.membership import MembershipStore
from weft.launch.newcomers import Newcomers
from weft.launch.rendezvous import RendezvousConfig, interface_address, interface_of, own_address
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreRendezvous, StoreServer
from weft.launch.tls import gloo_variables
from weft.launch.tunnel import TunnelClient, TunnelServer

MEMBERSHIP_STORE = "membership"  # name in the tunnel
JOIN_SECONDS = 300.0  # for all hosts to connect at the start
RENDEZVOUS_SECONDS = 60.0  # for the agents and ranks of an attempt to connect


class JobCoordinator(HostReports):
    """Connection of one launcher to the other hosts of a job. Created by `join`; used by one thread."""

    @classmethod
    def join(
        cls,
        rendezvous: RendezvousConfig,
        ranks: int,
        *,
        node_rejoin_seconds: float = 60.0,
        state: StateFile | None = None,
        **options: Any,
    ) -> "JobCoordinator":
        """Connect to the other hosts and wait for all of them.

        Args:
            ranks: number of ranks that this host can run.
            node_rejoin_seconds: time in which a lost host may rejoin or be replaced.
            state: on host 0, state of the job in its run folder; None: host 0 cannot be replaced.
            options: options of `MembershipStore.join`.

        Raises:
            RendezvousError: the token is wrong, a host does not connect, the host numbers are inconsistent, or the network
                interface does not exist.
        """
        if rendezvous.interface:
            interface_address(rendezvous.interface)  # raises for an unknown interface
        options = {
            "host": rendezvous.host,
            "hosts": rendezvous.hosts,
            "min_hosts": rendezvous.min_hosts,
            "ranks": ranks,
            "timeout": JOIN_SECONDS,
        } | options
        with ExitStack() as stack:
            folder, server = stack.enter_context(scratch_folder()), None
            if rendezvous.host == 0:
                address = own_address(rendezvous)
                server = stack.enter_context(
                    TunnelServer(address, rendezvous.port, rendezvous.token, encrypt=rendezvous.encrypt)
                )
                if state:
                    options["epoch"] = state.state.epoch
                if state and state.lost:
                    state.take_over()  # after the server listens: a host 0 that cannot start replaces none
                    options["announcement"] = state.lost.announcement()
                store = stack.enter_context(StoreServer(folder / MEMBERSHIP_STORE))
                server.add_store(MEMBERSHIP_STORE, store.path)
            else:
                endpoint = rendezvous.address, rendezvous.port, rendezvous.token, MEMBERSHIP_STORE
                client = TunnelClient(
                    *endpoint, folder / MEMBERSHIP_STORE, timeout=options["timeout"], encrypt=rendezvous.encrypt
                )
                stack.enter_context(client)
            # After the connection: until then the name of host 0 may be unknown.
            interface = rendezvous.interface or interface_of(own_address(rendezvous))
            membership = MembershipStore.join(SocketStore(folder / MEMBERSHIP_STORE), **options)
            resources = stack.pop_all()
        return cls(rendezvous, membership, ranks, node_rejoin_seconds, interface, folder, server, state, resources)

    def __init__(
        self,
        rendezvous: RendezvousConfig,
        membership: MembershipStore,
        ranks: int,
        node_rejoin_seconds: float,
        interface: str,
        folder: Path,
        server: TunnelServer | None,
        state: StateFile | None,
        resources: ExitStack,
    ):
        super().__init__(membership, rendezvous.host, rendezvous.hosts)
        self.rendezvous, self.ranks, self.interface = rendezvous, ranks, interface
        self.node_rejoin_seconds = node_rejoin_seconds
        self._folder, self._server, self._state, self._resources = folder, server, state, resources
        self.epoch = membership.epoch
        # Store of the current attempt, or the tunnel client to it. On host 0 it must outlive the agents of the other hosts.
        self._attempt_store: StoreServer | TunnelClient | None = None
        self.newcomers: Newcomers | None = None
        """On host 0, hosts that may join the running job; None: a host that comes late waits for the next restart."""
        self._growth: FailureRecord | None = None
        self._released = set[str]()  # launchers whose host numbers other ones may take
        self._spec = self._read()  # a replacement host reads the spec of an attempt that it does not take part in

    # Start of the job

    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return sum(self.ranks_by_host())

    def ranks_by_host(self) -> list[int]:
        """Number of ranks of each host, in rank order."""
        return [state.ranks for state in self.membership.host_states()]

    def network_environment(self) -> dict[str, str]:
        """Environment variables of ranks: the network interface, and TLS if the job asks for it and gloo supports it.

        Raises:
            RendezvousError: TLS needs a library that is not installed.
        """
        variables = dict.fromkeys(INTERFACE_VARIABLES, self.interface)
        if self.rendezvous.encrypt:
            variables |= gloo_variables(self.rendezvous.token, self._folder, self.interface)
        return variables

    def open_store(self, name: str) -> SocketStore:
        """Open another store on host 0 for the launchers of the job. All hosts call it; the store lives until `close`.

        Raises:
            RendezvousError: host 0 is unreachable.
        """
        path = self._folder / name
        if self._server:
            self._resources.enter_context(StoreServer(path))
            self._server.add_store(name, path)
        else:
            endpoint = self.rendezvous.address, self.rendezvous.port, self.rendezvous.token, name
            self._resources.enter_context(TunnelClient(*endpoint, path, encrypt=self.rendezvous.encrypt))
        return SocketStore(path)

    def lost_host_0(self) -> StateFile | None:
        """State of the job if this is a host 0 that replaces a lost one."""
        return self._state if self._state and self._state.lost else None

    def start(self) -> tuple[int, int]:
        """Wait for the first attempt that this host takes part in; on host 0, start attempt 0 when all hosts are ready.

        Returns:
            attempt: number of the attempt.
            ranks: number of ranks of this host.

        Raises:
            WeftError: a host ended before the job started.
        """
        if self.host:
            return self.wait_for_attempt()[:2]
        self._wait_before_start(lambda record: record.ready_attempt >= 0)
        return 0, self.start_attempt(0, {state.host: state.ranks for state in self.membership.host_states()}, 0.0)

    def attempt_rendezvous(self) -> StoreRendezvous:
        """Create the rendezvous for the agents of the current attempt. Each attempt has its own store.

        Raises:
            RendezvousError: host 0 is unreachable.
        """
        name = f"ranks-{self._spec.attempt}"
        if self._server and isinstance(self._attempt_store, StoreServer):
            self._server.remove_store(self._attempt_store.path.name)
        if self._attempt_store:
            self._attempt_store.close()
        if self._server:
            self._attempt_store = StoreServer(self._folder / name)
            self._server.add_store(name, self._attempt_store.path)
        else:
            endpoint = self.rendezvous.address, self.rendezvous.port, self.rendezvous.token, name
            try:
                self._attempt_store = TunnelClient(*endpoint, self._folder / name, encrypt=self.rendezvous.encrypt)
            except RendezvousError:
                self._check_host_0()
                raise
        members = list(self._spec.members)
        return StoreRendezvous(self._attempt_store.path, members.index(self.host), len(members), RENDEZVOUS_SECONDS)

    # During and after an attempt

    def remote_failure(self) -> FailureRecord | None:
        """Root cause on another host, the loss of another host, or on host 0 its replacement, if there is one."""
        if self._state and (other := self._state.replacement()):
            error = replaced_error(other)
            return FailureRecord.from_error(error, log_line=error.what)
        return super().remote_failure() or self._end_for_newcomers()

    @property
    def grows(self) -> bool:
        """True on host 0 if the current attempt has ended for hosts that join, and not by a failure."""
        return self._growth is not None

    def _end_for_newcomers(self) -> FailureRecord | None:
        """End of the current attempt because other hosts take part in the next one, which all hosts hear; host 0 only."""
        if self.newcomers is None or self._growth or not self.newcomers.is_due():
            return self._growth
        states = self.membership.host_states()
        self._release([state for state in states if state.host not in self._spec.members])
        if not (joining := self.newcomers.ready(states, self._spec)):
            return None
        names = " and ".join(map(label_of, joining))
        joined = RankFailure(f"{names} join{'s' * (len(joining) == 1)}", where=self.host_label)
        self.report_failure(joined, is_cause=True, log_line="")
        self._growth = FailureRecord.from_error(joined)
        return self._growth

    def _release(self, states: Sequence[HostState], line: str = "") -> None:
        """Let other launchers take the numbers of those hosts that are gone; host 0 only.

        Args:
            line: line to print after the number of a host.
        """
        for state in states:
            if state.gone and state.record.id not in self._released:
                self._released.add(state.record.id)
                self.membership.release(state.host)
                if line:
                    log(f"host {state.host} {line}")

    def all_hosts_done(self) -> bool:
        """Mark the ranks of this host as done; True if the ranks of all other hosts are done too."""
        attempt = self._spec.attempt
        self.membership.update(done_attempt=attempt)
        return all(state.record.done_attempt >= attempt or state.status == "left" for state in self._others())

    def wait_for_attempt(self, cause: RankFailure | None = None) -> tuple[int, int, float]:
        """Wait for the next attempt that this host takes part in; not on host 0.

        Returns:
            attempt: number of the attempt.
            ranks: number of ranks of this host.
            delay_seconds: time until the attempt starts.

        Raises:
            WeftError: the job or host 0 has ended.
        """
        last_attempt = self._spec.attempt
        self.membership.update(ready_attempt=last_attempt + 1, straggler=None)
        while True:
            self._check_host_0(cause)
            spec = self._read()
            if spec.attempt > last_attempt:
                if self.host in spec.members:
                    return spec.attempt, self._adopt(spec), spec.delay_seconds
                last_attempt = spec.attempt
                self.membership.update(ready_attempt=last_attempt + 1)
            time.sleep(POLL_SECONDS)

    def wait_for_hosts(self, attempt: int) -> dict[int, int]:
        """Wait until all hosts are ready for an attempt, or until the time for lost hosts to rejoin is over; host 0 only.

        A job with a least number of hosts does not wait for lost ones if as many are ready.

        Returns:
            Number of ranks of each host that is ready.
        """
        end = time.monotonic() + self.node_rejoin_seconds
        enough = self.rendezvous.min_hosts or self.rendezvous.hosts
        while True:
            states = {state.host: state for state in self.membership.host_states()}
            ready = {
                host: state.ranks
                for host, state in states.items()
                if host == 0 or (state.record.ready_attempt >= attempt and not state.gone)
            }
            missing = [host for host in self._spec.members if host not in ready]
            known = [states[host] for host in missing if host in states]
            without = len(ready) >= enough and len(known) == len(missing) and all(state.gone for state in known)
            within = "" if without else f" within {self.node_rejoin_seconds:g} s"
            self._release(known, f"may rejoin or be replaced{within}: start it again")
            if not missing or without or time.monotonic() > end:
                return ready
            time.sleep(POLL_SECONDS)

    def start_attempt(
        self,
        attempt: int,
        assignment: Mapping[int, int],
        delay_seconds: float,
        restarts: int = 0,
        furthest_step: int = -1,
    ) -> int:
        """Start an attempt; host 0 only.

        Args:
            assignment: number of ranks of each host.
            restarts: restarts without progress so far, with this one.
            furthest_step: last step that an attempt has reached.

        Returns:
            Number of ranks of this host.

        Raises:
            RendezvousError: another host 0 has replaced this one.
        """
        pairs = [(host, ranks) for host, ranks in sorted(assignment.items()) if ranks]
        if self._state:
            ranks_by_host = self._state.state.ranks or [ranks for _, ranks in sorted(assignment.items())]
            self._write_state(
                attempt=attempt,
                assignment=pairs,
                ranks=ranks_by_host,
                restarts=restarts,
                furthest_step=furthest_step,
            )
        self._growth = None
        self._announce(AttemptSpec(attempt, pairs, delay_seconds, self._spec.config))
        return self._adopt(self._spec)

    def close(self, failure: WeftError | None) -> None:
        """Leave the job. On host 0 this ends the job, with the same failure on every host, unless another host 0 leads it.

        The refusal of another host before the first attempt is reported, so that host 0 ends the job with it.
        """
        if self.host and failure and self._spec.attempt < 0:
            self.report_failure(failure, is_cause=True, log_line="")
        if self.leads():
            self._announce(
                AttemptSpec(
                    **asdict(self._spec)
                    | {"ended": True, "failure": failure and asdict(FailureRecord.from_error(failure))}
                )
            )
            if self._state and self._state.state.attempt >= 0:
                with suppress(RendezvousError):  # replaced in this moment
                    self._write_state(ended=True)
        self.membership.leave()
        if self._attempt_store:
            self._attempt_store.close()
        self._resources.close()

    def leads(self) -> bool:
        """True on host 0, unless another host 0 has replaced it."""
        return self.host == 0 and not (self._state and self._state.replacement(fresh=True))

    # Implementation

    def _write_state(self, **changes: Any) -> None:
        """Write the state of the job; a failure to write it does not fail the job."""
        assert self._state is not None
        try:
            self._state.write(**changes)
        except OSError as error:
            log(f"{self._state.path} cannot be written: {error.strerror}; a lost host 0 cannot be replaced")

    def _adopt(self, spec: AttemptSpec) -> int:
        """Take part in an attempt; returns the number of ranks of this host."""
        self._spec, ranks = spec, spec.members[self.host]
        self.membership.update(attempt=spec.attempt, ranks=ranks, straggler=None)
        return ranks
