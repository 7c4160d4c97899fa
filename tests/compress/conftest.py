"""Fixture of tests of compressed models."""

from collections.abc import Iterator

import pytest

from tests.compress.fresh import FreshTransformers


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshTransformers]:
    """Processes with plain Transformers, and without Weft."""
    with FreshTransformers() as found:
        yield found
