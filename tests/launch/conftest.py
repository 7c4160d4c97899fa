"""Fixtures of tests that launch ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.script_rank import script_server
from weft.launch.forkserver import ForkServer
from weft.launch.scratch import scratch_folder
from weft.launch.store import SocketStore, StoreServer


@pytest.fixture(scope="session")
def scripts() -> Iterator[ForkServer]:
    """Fork server of ranks that run a script with torch and weft."""
    with script_server() as server:
        yield server


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder for sockets."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture
def store(folder: Path) -> Iterator[SocketStore]:
    """The store "ranks" of host 0."""
    with StoreServer(folder / "store"):
        yield SocketStore(folder / "store")
