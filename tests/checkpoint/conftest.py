"""Fixtures of tests that also compress."""

from tests.compress.conftest import _one_process, plain  # noqa: F401
