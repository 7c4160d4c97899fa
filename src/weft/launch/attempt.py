"""Messages between the launchers of a job about an attempt: its ranks on each host, and failures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from weft.errors import RankFailure, WeftError


@dataclass(frozen=True)
class AttemptSpec:
    """Decisions of host 0 about the newest attempt, announced to all hosts."""

    attempt: int = -1
    """Number of the newest attempt; -1 before the first."""
    assignment: list[tuple[int, int]] = field(default_factory=list)
    """(host, ranks) of each host that takes part, in rank order."""
    delay_seconds: float = 0.0
    """Time until the attempt starts."""
    config: dict[str, str] = field(default_factory=dict)
    """Settings that host 0 sends to all hosts before the first attempt; empty until then."""
    ended: bool = False
    """True if the job has ended."""
    failure: dict[str, Any] | None = None
    """Reason for the end of the job, as fields of `FailureRecord`; None if the job succeeded."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse an announcement."""
        return cls(**known_fields(cls, json.loads(text)))

    @cached_property
    def members(self) -> dict[int, int]:
        """Number of ranks of each host that takes part."""
        return dict(self.assignment)

    @cached_property
    def rank_ranges(self) -> dict[int, range]:
        """Ranks of each host that takes part."""
        ranges, first = {}, 0
        for host, ranks in self.members.items():
            ranges[host] = range(first, first + ranks)
            first += ranks
        return ranges


@dataclass(frozen=True)
class FailureRecord:
    """Serializable form of a `RankFailure`, for messages between hosts."""

    what: str
    where: str | None
    rule: str | None
    fix: str | None
    exit_code: int = 1
    rank: int | None = None
    is_cause: bool = True
    """True if this failure is a root cause; False if it may be the consequence of a failure on another host."""
    log_line: str = ""
    """Line that the reporting host logged at once."""

    @classmethod
    def from_error(cls, error: WeftError, is_cause: bool = True, log_line: str = "") -> "FailureRecord":
        """Convert an error into a record."""
        rank = error.rank if isinstance(error, RankFailure) else None
        return cls(error.what, error.where, error.rule, error.fix, error.exit_code, rank, is_cause, log_line)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a report."""
        return cls(**known_fields(cls, json.loads(text)))

    def to_error(self) -> RankFailure:
        """Convert the record back into an error."""
        failure = RankFailure(self.what, rank=self.rank, where=self.where, rule=self.rule, fix=self.fix)
        failure.exit_code = self.exit_code
        return failure


def known_fields(table: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Select the fields that exist in this version of a dataclass from fields that another host has written."""
    return {name: fields[name] for name in table.__dataclass_fields__.keys() & fields.keys()}  # type: ignore[attr-defined]


def assign_ranks(available: Mapping[int, int], total: int, blamed: int | None) -> dict[int, int]:
    """Distribute `total` ranks over the hosts. The blamed host loses ranks first, then the hosts with the highest numbers.

    Args:
        available: maximum number of ranks of each host; the sum is at least `total`.
        blamed: host of the rank that caused the last failure.

    Returns:
        Number of ranks of each host.
    """
    assignment, surplus = dict(available), sum(available.values()) - total
    order = sorted(available, key=lambda host: (host != blamed, -host))
    for host in order:
        removed = min(surplus, assignment[host] - (host == 0))  # rank 0 runs on host 0, which serves the stores
        assignment[host], surplus = assignment[host] - removed, surplus - removed
    return assignment
