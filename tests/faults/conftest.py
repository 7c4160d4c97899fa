"""Fixture of tests of faults."""

import pytest

from weft.launch import agent


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of this process kill ranks that wait for a lost rank after one second instead of five."""
    monkeypatch.setattr(agent, "SECONDS_TO_END_AFTER_FAILURE", 1)
