"""Parts and lanes of tests, recorded times, and the table of slow tests."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.budget import (
    BUDGET_SECONDS,
    UNKNOWN_SECONDS,
    Candidate,
    choose,
    read_durations,
    seconds_of,
    slices,
    total_seconds,
    write_durations,
)
from tests.lab.lanes import candidates_of, cpu_seconds, lane, lines_of, read_marks


@pytest.mark.must("proof: budget of make test")
def test_make_test_keeps_its_budget(request: pytest.FixtureRequest) -> None:
    """Fails where required tests, and new ones without recorded times, take more than the budget."""
    if request.config.getoption("--part") != "test":
        pytest.skip("the tests of this session are others than those of make test")
    assert total_seconds(candidates_of(request.session.items), read_durations()) <= BUDGET_SECONDS


def test_budget_is_filled_with_the_first_cases_of_quick_tests() -> None:
    table = {"a": {"0": 2.0, "1": 2.0, "2": 2.0}, "b": {"": 3.0}, "c": {"": 9.0}, "d": {"": 1.0}}
    tests = [Candidate(name) for name in ("a[0]", "a[1]", "a[2]", "b", "c", "d", "new")]
    assert choose(tests, table, 6.0) == {"d", "a[0]", "b"}
    assert choose(tests, table, 8.0) == {"d", "a[0]", "b", "a[1]"}
    assert choose(tests, table, 10.0) == {
        "d",
        "a[0]",
        "b",
        "a[1]",
        "a[2]",
    }  # quicker than the new test, which does not fit
    assert choose(tests, table, 13.0) == {"d", "a[0]", "b", "a[1]", "new"}
    assert choose(tests, table, 100.0) == {test.id for test in tests}


def test_required_tests_are_chosen_whatever_their_time() -> None:
    tests = [Candidate("a"), Candidate("b", is_required=True), Candidate("c", is_required=True, workers=2)]
    assert choose(tests, {"a": {"": 1.0}, "b": {"": 50.0}, "c": {"": 1.0}}, 10.0) == {"b", "c"}
    assert choose(tests, {"a": {"": 1.0}, "b": {"": 7.0}, "c": {"": 1.0}}, 10.0) == {"a", "b", "c"}


def test_a_case_without_a_record_counts_as_the_others_of_its_function() -> None:
    table = {"a": {"0": 2.0, "1": 4.0}}
    assert seconds_of("a[1]", table) == 4.0
    assert seconds_of("a[new]", table) == 3.0
    assert seconds_of("b", table) == UNKNOWN_SECONDS


def test_recorded_times_are_merged_and_those_of_removed_tests_dropped(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    write_durations({"f::a[x]": 1.234, "f::b": 0.001}, None, path)
    assert read_durations(path) == {"f::a": {"x": 1.2}, "f::b": {"": 0.01}}
    write_durations({"f::a[y-[1]]": 3.0}, None, path)
    assert read_durations(path) == {"f::a": {"x": 1.2, "y-[1]": 3.0}, "f::b": {"": 0.01}}
    write_durations({}, ["f::b"], path)
    assert read_durations(path) == {"f::b": {"": 0.01}}


def test_slices_have_equal_lengths_and_all_tests() -> None:
    table = {"f": {str(number): 1.0 + number % 7 for number in range(500)}}
    tests = [f"f[{number}]" for number in range(500)]
    found = slices(tests, table, 8)
    totals = [sum(seconds_of(test, table) for test in part) for part in found]
    assert max(totals) - min(totals) <= 7.0
    assert sorted(test for part in found for test in part) == sorted(tests)
    assert slices(list(reversed(tests)), table, 8) == found
    assert len(slices(tests, table)) == round(sum(totals) / 360)


def test_seconds_of_a_test_are_those_of_all_its_processes() -> None:
    before = cpu_seconds(os.getpid())
    subprocess.run(["python3", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert cpu_seconds(os.getpid()) - before >= 0.25


def test_marks_are_read_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    head = "import pytest\n\n\n"
    (tmp_path / "tests/test_a.py").write_text(f'{head}@pytest.fixture(scope="module")\ndef made(): ...\n')
    marks = '@pytest.mark.exclusive("measures times")\n@pytest.mark.parametrize(\n    "x", [1]\n)\n'
    (tmp_path / "tests/test_b.py").write_text(f"{head}{marks}def test_one(x): ...\n\n\ndef test_two(): ...\n")
    (tmp_path / "tests/test_c.py").write_text(f"{head}pytestmark = pytest.mark.together\n")
    assert read_marks(tmp_path) == ({"tests/test_a.py", "tests/test_c.py"}, {"tests/test_b.py::test_one"})


def can_lock(root: Path, mode: int) -> bool:
    """True if a test of another worker could start."""
    with (root / "pyproject.toml").open() as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        return True


def test_exclusive_test_waits_for_running_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    (tmp_path / "pyproject.toml").touch()
    with lane(tmp_path, exclusive=False):
        assert can_lock(tmp_path, fcntl.LOCK_SH)
        assert not can_lock(tmp_path, fcntl.LOCK_EX)
    assert can_lock(tmp_path, fcntl.LOCK_EX)


def test_tests_wait_for_an_exclusive_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    (tmp_path / "pyproject.toml").touch()
    with lane(tmp_path, exclusive=True):
        assert not can_lock(tmp_path, fcntl.LOCK_SH)
    assert can_lock(tmp_path, fcntl.LOCK_SH)


def test_table_shows_reasons_and_asks_for_missing_reasons() -> None:
    lines = lines_of([("a::slow", 30.0), ("b::slow", 21.5), ("c::quick", 3.25)], {"a::slow": "trains a real model"})
    assert lines == [
        "  30.0 s  a::slow  (trains a real model)",
        "  21.5 s  b::slow  (above 20 s without a reason)",
        "   3.2 s  c::quick",
    ]
