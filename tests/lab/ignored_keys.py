"""Negative control of the tests of effects: each of them must fail where its key is ignored.

    pytest -n 0 -p tests.lab.ignored_keys tests/effects

Runs each test once for each of its keys, with the key set back to its default on the way into `weft.planner.train.train`. A
test that passes then observes no effect. Tests that start processes of their own are not changed, and pass.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weft.job import Job
from weft.plan import Table
from weft.planner import train as train_module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each of its keys."""
    keys = [mark.args[0] for mark in metafunc.definition.iter_markers("effect")]
    metafunc.parametrize("ignored_key", keys, indirect=True)


@pytest.fixture(autouse=True)
def ignored_key(request: pytest.FixtureRequest) -> Iterator[str]:
    """Key that training ignores."""
    train = train_module.train

    def ignoring(job: Job, **options: Any) -> Path:
        return train(without(job, request.param.split(".")), **options)

    with mock.patch.object(train_module, "train", ignoring):
        yield request.param


def without(table: Any, names: list[str]) -> Any:
    """Copy of a table of settings with one key, by its names from the outer table on, at its default."""
    name, *rest = names
    value = getattr(table, name)
    if rest and isinstance(value, Table):
        return table.model_copy(update={name: without(value, rest)})
    return table.model_copy(update={name: type(table).model_fields[name].get_default(call_default_factory=True)})
