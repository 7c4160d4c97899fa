"""Makes the test process warm and quiet, before any rank is forked from it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # two threads that spin for work on few cores slow each other down
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers  # noqa: F401

from tests.lab.pool import close_pools

torch.set_num_threads(1)  # a fork after a multi-threaded operation hangs in the child


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked thin(n), `make test` runs every n-th case, and `make sweep` the others."""
    counts: Counter[str] = Counter()
    for item in items:
        thin = item.get_closest_marker("thin")
        if thin is not None:
            name = item.nodeid.partition("[")[0]
            if counts[name] % thin.args[0]:
                item.add_marker("sweep")
            counts[name] += 1


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Ranks live until the end of the session."""
    yield
    close_pools()
