"""Scheduling of tests: slices of the sweep, exclusive tests, and the table of the slowest tests."""

import ast
import fcntl
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SLICES = 40
"""Number of slices of the sweep, so that one slice takes about six minutes on two cores with AVX2."""
SLOWEST = 25
"""Rows of the table of the slowest tests."""
SLOW_SECONDS = 20.0
"""Limit above which a test of `make test` needs the mark slow(reason)."""


# Slices of the sweep


def slice_of(nodeid: str) -> int:
    """Slice of a test, from 1, by a hash of its id, so that a new test moves no other one."""
    return zlib.crc32(nodeid.encode()) % SLICES + 1


def keep_slice(config: pytest.Config, items: list[pytest.Item], chosen: str | None) -> None:
    """Deselect the tests of all other slices.

    Raises:
        pytest.UsageError: unknown slice.
    """
    if chosen in (None, "all"):
        return
    if chosen not in map(str, range(1, SLICES + 1)):
        raise pytest.UsageError(f"--slice {chosen}: write a number from 1 to {SLICES}, or all")
    deselected = [item for item in items if slice_of(item.nodeid) != int(chosen)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if slice_of(item.nodeid) == int(chosen)]


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
    together, exclusive = set(), set()
    for file in sorted((root / "tests").rglob("test_*.py")):
        text, path = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
        if 'scope="module"' in text or "pytestmark = pytest.mark.together" in text:
            together.add(path)
        if "mark.exclusive" in text:
            functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            for function in functions:
                if any("mark.exclusive" in ast.unparse(decorator) for decorator in function.decorator_list):
                    exclusive.add(f"{path}::{function.name}")
    return together, exclusive


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


def print_slowest(reporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests: seconds of setup, call and teardown, and the reason of tests above the limit."""
    seconds: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for report in (report for reports in reporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
            for name, value in report.user_properties:
                if name == "slow":
                    reasons[report.nodeid] = str(value)
    if not seconds:
        return
    reporter.section(f"{min(SLOWEST, len(seconds))} slowest of {len(seconds)} tests, {seconds.total():.0f} s in all")
    for line in lines_of(seconds.most_common(SLOWEST), reasons):
        reporter.write_line(line)


def lines_of(slowest: Sequence[tuple[str, float]], reasons: dict[str, str]) -> list[str]:
    """Text lines of the table of the slowest tests."""
    lines = []
    for nodeid, seconds in slowest:
        missing = f"above {SLOW_SECONDS:.0f} s without a reason" if seconds > SLOW_SECONDS else ""
        reason = reasons.get(nodeid, missing)
        lines.append(f"{seconds:6.1f} s  {nodeid}" + (f"  ({reason})" if reason else ""))
    return lines
