"""Division of the tests: which run beside which, in which slice of the sweep, and how long each takes."""

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

SLICES = 4
"""Slices of the sweep: as many that one takes less than ten minutes on two cores."""
SLOWEST = 25
"""Rows of the table of times."""
SLOW_SECONDS = 20.0
"""A test of `make test` that takes longer gives its reason: the mark slow(reason)."""


# Which tests run


def slice_of(nodeid: str) -> int:
    """Slice of the sweep, from 1: by a hash of the test's id, so that another test does not move it."""
    return zlib.crc32(nodeid.encode()) % SLICES + 1


def keep_slice(config: pytest.Config, items: list[pytest.Item], chosen: str | None) -> None:
    """Deselect the tests of all other slices.

    Raises:
        pytest.UsageError: there is no such slice.
    """
    if chosen in (None, "all"):
        return
    if chosen not in map(str, range(1, SLICES + 1)):
        raise pytest.UsageError(f"--slice {chosen}: write a number from 1 to {SLICES}, or all")
    others = [item for item in items if slice_of(item.nodeid) != int(chosen)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if slice_of(item.nodeid) == int(chosen)]


# Which run beside which


def arrange(items: list[pytest.Item]) -> None:
    """Put exclusive tests last, and note the reasons of slow ones for the table of times."""
    items.sort(key=lambda item: item.get_closest_marker("exclusive") is not None)  # stable: else the order of the files
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is not None:
            item.user_properties.append(("slow", slow.args[0]))


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler of pytest-xdist, in the process that collects nothing: it reads the marks from the files.

    Each test goes to the next worker that is free, but that exclusive tests stay in one, and so do the tests of a module that
    has a fixture of its scope, or is marked together. (`--dist loadgroup` of xdist 3.8 has no effect under pytest 9.2.)
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
    """Paths of the modules whose tests stay together, and ids of exclusive tests without their parameters."""
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
    """Wait for the other workers of pytest-xdist where a test, theirs or this one, is exclusive.

    Args:
        root: of the repository; the workers share a lock on a file in it.
        exclusive: whether the others must have no test under way.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:  # one process runs one test after the other
        yield
        return
    with (root / "pyproject.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a rank that was forked meanwhile has the file open, too


# How long they take


def print_slowest(reporter: pytest.TerminalReporter) -> None:
    """A table of the slowest tests: seconds of setup, call and teardown together, and the reason of those above the limit."""
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
    """Lines of the table."""
    lines = []
    for nodeid, seconds in slowest:
        missing = f"above {SLOW_SECONDS:.0f} s without a reason" if seconds > SLOW_SECONDS else ""
        reason = reasons.get(nodeid, missing)
        lines.append(f"{seconds:6.1f} s  {nodeid}" + (f"  ({reason})" if reason else ""))
    return lines
