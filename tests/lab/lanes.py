"""Scheduling of tests: parts and slices, exclusive tests, recorded times, and the table of the slowest tests."""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lab import marks
from tests.lab.budget import (
    BUDGET_SECONDS,
    SLICE_SECONDS,
    Candidate,
    Durations,
    choose,
    read_durations,
    seconds_of,
    slices,
    split_id,
    write_durations,
)

SLOWEST = 25
"""Rows of the table of the slowest tests."""
SLOW_SECONDS = 20.0
"""Limit above which a test of `make test` needs the mark slow(reason)."""
WORKERS = 2
"""Workers on the reference machine."""
SLOWNESS = "weft/slowness"
"""Key of pytest's cache: seconds of the tests of the last run of at least one slice, by the recorded ones."""
SELECTION = pytest.StashKey[str]()
"""Line about the slices of a run."""
COLLECTED = pytest.StashKey[set[str]]()
"""Ids of the tests that -k, -m and the paths select, before a part of them is chosen."""
STARTED = pytest.StashKey[tuple[float, float]]()
"""CPU and wall time at the start of a test."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


# Parts of the tests


def add_options(parser: pytest.Parser) -> None:
    """Add the options that choose a part of the tests."""
    group = parser.getgroup("weft")
    group.addoption("--part", choices=["test", "sweep", "all"], default="test", help="make test, the sweep, or both")
    group.addoption("--budget", type=float, default=BUDGET_SECONDS, help="recorded seconds of the part test")
    group.addoption("--slice", default="all", metavar="K", help="only slice K, or K/N: slice K of N, of the sweep")
    group.addoption("--minutes", type=float, help="slices that end in these minutes, beginning with K; at least one")
    group.addoption("--record", action="store_true", help="write the seconds of each test to tests/durations.json")


def keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts and slices.

    Raises:
        pytest.UsageError: unknown slice.
    """
    config.stash[COLLECTED] = {item.nodeid for item in items}
    part, table = config.getoption("--part"), read_durations()
    if part == "all":
        return
    chosen = choose(candidates_of(items), table, config.getoption("--budget"))
    if part == "sweep":
        numbers, found = slices_of(config, [item.nodeid for item in items if item.nodeid not in chosen], table)
        chosen = {name for number in numbers for name in found[number - 1]}
        run, left = (", ".join(map(str, part)) for part in (numbers, set(range(1, len(found) + 1)) - set(numbers)))
        config.stash[SELECTION] = f"slices {run} of {len(found)}" + (f"; not run: {left}" if left else "")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def candidates_of(items: Sequence[pytest.Item]) -> list[Candidate]:
    """Collected tests by their marks. `must`: all cases of a test are in make test, or one. `effect`: its first case is."""
    found, functions = [], set()
    for item in items:
        function, _ = split_id(item.nodeid)
        is_effect = item.get_closest_marker("effect") is not None and function not in functions
        functions.add(function)
        required = is_effect or any(
            mark.kwargs.get("case") in (None, case_of(item)) for mark in item.iter_markers("must")
        )
        found.append(Candidate(item.nodeid, required, WORKERS if item.get_closest_marker("exclusive") else 1))
    return found


def case_of(item: pytest.Item) -> str:
    """Id of the parameters of a test; "" without parameters."""
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def slices_of(config: pytest.Config, tests: Sequence[str], table: Durations) -> tuple[list[int], list[list[str]]]:
    """Numbers of the slices to run, from 1, and all slices of the sweep.

    Raises:
        pytest.UsageError: unknown slice.
    """
    text, minutes = config.getoption("--slice"), config.getoption("--minutes")
    first, _, count = text.partition("/")
    if text != "all" and not (first.isdigit() and count.isdigit() >= bool(count)):
        raise pytest.UsageError(f"--slice {text}: write a number from 1, 3/8 for the third of eight slices, or all")
    found = slices(tests, table, int(count) if count else None)
    if text == "all":
        return list(range(1, len(found) + 1)), found
    if minutes is not None:
        cache = getattr(config, "cache", None)
        seconds = SLICE_SECONDS / WORKERS * float(cache.get(SLOWNESS, 1.0) if cache else 1.0)
        fitting = min(len(found), max(1, int(minutes * 60 / seconds)))
        return [(int(first) + index) % len(found) + 1 for index in range(fitting)], found
    if not 1 <= int(first) <= len(found):
        raise pytest.UsageError(f"--slice {text}: write a number from 1 to {len(found)}")
    return [int(first)], found


# Concurrency of tests


