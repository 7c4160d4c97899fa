"""State of a job in its run folder, from which a replacement of a lost host 0 continues the job.

    state = StateFile(out, rendezvous, lost)          # on host 0; `lost`: state of a lost host 0 that this one replaces
    state.write(attempt=3, assignment=[(0, 4), (1, 4)])
    state.replacement()                               # host 0 that has replaced this one, if any

Host 0 alone writes the file. Each host 0 of a run folder has a higher epoch than the one before: hosts refuse one with a lower
epoch than they have followed, and a host 0 that finds the state of another one in the file ends. Epochs are the terms of Raft
(Ongaro and Ousterhout, 2014) and the sequencers of Chubby (Burrows, 2006).
"""

import hmac
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.errors import RendezvousError
from weft.launch.attempt import AttemptSpec, known_fields
from weft.launch.rendezvous import RendezvousConfig, own_address, token_key
from weft.launch.scratch import scratch_folder
from weft.launch.tunnel import TunnelClient

STATE = "host-0.json"
MAX_STATE_BYTES = 2**20
CHECK_SECONDS = 1.0  # between two looks at the file
PROBE_SECONDS = 2.0  # for a living host 0 to answer


@dataclass(frozen=True)
class JobState:
    """Content of the state file."""

    id: str
    """Identity of the launcher of host 0, random."""
    epoch: int
    """Number of this host 0 among those of the run folder, from 1."""
    launcher: str
    """Process and host name, for messages."""
    address: str
    """IPv4 address at which host 0 listens."""
    port: int
    token: str
    """Digest of the token of the job."""
    hosts: int
    ranks: list[int] = field(default_factory=list)
    """Ranks of each host in the first attempt."""
    attempt: int = -1
    """Number of the newest attempt; -1 before the first."""
    assignment: list[tuple[int, int]] = field(default_factory=list)
    """(host, ranks) of each host of the newest attempt."""
    restarts: int = 0
    """Restarts without progress before the newest attempt."""
    furthest_step: int = -1
    """Last step that an attempt before the newest one has reached."""
    ended: bool = False
    """True if the job has ended."""

    def announcement(self) -> str:
        """Newest attempt as an announcement, without the settings, which the new host 0 publishes."""
        return json.dumps(asdict(AttemptSpec(self.attempt, self.assignment)))

    def is_of(self, rendezvous: RendezvousConfig) -> bool:
        """True if this is an attempt of the job with these hosts and this token that has not ended."""
        same = self.token == _digest(rendezvous.token) and self.hosts == rendezvous.hosts
        return same and self.attempt >= 0 and not self.ended

    def check_ended(self, rendezvous: RendezvousConfig) -> None:
        """Refuse to replace a host 0 that still answers.

        Raises:
            RendezvousError: the host 0 that wrote this state answers.
        """
        endpoint = self.address, self.port, rendezvous.token, "membership"
        with scratch_folder() as folder:
            try:
                TunnelClient(*endpoint, folder / "probe", timeout=PROBE_SECONDS, encrypt=rendezvous.encrypt).close()
            except RendezvousError:
                return
        raise RendezvousError(
            f"host 0 of this job is alive: {self.launcher}, at {self.address}:{self.port}",
            where="--node-rank 0",
            rule="a job has one host 0",
            fix="stop that host 0 first, or start this host with another --node-rank",
        )


class StateFile:
    """State file of a job, written by this host 0.

    Args:
        out: run folder.
        rendezvous: rendezvous of the job, on host 0.
        lost: state of the host 0 that this one replaces; None for a job that starts.
        reached_step: last step of the run folder, for progress of the newest attempt of the lost host 0.
    """

    def __init__(self, out: Path, rendezvous: RendezvousConfig, lost: JobState | None = None, reached_step: int = -1):
        self.path, self.lost, self.reached_step = out / STATE, lost, reached_step
        earlier = read_state(out)
        own = JobState(
            secrets.token_hex(8),
            earlier.epoch + 1 if earlier else 1,
            f"process {os.getpid()} on host {socket.gethostname()}",
            own_address(rendezvous),
            rendezvous.port,
            _digest(rendezvous.token),
            rendezvous.hosts,
        )
        self.state = own
        if lost:
            kept = ("ranks", "attempt", "assignment", "restarts", "furthest_step")
            self.state = replace(own, **{name: getattr(lost, name) for name in kept})
        self._written, self._next_look = False, 0.0
        self._replacement: JobState | None = None

    def write(self, **changes: Any) -> None:
        """Change fields of the state, and replace the file atomically.

        Raises:
            RendezvousError: another host 0 has replaced this one.
            OSError: the file cannot be written.
        """
        if other := self.replacement(fresh=True):
            raise replaced_error(other)
        self.state = replace(self.state, **changes)
        draft = self.path.with_name(f".{STATE}-{self.state.id}")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(asdict(self.state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._written = True

    def take_over(self) -> None:
        """Replace the lost host 0, which ends from now on if it is alive.

        Raises:
            RendezvousError: the state cannot be written.
        """
        try:
            self.write()
        except OSError as error:
            raise RendezvousError(
                f"the state of the job cannot be written: {error.strerror}",
                where=str(self.path),
                rule="a host 0 that replaces a lost one first writes its epoch, so that the job has one host 0",
                fix="make space in the run folder, or make it writable",
            ) from None

    def replacement(self, *, fresh: bool = False) -> JobState | None:
        """State of the host 0 that has replaced this one; None if there is none.

        Args:
            fresh: read the file now; False: read it once a second.
        """
        if self._written and (fresh or time.monotonic() >= self._next_look):
            self._next_look = time.monotonic() + CHECK_SECONDS
            state = read_state(self.path.parent)
            if state and state.id != self.state.id:
                self._replacement = state
        return self._replacement


def read_state(out: Path) -> JobState | None:
    """State of the job in a run folder; None if there is none, or if it is damaged."""
    try:
        with (out / STATE).open("rb") as file:
            state = JobState(**known_fields(JobState, json.loads(file.read(MAX_STATE_BYTES))))
        numbers = state.epoch, state.attempt, state.restarts, state.furthest_step, state.hosts, state.port, *state.ranks
        valid = all(type(number) is int for number in numbers) and len(dict(state.assignment)) == len(state.assignment)
        return state if valid else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def replaced_error(other: JobState) -> RendezvousError:
    """Error of a host 0 that another one has replaced."""
    return RendezvousError(
        f"another host 0 has replaced this one: {other.launcher}, epoch {other.epoch}",
        where=STATE,
        rule="a job has one host 0: the newest one in its run folder",
        fix="nothing to do: the job continues there",
    )


def _digest(token: str) -> str:
    return hmac.digest(token_key(token, "token of host 0"), b"weft state of a job", "sha256").hex()
