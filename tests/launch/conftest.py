"""Fixtures of tests that launch ranks."""

from collections.abc import Iterator

import pytest

from tests.lab.script_rank import script_server
from weft.launch.forkserver import ForkServer


@pytest.fixture(scope="session")
def scripts() -> Iterator[ForkServer]:
    """Fork server of ranks that run a script with torch and weft."""
    with script_server() as server:
        yield server
