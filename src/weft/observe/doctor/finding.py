"""Findings of `weft doctor`, and helpers of the functions that judge facts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Level = Literal["red", "yellow", "green", "skipped"]
LEVELS: tuple[Level, ...] = ("red", "yellow", "green", "skipped")
NAMED_HOSTS = 4  # in one finding
Facts = dict[str, Any]
"""Facts of one host by group, as JSON. A group that could not be read is {"error": text}."""


@dataclass(frozen=True)
class Finding:
    """Result of a check: red is a run that fails or is wrong, yellow is a run that may be slow or fail later."""

    level: Level
    check: str
    """Name of the check."""
    text: str
    """What was found, with its host."""
    fix: str = ""
    """Action for the user; empty for green and skipped."""
    host: str = ""
    """Label of the one host that `text` is about; empty if the text names its hosts, as after `merge`."""

    def to_json(self) -> dict[str, str]:
        """Fields of a merged finding."""
        return {"level": self.level, "check": self.check, "text": self.text, "fix": self.fix}


def read_text(path: Path) -> str:
    """Text of a file of /proc or /sys without white space around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:  # no such file, or an interface that is down
        return ""


def label(facts: Facts) -> str:
    """Name of a host in a finding."""
    return f"host {facts['host']['index']} ({facts['host']['name']})"


def group(facts: Facts, name: str) -> Any:
    """Facts of a group; None if the host does not have it."""
    found = facts.get(name)
    return None if isinstance(found, dict) and "error" in found else found


def unreadable(hosts: Sequence[Facts]) -> list[Finding]:
    """Findings of groups of facts that could not be read."""
    return [
        Finding(
            "yellow",
            name,
            f"not examined: {found['error']}",
            "report this text if the host is healthy",
            label(facts),
        )
        for facts in hosts
        for name, found in facts.items()
        if isinstance(found, dict) and "error" in found
    ]


def summarize(check: str, findings: list[Finding], examined: Sequence[Any], text: str) -> list[Finding]:
    """The findings of a check; without any, one green finding with `text`, or none if nothing was examined."""
    return findings or ([Finding("green", check, text)] if examined else [])


def differing(hosts: Sequence[Facts], read: Callable[[Facts], Any]) -> list[tuple[Any, list[Facts]]]:
    """Values of the hosts that have one, the most frequent first, with their hosts; one entry where all agree."""
    values: list[tuple[Any, list[Facts]]] = []
    for facts in hosts:
        value = read(facts)
        if value is None:
            continue
        known = next((found for known, found in values if known == value), None)
        if known is None:
            values.append((value, [facts]))
        else:
            known.append(facts)
    return sorted(values, key=lambda entry: -len(entry[1]))


def describe_values(values: list[tuple[Any, list[Facts]]]) -> str:
    """Text of `differing`: "2.13 on host 0 (a); 2.12 on host 1 (b)"."""
    return "; ".join(f"{value} on {', '.join(map(label, found))}" for value, found in values)


def merge(findings: Sequence[Finding]) -> list[Finding]:
    """Name the hosts in the texts of findings; equal findings of several hosts become one."""
    merged: dict[Finding, list[str]] = {}
    for finding in findings:
        merged.setdefault(replace(finding, host=""), []).append(finding.host)
    return [replace(finding, text=_with_hosts(finding.text, hosts)) for finding, hosts in merged.items()]


def _with_hosts(text: str, hosts: list[str]) -> str:
    if hosts[0] == "":
        return text
    shown = ", ".join(hosts[:NAMED_HOSTS])
    more = f" and {len(hosts) - NAMED_HOSTS} more hosts" if len(hosts) > NAMED_HOSTS else ""
    return f"{shown}{more}: {text}"


def size(count: float) -> str:
    """Text of a number of bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1024:.3g} KiB"
