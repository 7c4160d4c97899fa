"""Test configuration; tests/README.md explains how tests are divided and run.

The test process imports torch and stays single-threaded before any rank is forked from it.
"""

import gc
import os
import threading

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads on few cores slow each other down
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers  # noqa: F401
from hypothesis import settings
from tqdm import tqdm

from tests.lab import lanes
from tests.lab.pool import close_pools

torch.set_num_threads(1)  # a fork after a multi-threaded operation hangs in the child
tqdm.set_lock(threading.RLock())  # that of tqdm is shared with forks: one that is killed would hold it for ever
tqdm.monitor_interval = 0  # so does a fork while the thread that watches progress bars holds their lock
settings.load_profile("ci")  # deterministic examples; --hypothesis-profile=default draws random examples


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_options(parser)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests, and move exclusive tests to the end."""
    lanes.keep_part(config, items)
    lanes.arrange(items)
    gc.freeze()  # the collector, also that of forked ranks, need not scan a million objects of libraries


@pytest.hookimpl(optionalhook=True)  # defined by pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.make_scheduler(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run an exclusive test while no other test of the same run is active."""
    with lanes.lane(item.config.rootpath, exclusive=item.get_closest_marker("exclusive") is not None):
        lanes.start_clock(item)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Add the seconds of a test to its last report."""
    try:
        return (yield)
    finally:
        lanes.stop_clock(item)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the line about slices from a worker of pytest-xdist to the process that prints."""
    if output := getattr(session.config, "workeroutput", None):
        output["selection"] = session.config.stash.get(lanes.SELECTION, "")


@pytest.hookimpl(optionalhook=True)  # defined by pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Keep the line that a worker has sent."""
    node.config.stash[lanes.SELECTION] = getattr(node, "workeroutput", {}).get("selection", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests, and write recorded times."""
    lanes.summarize(terminalreporter)


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Close the rank pools at the end of the session."""
    yield
    close_pools()
