"""Configuration of the tests; tests/README.md explains how they are divided and run.

The test process is warm and quiet before any rank is forked from it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # two threads that spin for work on few cores slow each other down
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers  # noqa: F401
from hypothesis import settings

from tests.lab import lanes
from tests.lab.pool import close_pools

torch.set_num_threads(1)  # a fork after a multi-threaded operation hangs in the child
settings.load_profile("ci")  # the same examples each time; --hypothesis-profile=default draws others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", metavar="K", help=f"of the tests to run, slice K of {lanes.SLICES}; 'all' for all of them"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Divide the tests: what is thinned out goes to the sweep, exclusive tests to the end, and of the sweep one slice stays."""
    counts: Counter[str] = Counter()
    for item in items:
        thin = item.get_closest_marker("thin")
        if thin is not None:
            name = item.nodeid.partition("[")[0]
            if counts[name] % thin.args[0]:
                item.add_marker("sweep")
            counts[name] += 1
    lanes.keep_slice(config, items, config.getoption("--slice"))
    lanes.arrange(items)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.make_scheduler(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run an exclusive test beside no other test of the same run."""
    with lanes.lane(item.config.rootpath, exclusive=item.get_closest_marker("exclusive") is not None):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests."""
    lanes.print_slowest(terminalreporter)


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Ranks live until the end of the session."""
    yield
    close_pools()
