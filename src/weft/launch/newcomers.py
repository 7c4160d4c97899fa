"""Hosts that join a running job: all ranks restart with theirs after the next checkpoint.

    coordinator.newcomers = Newcomers(newest_step=lambda: 1200, usable_ranks=lambda available: available)    # on host 0

Agents of torchrun restart their ranks at once when a host joins, and repeat the steps since the newest checkpoint; here the
ranks go on until there is a new one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.launch.attempt import AttemptSpec
from weft.launch.host_record import HostState
from weft.launch.log import log

LOOK_SECONDS = 1.0  # between two looks at the hosts and the checkpoints


@dataclass
class Newcomers:
    """Hosts that wait for the next attempt of a job; on host 0."""

    newest_step: Callable[[], int | None]
    """Step of the newest checkpoint, -1 without one; None if the folder cannot be read at the moment."""
    usable_ranks: Callable[[int], int]
    """Number of ranks that the plan uses, given the number of ranks of all hosts."""
    _launchers: frozenset[str] = field(default=frozenset(), init=False)
    _step: int = field(default=-1, init=False)
    """Newest checkpoint when the last of them joined."""
    _used: bool = field(default=False, init=False)
    _next_look: float = field(default=0.0, init=False)

    def is_due(self) -> bool:
        """True once a second: the watchdog of host 0 asks more often than hosts join."""
        due = time.monotonic() >= self._next_look
        if due:
            self._next_look = time.monotonic() + LOOK_SECONDS
        return due

    def ready(self, states: Sequence[HostState], spec: AttemptSpec) -> list[HostState]:
        """Hosts with which the job restarts now: the plan uses their ranks, and there is a checkpoint since they joined.

        Args:
            states: states of all hosts.
            spec: attempt that is under way.
        """
        waiting = [
            s for s in states if s.host not in spec.members and not s.gone and s.record.ready_attempt > spec.attempt
        ]
        if not waiting or (step := self.newest_step()) is None:
            return []
        launchers = frozenset(state.record.id for state in waiting)
        if launchers != self._launchers:
            self._launchers, self._step = launchers, step
            present = sum(spec.members.values())
            self._used = self.usable_ranks(present + sum(state.ranks for state in waiting)) > present
            names = " and ".join(f"host {state.host} ({state.name})" for state in waiting)
            when = "after the next checkpoint" if self._used else f"if the plan fits more than {present} ranks"
            log(f"{names} joined the job: new ranks start {when}")
        return waiting if self._used and step > self._step else []
