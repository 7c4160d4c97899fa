"""Each key of a job has a test that observes its effect on a run."""

import pytest

from tests.lab.marks import read_marks
from weft.job import keys

WITHOUT_EFFECT = {
    "plan.prediction": "written by `weft plan` for a reader; training does not read it",
}
"""Keys that are output and not settings, with the reason."""


def test_every_key_has_an_observed_effect() -> None:
    observed = {str(mark.arguments[0]) for mark in read_marks("effect")}
    assert observed - set(keys()) == set()
    assert set(keys()) - observed - set(WITHOUT_EFFECT) == set()


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_exceptions_are_keys(key: str) -> None:
    assert key in keys()
