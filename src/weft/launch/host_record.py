"""What the launchers of a job know about each other; see `membership`."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class HostState(NamedTuple):  # of 1,280 hosts ten times a second: a frozen dataclass takes twice as long
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
    """Time since a heartbeat of the host, as far as this host knows."""
    max_record_age: float
    """Upper bound of the seconds since the host has shown that it has no newer record."""
    gone: bool
    """True if the host has left or is unreachable, even if its status is "failed"."""
    record: HostRecord
    """Newest record of the host."""
