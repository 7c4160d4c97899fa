"""All judgements of `weft doctor`, and its table and JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from weft.observe.doctor.clocks import judge_clocks
from weft.observe.doctor.devices import judge_devices, judge_network
from weft.observe.doctor.finding import LEVELS, Facts, Finding, merge, unreadable
from weft.observe.doctor.folders import judge_folders
from weft.observe.doctor.limits import judge_limits, judge_memory
from weft.observe.doctor.names import judge_names
from weft.observe.doctor.paths import judge_paths
from weft.observe.doctor.processor import judge_processor
from weft.observe.doctor.same import judge_job, judge_versions
from weft.observe.doctor.speed import judge_links, judge_speed
from weft.topology.topology import save_text

BEFORE_RANKS = (
    judge_versions,
    judge_job,
    judge_paths,
    judge_names,
    judge_folders,
    judge_limits,
    judge_memory,
    judge_processor,
    judge_devices,
    judge_network,
)
WITH_RANKS = (judge_clocks, judge_speed, judge_links)
PREVENT_RANKS = ("version", "path", "path MTU")  # checks whose red findings let the ranks hang or fail

STYLES = {"red": "bold red", "yellow": "yellow", "green": "green", "skipped": "dim"}


def judge(hosts: Sequence[Facts]) -> list[Finding]:
    """Findings of all checks, red first, then yellow, green and skipped.

    Args:
        hosts: facts of all hosts, in host order.
    """
    findings = [*unreadable(hosts), *(finding for check in (*BEFORE_RANKS, *WITH_RANKS) for finding in check(hosts))]
    findings += [Finding("skipped", name, reason) for name, reason in (hosts[0].get("skipped") or {}).items()]
    return sorted(merge(findings), key=lambda finding: LEVELS.index(finding.level))


def reason_against_ranks(hosts: Sequence[Facts]) -> str | None:
    """Reason why ranks of these hosts would hang or fail; None if they can be started."""
    findings = [finding for check in (judge_versions, judge_paths) for finding in check(hosts)]
    blocking = [finding for finding in findings if finding.level == "red" and finding.check in PREVENT_RANKS]
    return f"not measured, because ranks cannot run together: {blocking[0].text}" if blocking else None


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if a finding is red, else 0."""
    return int(any(finding.level == "red" for finding in findings))


def count_levels(findings: Sequence[Finding]) -> str:
    """Text such as "1 red, 2 yellow, 12 green"."""
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level] or level == "red")


def print_findings(findings: Sequence[Finding], title: str, everything: bool) -> None:
    """Print one table, red first; green and skipped checks are counted, or listed with `everything`."""
    console = Console(highlight=False, soft_wrap=False)
    shown = [finding for finding in findings if everything or finding.level in ("red", "yellow")]
    console.print(f"{title}: {count_levels(findings)}", markup=False)
    if shown:
        table = Table(Column("", no_wrap=True), Column("check", no_wrap=True), "finding", "fix", show_lines=True)
        for finding in shown:
            cells = (finding.level, finding.check, finding.text, finding.fix)
            table.add_row(
                *(cell.replace("[", "\\[") for cell in cells), style=None if everything else STYLES[finding.level]
            )
        console.print(table)
    if not everything and len(shown) < len(findings):
        console.print("--all lists the green and the skipped checks", markup=False)


def write_findings(findings: Sequence[Finding], hosts: Sequence[Facts], path: Path) -> None:
    """Write all findings and the facts of all hosts as JSON."""
    content = {
        "exit_code": exit_code(findings),
        "findings": [finding.to_json() for finding in findings],
        "hosts": list(hosts),
    }
    save_text(json.dumps(content, indent=1), path)
