"""Fixtures of tests of faults."""

import json
from collections.abc import Iterator

import fsspec.config
import pytest

from tests.lab.object_store import ObjectStore, serving
from weft import object_store
from weft.launch import agent
from weft.object_store import StoreFolder


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of this process kill ranks that wait for a lost rank after one second instead of five."""
    monkeypatch.setattr(agent, "SECONDS_TO_END_AFTER_FAILURE", 1)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with serving() as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Empty store without faults, for this process and its forks."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", json.loads(server.environment["FSSPEC_S3"]))
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    server.plant(0.0)
    yield server
    server.plant(0.0)
    bucket = StoreFolder("s3://bucket")
    for name in bucket.names():
        bucket.fs.rm(bucket.path(name), recursive=True)
