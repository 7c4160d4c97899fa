"""Mismatched collectives raise CommunicationError where the backend would abort; matching calls are compared once."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lab.pool import run_ranks
from weft.comm.desync_check import DesyncCheck
from weft.errors import CommunicationError


def disagree(rank: int, ranks: int, kind: str) -> str:
    group = dist.new_group(backend="gloo")
    try:
        with DesyncCheck(kind, timedelta(seconds=1)):
            dist.all_reduce(torch.ones(5), group=group)
            if kind == "size":
                dist.all_reduce(torch.ones(3 + rank), group=group)
            elif kind == "dtype":
                dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32), group=group)
            elif kind == "order" and rank == 0:
                dist.broadcast(torch.ones(3), group=group, group_src=0)
            elif kind == "order":
                dist.all_reduce(torch.ones(3), group=group)
            elif rank == 0:
                dist.all_reduce(torch.ones(7), group=group)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [("size", ["[3] float32", "[4] float32"]), ("dtype", ["float64"]), ("order", ["broadcast", "all_reduce"])],
)
def test_mismatch_is_an_error_on_every_rank(kind: str, words: list[str]) -> None:
    for text in run_ranks(2, disagree, kind):
        assert all(word in text for word in words)
        assert "called at test_desync_check.py" in text


def test_missing_rank_is_named() -> None:
    first, second = run_ranks(2, disagree, "alone")
    assert "rank 1 of the group made no new call" in first
    assert second == "no error"


def agree(rank: int, ranks: int) -> int:
    group = dist.new_group(backend="gloo")
    with DesyncCheck("agree") as check:
        for _ in range(3):
            dist.all_reduce(torch.ones(5), group=group)
            splits = [1, 2] if rank else [3, 1]
            dist.all_to_all_single(torch.empty(sum(splits), 2), torch.ones(sum(splits), 2), splits, splits, group)
    return len(check.seen)


def test_each_kind_of_call_is_compared_once() -> None:
    assert run_ranks(2, agree) == [2, 2]


class CountedStore:
    """Store that counts the keys of its requests."""

    def __init__(self, store: Any):
        self.store, self.keys = store, 0

    def __getattr__(self, name: str) -> Any:
        def request(keys: Any, *arguments: Any) -> Any:
            self.keys += len(keys) if isinstance(keys, list) else 1
            return getattr(self.store, name)(keys, *arguments)

        return request


def count_keys(rank: int, ranks: int) -> int:
    """Keys that the ranks of a group ask for, for one new kind of call."""
    group = dist.new_group(backend="gloo")
    store = CountedStore(group.get_group_store())
    seen = SimpleNamespace(
        group_name="seen", group_desc="", size=group.size, rank=group.rank, get_group_store=lambda: store
    )
    with mock.patch("weft.comm.desync_check.find_group", return_value=seen), DesyncCheck("counted"):
        dist.all_reduce(torch.ones(5), group=group)
    total = torch.tensor(store.keys)
    dist.all_reduce(total)
    return int(total)


def test_requests_grow_with_the_ranks_and_not_with_their_square() -> None:
    two, four = run_ranks(2, count_keys)[0], run_ranks(4, count_keys)[0]
    assert (two, four) == (5 * 2 + 1, 5 * 4 + 1)


def differ(rank: int, ranks: int) -> str:
    group = dist.new_group(backend="gloo")
    try:
        with DesyncCheck("differ", timedelta(seconds=5)):
            dist.all_reduce(torch.ones(3 + (rank == 2)), group=group)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_every_rank_names_one_that_calls_something_else() -> None:
    named = [text.partition(";")[2].partition("\n")[0] for text in run_ranks(4, differ)]
    others = " rank 2 of the group calls all_reduce of [4] float32"
    assert named == [others, others, " rank 0 of the group calls all_reduce of [3] float32", others]
