"""The same bits: two plans on the same ranks, over losses, norms, gradients and weights of three steps."""

from typing import Any

import pytest
import torch

from tests.lab.parity import Trace, packed_batches, run_plan
from tests.lab.pool import close_pools, run_ranks
from weft.job import Model
from weft.plan import Memory, Plan


def traces_of(config: dict[str, Any], plan: Plan, ranks: int, micro_batch: int = 2) -> list[Trace]:
    """On fresh ranks: torch finds meshes of earlier runs in its caches, but for their groups, by which norms are summed."""
    close_pools()
    return run_ranks(ranks, run_plan, Model(config=config), plan, packed_batches(96), micro_batch, timeout=120)


def assert_same_bits(config: dict[str, Any], ranks: int, micro_batch: int, plan: Plan, *others: Plan) -> None:
    """What a plan computes, each of the others computes too, bit by bit."""
    expected = traces_of(config, plan, ranks, micro_batch)
    for changed in others:
        found = traces_of(config, changed, ranks, micro_batch)
        for one, other in zip(found, expected, strict=True):
            assert (one.losses, one.norms, one.held_out) == (other.losses, other.norms, other.held_out), changed
            for kind in ("gradients", "weights"):
                mine, theirs = getattr(one, kind), getattr(other, kind)
                assert mine.keys() == theirs.keys()
                assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == [], changed


def assert_near(config: dict[str, Any], ranks: int, micro_batch: int, plan: Plan, other: Plan, rel: float) -> None:
    """The same loss before the first update, and another that is near after it."""
    expected, found = (traces_of(config, one, ranks, micro_batch)[0].losses for one in (plan, other))
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]
    assert found == pytest.approx(expected, rel=rel)


def assert_same_bits_with(
    config: dict[str, Any], plan: Plan, ranks: int, *memories: Memory, micro_batch: int = 2
) -> None:
    """The same plan with other settings of memory."""
    others = [plan.model_copy(update={"memory": memory}) for memory in memories]
    assert_same_bits(config, ranks, micro_batch, plan, *others)
