"""Unequal rows of data ranks, and unequal stages, have the losses and gradients of one process."""

from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.parity import assert_parity, plan_for
from weft.job import Model
from weft.plan import Comm, Pipeline, Plan

DENSE = Model(config={**family("qwen3"), "num_hidden_layers": 4, "tie_word_embeddings": False})
EXPERTS = Model(config=family("qwen3_moe"))
# Norms of Qwen3 round to float32, and a factor of three of all gradients would change how.
IN_FLOAT64 = Model(config=family("gpt2"))


def unequal(*rows: int, pipeline: Pipeline | None = None, **parallel: Any) -> Plan:
    return plan_for("fp64", pipeline, rows_per_rank=rows, **parallel)


@pytest.mark.must("parity: rows_per_rank", case="0")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_micro_batches_of_unlike_sizes(zero: int) -> None:
    """Three micro-batches of 2, 2 and 1 rows on one rank, and of 1 row each on the other."""
    assert_parity(DENSE, unequal(5, 3, zero=zero), 2, micro_batch=2, rows=8)


LAYOUTS: dict[str, tuple[int, Model, Plan]] = {
    "four ranks": (4, DENSE, unequal(3, 1, 2, 2)),
    "three ranks": (3, IN_FLOAT64, unequal(3, 3, 2)),
    "replicas of shards": (4, DENSE, unequal(3, 2, 1, 2, dp_replicate=2)),
    "tp": (4, DENSE, unequal(5, 3, tp=2)),
    "cp": (4, DENSE, unequal(5, 3, cp=2)),
    "pp, zero 1": (4, DENSE, unequal(5, 3, pp=2, zero=1)),
    "pp, unequal stages": (
        4,
        DENSE,
        unequal(5, 3, pp=2, pipeline=Pipeline(stage_blocks=(3, 1), schedule="zb-h1")),
    ),
    "ep": (2, EXPERTS, unequal(5, 3, ep=2)),
    "ep, joint forwards and backwards": (
        2,
        EXPERTS,
        unequal(5, 3, ep=2, zero=1).model_copy(update={"comm": Comm(expert_overlap="joint")}),
    ),
    "ep and tp": (4, EXPERTS, unequal(5, 3, ep=4, tp=2)),
    "ep and etp": (4, EXPERTS, unequal(2, 1, 3, 2, ep=2, etp=2)),
    "ep with replicas": (2, EXPERTS, unequal(5, 3, ep=2, expert_balance="replicate")),
}


@pytest.mark.must("composition: rows_per_rank", case="ep with replicas-3")
@pytest.mark.parametrize("micro_batch", [3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, micro_batch: int) -> None:
    ranks, model, plan = LAYOUTS[layout]
    assert_parity(model, plan, ranks, micro_batch, rows=8)
