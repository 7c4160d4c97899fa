"""Collectives of small values: the same on every kind of group, in log2(ranks) messages one after another."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backends.test_hierarchical import make_group
from tests.lab.pool import run_ranks
from weft.backends.hierarchical import TwoLevelGroup
from weft.comm.few_rounds import gather_rows, largest
from weft.comm.objects import all_gather_json, all_ranks, any_rank, run_together, same_on_all
from weft.comm.recorder import Message, Recorder
from weft.errors import JobError

LARGE = 2**62


def use_all(rank: int, ranks: int, hosts: list[int] | None) -> tuple[str, dict[str, Any]]:
    """Each collective on the group of gloo of the pool, or on a group of ranks that take themselves to be on some hosts."""
    group = make_group(rank, hosts) if hosts else dist.group.WORLD
    assert group is not None
    found = {
        "gather": gather_rows(torch.tensor([rank, -rank], dtype=torch.int32), group).tolist(),
        "json": all_gather_json("x" * rank, group),
        "largest": largest([rank, -rank, rank * (ranks - 1 - rank), LARGE + rank], group),
        "one": (any_rank(rank == ranks - 1, group), any_rank(False, group)),
        "every": (all_ranks(rank != ranks - 1, group), all_ranks(True, group)),
        "same": (same_on_all({"a": [1, "ä"]}, group), same_on_all("no" if rank == ranks - 1 else "yes", group)),
        "compared": (
            same_on_all(rank, group, counts=rank == 0),
            same_on_all(rank, group, counts=rank in (0, ranks - 1)),
        ),
    }
    return type(group).__name__, found


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        ([0], "ProcessGroup"),
        ([0, 0], "SharedMemoryGroup"),
        ([0, 1, 2], "GlooGroup"),
        ([0, 0, 1, 1], "TwoLevelGroup"),
        ([0, 0, 1, 1, 2, 2], "TwoLevelGroup"),
        ([0, 0, 0, 1, 1], "GlooGroup"),
        (None, "ProcessGroup"),
    ],
)
def test_every_kind_of_group_has_the_same_result(hosts: list[int] | None, kind: str) -> None:
    ranks = len(hosts or range(5))
    for name, found in run_ranks(ranks, use_all, hosts if ranks > 1 else None):
        assert name == kind
        assert found == {
            "gather": [[rank, -rank] for rank in range(ranks)],
            "json": ["x" * rank for rank in range(ranks)],
            "largest": [ranks - 1, 0, max(rank * (ranks - 1 - rank) for rank in range(ranks)), LARGE + ranks - 1],
            "one": (True, False),
            "every": (False, True),
            "same": (True, ranks == 1),
            "compared": (True, ranks == 1),
        }


def count(rank: int, ranks: int) -> list[list[Message]]:
    found = []
    for call in (lambda: largest([rank]), lambda: gather_rows(torch.zeros(3, dtype=torch.uint8), world())):
        with Recorder() as recorder:
            call()
        found.append(recorder.messages)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_messages_one_after_another_are_the_logarithm_of_the_ranks(ranks: int) -> None:
    for reduced, gathered in run_ranks(ranks, count):
        assert [message.operation for message in reduced + gathered] == ["send"] * 2 * math.ceil(math.log2(ranks))
        assert {message.bytes for message in reduced} == {8}
        assert sum(message.bytes for message in gathered) == 3 * (ranks - 1)  # as of a ring


def fail_on(rank: int, ranks: int, failing: list[int]) -> tuple[str, int]:
    """Text of the error on this rank, and the number of texts that it sent."""

    def attempt() -> str:
        if rank in failing:
            raise JobError(f"refused on {rank}", where="here", rule="r", fix="f")
        return "done"

    with Recorder() as recorder:
        try:
            text = run_together(attempt)
        except JobError as error:
            text = str(error)
    return text, sum(message.dtype == torch.uint8 for message in recorder.messages)


def test_texts_of_errors_are_sent_after_a_failure_only() -> None:
    assert run_ranks(3, fail_on, []) == [("done", 0)] * 3
    found = run_ranks(3, fail_on, [1, 2])
    assert {text for text, _ in found} == {str(JobError("refused on 1", where="here", rule="r", fix="f"))}
    assert all(sent > 0 for _, sent in found)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def test_a_hierarchical_group_sends_between_hosts_only_once() -> None:
    for within, between in run_ranks(4, count_of_hosts):
        assert (within, between) == (2, 2)  # of a maximum, and of a gather


def count_of_hosts(rank: int, ranks: int) -> tuple[int, int]:
    group = make_group(rank, [0, 0, 1, 1])
    assert isinstance(group, TwoLevelGroup)
    with Recorder() as recorder:
        largest([rank], group)
        gather_rows(torch.zeros(3, dtype=torch.uint8), group)
    sends = sum(message.operation == "send" for message in recorder.messages)
    return len(recorder.messages) - sends, sends
