"""Bitwise comparison of plans on the same ranks: losses, norms, gradients and weights of three steps."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.lab.parity import ParityRecord, packed_batches, run_plan
from tests.lab.pool import run_ranks
from weft.job import Model
from weft.plan import Memory, Plan


def records_of(config: dict[str, Any], plan: Plan, ranks: int, micro_batch: int = 2) -> list[ParityRecord]:
    """Run a plan on a number of ranks."""
    return run_ranks(
        ranks, run_plan_without_caches, Model(config=config), plan, packed_batches(96), micro_batch, timeout=120
    )


def run_plan_without_caches(rank: int, world_size: int, *args: Any) -> ParityRecord:
    """Run a plan without DTensor's caches, which have meshes of earlier runs, whose groups sum norms in another order."""
    _clear_sharding_prop_cache()
    return run_plan(rank, world_size, *args)


def assert_same_bits(config: dict[str, Any], ranks: int, micro_batch: int, plan: Plan, *others: Plan) -> None:
    """Assert that all other plans compute the same bits as `plan`."""
    expected = records_of(config, plan, ranks, micro_batch)
    for changed in others:
        found = records_of(config, changed, ranks, micro_batch)
        for record, reference in zip(found, expected, strict=True):
            curves = (reference.losses, reference.norms, reference.held_out)
            assert (record.losses, record.norms, record.held_out) == curves, changed
            for kind in ("gradients", "weights"):
                tensors, references = getattr(record, kind), getattr(reference, kind)
                assert tensors.keys() == references.keys()
                assert [name for name in references if not torch.equal(tensors[name], references[name])] == [], changed


def assert_near(config: dict[str, Any], ranks: int, micro_batch: int, plan: Plan, other: Plan, rel: float) -> None:
    """Assert the same loss before the first update, and different but close losses after it."""
    expected, found = (records_of(config, each, ranks, micro_batch)[0].losses for each in (plan, other))
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]
    assert found == pytest.approx(expected, rel=rel)


def assert_same_bits_with(
    config: dict[str, Any], plan: Plan, ranks: int, *memories: Memory, micro_batch: int = 2
) -> None:
    """Assert that a plan computes the same bits with other memory settings."""
    others = [plan.model_copy(update={"memory": memory}) for memory in memories]
    assert_same_bits(config, ranks, micro_batch, plan, *others)
