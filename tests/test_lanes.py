"""Slices and lanes of tests, and the table of slow tests."""

import fcntl
from pathlib import Path

import pytest

from tests.lab.lanes import SLICES, lane, lines_of, read_marks, slice_of


def test_slice_depends_only_on_the_test_id() -> None:
    """Slices have about equal sizes, and other tests do not change the slice of a test."""
    ids = [f"tests/parallel/test_axes.py::test_float32[llama-{number}]" for number in range(100 * SLICES)]
    slices = [slice_of(name) for name in ids]
    assert set(slices) == set(range(1, SLICES + 1))
    assert min(slices.count(number) for number in range(1, SLICES + 1)) > 0.7 * len(ids) / SLICES
    assert [slice_of(name) for name in reversed(ids)] == slices[::-1]
    assert slice_of("tests/test_lanes.py::test") == slice_of("tests/test_lanes.py::test")


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
