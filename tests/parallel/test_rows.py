"""A split model is called as before: whole rows in, with labels or without positions; loss and gradients are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import family
from tests.lab.parity import compare, packed_batches, plan_for, whole
from tests.lab.pool import RankError, run_ranks
from weft.checkpoint.huggingface import arrange_packed, build_on_meta, build_plain, materialize, read_config
from weft.cluster.mesh import build_mesh, data_rank
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.plan import Plan

PADDED = torch.ones(4, 16, dtype=torch.int64)
PADDED[1, 12:] = 0
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 0}),
    "cp2 ring x dp2": (4, {"cp": 2, "zero": 3}),
    "tp2 x cp2": (4, {"tp": 2, "cp": 2, "zero": 0}),
}


def own_loop(rank: int, ranks: int, source: Model, plan: Plan, mask: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    plan = plan.resolve(ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    rows, parts, part = packed_batches(96)[0].input_ids, plan.parallel.data_ranks, data_rank(mesh)
    masks = {} if mask is None else {"attention_mask": mask.chunk(parts)[part]}
    mine = rows.chunk(parts)[part]
    loss = model(input_ids=mine, labels=mine, **masks).loss
    loss.backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    return loss.item(), arrange_packed(model, gradients, to_rest=False)


def untouched(source: Model, mask: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    model = build_plain(source, read_config(source), torch.float64)
    rows = packed_batches(96)[0].input_ids
    loss = model(input_ids=rows, labels=rows, **({} if mask is None else {"attention_mask": mask})).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "phi3"])
def test_labels(name: str, layout: str) -> None:
    source, (ranks, parallel) = Model(config=family(name)), LAYOUTS[layout]
    loss, gradients = untouched(source, None)
    found = run_ranks(ranks, own_loop, source, plan_for("fp64", **parallel), None)
    shares = 2 if "dp2" in layout else 1  # each data rank says the mean of its own rows
    assert sum(value for value, _ in found) / ranks == pytest.approx(loss, rel=1e-6 if shares > 1 else 1e-7)
    for key, gradient in gradients.items():
        compare(key, found[0][1][key], gradient, 1e-6)  # the library's own loss is in float32


def test_a_padding_mask_under_sequence_parallelism() -> None:
    source = Model(config=family("gpt_oss"))
    loss, gradients = untouched(source, PADDED)
    for value, found in run_ranks(2, own_loop, source, plan_for("fp64", tp=2, zero=1), PADDED):
        assert value == pytest.approx(loss, rel=1e-7)
        for key, gradient in gradients.items():
            compare(key, found[key], gradient, 1e-6)


def test_a_padding_mask_under_context_parallelism_is_refused() -> None:
    with pytest.raises(RankError, match="attention mask together with context parallelism"):
        run_ranks(2, own_loop, Model(config=family("llama")), plan_for("fp64", cp=2), PADDED)
