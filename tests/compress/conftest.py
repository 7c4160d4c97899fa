"""Fixtures of tests of compressed models."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.compress.fresh import FreshTransformers
from weft.compress import run
from weft.compress.measure import PlainTransformers


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshTransformers]:
    """Processes with plain Transformers, and without Weft."""
    with FreshTransformers() as found:
        yield found


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainTransformers]:
    """Process with plain Transformers, as each compression starts one."""
    with PlainTransformers() as found:
        yield found


@pytest.fixture(autouse=True)
def _one_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all compressions of the tests use one process with plain Transformers, which saves its seconds of imports."""
    monkeypatch.setattr(run, "PlainTransformers", lambda: nullcontext(request.getfixturevalue("plain")))