def arrange(items: list[pytest.Item]) -> None:
    """Move exclusive tests to the end, and record the reasons of slow tests for the table."""
    items.sort(
        key=lambda item: item.get_closest_marker("exclusive") is not None
    )  # stable sort: other tests stay in file order
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is not None:
            item.user_properties.append(("slow", slow.args[0]))


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Scheduler of pytest-xdist. Its process collects no tests, so it reads the marks from the files.

    Each test runs on the next free worker, except that exclusive tests run on one worker, and so do the tests of a module that
    has a module-scoped fixture or the mark `together`. (`--dist loadgroup` of xdist 3.8 has no effect under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    together, exclusive = read_marks(config.rootpath)

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if nodeid.partition("[")[0] in exclusive:
                return "exclusive"
            return path if path in together else nodeid

    return Lanes(config, log)


def read_marks(root: Path) -> tuple[set[str], set[str]]:
    """Paths of modules whose tests run on one worker, and ids of exclusive tests without their parameters."""
    together = set()
    for file in (root / "tests").rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if 'scope="module"' in text or "pytestmark = pytest.mark.together" in text:
            together.add(file.relative_to(root).as_posix())
    return together, {mark.test for mark in marks.read_marks("exclusive", root)}


@contextmanager
def lane(root: Path, exclusive: bool) -> Iterator[None]:
    """Wait for the other workers of pytest-xdist if this test, or a test of another worker, is exclusive.

    Args:
        root: root of the repository; the workers share a lock on a file in it.
        exclusive: True if no other worker may run a test at the same time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:  # one process runs one test after the other
        yield
        return
    with (root / "pyproject.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # explicit, as a rank forked in the meantime has the file open too


# Durations


def start_clock(item: pytest.Item) -> None:
    """Begin to measure a test, with --record."""
    if item.config.getoption("--record"):
        item.stash[STARTED] = cpu_seconds(os.getpid()), time.monotonic()


def stop_clock(item: pytest.Item) -> None:
    """Add the seconds of a test to the properties of its last report: CPU time with all processes, or wall time if longer."""
    if STARTED in item.stash:
        cpu, start = item.stash[STARTED]
        seconds = max(cpu_seconds(os.getpid()) - cpu, time.monotonic() - start)
        item.user_properties.append(("seconds", round(seconds, 3)))


def cpu_seconds(process: int) -> float:
    """CPU seconds of a process, its running descendants and those that have ended and been waited for."""
    total, processes = 0, [process]
    while processes:
        folder = Path("/proc") / str(processes.pop())
        with suppress(OSError):  # it has ended
            total += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for thread in (folder / "task").iterdir():
                processes += map(int, (thread / "children").read_text().split())
    return total / CLOCK_TICKS


def summarize(reporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests and the speed of the machine; with --record, write the table of seconds."""
    durations: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    seconds: dict[str, float] = {}
    skipped: set[str] = set()
    for report in (report for reports in reporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            durations[report.nodeid] += report.duration
            skipped |= {report.nodeid} if report.skipped else set()
            properties = dict(report.user_properties)
            if "slow" in properties:
                reasons[report.nodeid] = str(properties["slow"])
            if "seconds" in properties:
                seconds[report.nodeid] = float(str(properties["seconds"]))
    if not durations:
        return
    table, config = read_durations(), reporter.config
    if line := config.stash.get(SELECTION, ""):
        reporter.write_line(line)
    recorded = sum(seconds_of(name, table) for name in durations)
    slowness = durations.total() / recorded
    cache = getattr(config, "cache", None)  # not with -p no:cacheprovider
    if cache and recorded > SLICE_SECONDS:  # a few tests say little about the machine
        cache.set(SLOWNESS, slowness)
    title = f"{min(SLOWEST, len(durations))} slowest of {len(durations)} tests, {durations.total():.0f} s in all"
    reporter.section(f"{title}, {slowness:.1f} times the recorded seconds")
    for line in lines_of(durations.most_common(SLOWEST), reasons):
        reporter.write_line(line)
    if config.getoption("--record"):
        measured = {name: value for name, value in seconds.items() if name not in skipped}
        write_durations(measured, marks.list_functions(config.rootpath))


def lines_of(slowest: Sequence[tuple[str, float]], reasons: dict[str, str]) -> list[str]:
    """Text lines of the table of the slowest tests."""
    lines = []
    for nodeid, seconds in slowest:
        missing = f"above {SLOW_SECONDS:.0f} s without a reason" if seconds > SLOW_SECONDS else ""
        reason = reasons.get(nodeid, missing)
        lines.append(f"{seconds:6.1f} s  {nodeid}" + (f"  ({reason})" if reason else ""))
    return lines
