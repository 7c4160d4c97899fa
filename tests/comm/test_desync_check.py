"""Ranks that disagree get a typed error from a back end that would abort; ranks that agree pay once for each kind of call."""

from datetime import timedelta

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
            elif kind == "format":
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
    [("size", ["[3] float32", "[4] float32"]), ("format", ["float64"]), ("order", ["broadcast", "all_reduce"])],
)
def test_a_disagreement_is_an_error_on_every_rank(kind: str, words: list[str]) -> None:
    for text in run_ranks(2, disagree, kind):
        assert all(word in text for word in words)
        assert "called at test_agreement.py" in text


def test_a_rank_that_does_not_come() -> None:
    first, second = run_ranks(2, disagree, "alone")
    assert "rank 1 of the group did not call anything new" in first
    assert second == "no error"


def agree(rank: int, ranks: int) -> int:
    group = dist.new_group(backend="gloo")
    with DesyncCheck("agree") as agreement:
        for _ in range(3):
            dist.all_reduce(torch.ones(5), group=group)
            sends = [1, 2] if rank else [3, 1]
            takes = [1, 2] if rank else [3, 1]
            dist.all_to_all_single(torch.empty(sum(takes), 2), torch.ones(sum(sends), 2), takes, sends, group)
    return len(agreement.seen)


def test_agreement_costs_once() -> None:
    assert run_ranks(2, agree) == [2, 2]
