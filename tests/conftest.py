"""Test configuration; tests/README.md explains how tests are divided and run.

The test process imports torch and stays single-threaded before any rank is forked from it.
"""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads on few cores slow each other down
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
settings.load_profile("ci")  # deterministic examples; --hypothesis-profile=default draws random examples


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", metavar="K", help=f"run only slice K of {lanes.SLICES} of the selected tests; 'all' runs all slices"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move thinned-out tests to the sweep and exclusive tests to the end, and keep one slice of the sweep."""
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
    gc.freeze()  # the collector, also that of forked ranks, need not scan a million objects of libraries


@pytest.hookimpl(optionalhook=True)  # defined by pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.make_scheduler(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run an exclusive test while no other test of the same run is active."""
    with lanes.lane(item.config.rootpath, exclusive=item.get_closest_marker("exclusive") is not None):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest tests."""
    lanes.print_slowest(terminalreporter)


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Close the rank pools at the end of the session."""
    yield
    close_pools()
