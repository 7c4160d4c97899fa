"""Choice of the tests of `make test` by their recorded times; all others are the sweep.

Tests with the mark `must`, and the first case of tests with the mark `effect`, are always in `make test`. The others are
added in the order of their cost until the budget is full. The cost is the seconds of a test times its number among the cases of
its function: the first case of a test is worth more than the hundredth.

Times are CPU seconds of a test and its ranks, or its wall time if that is longer, on a reference machine. `make durations`
measures them, and writes tests/durations.json.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "durations.json"
BUDGET_SECONDS = 650.0
"""Seconds of all tests of `make test` together, which two workers share. Each worker also imports and collects for 15 s."""
UNKNOWN_SECONDS = 5.0
"""Seconds of a test of which no case has been recorded."""
SLICE_SECONDS = 360.0
"""Seconds of a slice of the sweep: three minutes of two workers."""


class Candidate(NamedTuple):
    """A collected test."""

    id: str
    is_required: bool = False
    workers: int = 1
    """Workers that wait for its end: all for an exclusive test."""


Durations = dict[str, dict[str, float]]
"""Seconds by path::function and by parameters, which are "" for a test without."""


def read_durations(path: Path = TABLE) -> Durations:
    """Recorded seconds of tests."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_durations(seconds: Mapping[str, float], functions: Container[str] | None = None, path: Path = TABLE) -> None:
    """Add recorded seconds to the table.

    Args:
        seconds: seconds by id of a test.
        functions: path::function of all tests, to drop those that no longer exist; None: keep all.
        path: table.
    """
    table = read_durations(path)
    for name, value in seconds.items():
        function, case = split_id(name)
        table.setdefault(function, {})[case] = float(f"{max(value, 0.01):.2g}")
    table = {
        name: dict(sorted(table[name].items())) for name in sorted(table) if functions is None or name in functions
    }
    lines = [f"  {json.dumps(function)}: {json.dumps(cases)}" for function, cases in table.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def split_id(test: str) -> tuple[str, str]:
    """Path::function and parameters of a test id."""
    function, bracket, case = test.partition("[")
    return function, case.removesuffix("]") if bracket else ""


def seconds_of(test: str, table: Durations) -> float:
    """Recorded seconds of a test; else the mean of the recorded cases of its function; else UNKNOWN_SECONDS."""
    function, case = split_id(test)
    cases = table.get(function, {})
    mean = sum(cases.values()) / len(cases) if cases else UNKNOWN_SECONDS
    return cases.get(case, mean)


def choose(tests: Sequence[Candidate], table: Durations, budget: float = BUDGET_SECONDS) -> set[str]:
    """Ids of the tests of `make test`.

    Args:
        tests: collected tests, in the order of collection.
        table: recorded seconds.
        budget: seconds of all chosen tests together, which required tests alone may exceed.
    """
    chosen = {test.id for test in tests if test.is_required}
    left = budget - total_seconds([test for test in tests if test.is_required], table)
    cases: Counter[str] = Counter()
    costs: list[tuple[float, int, Candidate]] = []
    for index, test in enumerate(tests):
        function, _ = split_id(test.id)
        cases[function] += 1
        costs.append((total_seconds([test], table) * cases[function], index, test))
    for _, _, test in sorted(costs):
        seconds = total_seconds([test], table)
        if test.id not in chosen and seconds <= left:
            chosen.add(test.id)
            left -= seconds
    return chosen


def total_seconds(tests: Iterable[Candidate], table: Durations) -> float:
    """Recorded seconds of the workers that tests take."""
    return sum(seconds_of(test.id, table) * test.workers for test in tests)


def slices(tests: Sequence[str], table: Durations, count: int | None = None) -> list[list[str]]:
    """Slices of the sweep of equal length: the longest test goes to the slice with the fewest seconds.

    Args:
        tests: ids of the tests of the sweep.
        table: recorded seconds.
        count: number of slices; default: as many as take SLICE_SECONDS each.
    """
    order = sorted(tests, key=lambda test: (-seconds_of(test, table), test))
    count = count or max(1, round(sum(seconds_of(test, table) for test in order) / SLICE_SECONDS))
    found: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for test in order:
        index = totals.index(min(totals))
        found[index].append(test)
        totals[index] += seconds_of(test, table)
    return found
