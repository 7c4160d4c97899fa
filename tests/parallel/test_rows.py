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


def arguments(rows: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    if mask is None:
        return {"input_ids": rows, "labels": rows}
    seen = mask * torch.cat([mask[:, :1], mask[:, :-1]], 1)  # what padding predicts is not defined
    return {"input_ids": rows, "labels": rows.masked_fill(seen == 0, -100), "attention_mask": mask}


def own_loop(rank: int, ranks: int, source: Model, plan: Plan, mask: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    plan = plan.resolve(ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    rows, parts, part = packed_batches(96)[0].input_ids, plan.parallel.data_ranks, data_rank(mesh)
    loss = model(**arguments(rows.chunk(parts)[part], None if mask is None else mask.chunk(parts)[part])).loss
    loss.backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    return loss.item(), arrange_packed(model, gradients, to_rest=False)


def untouched_part(source: Model, mask: Tensor, part: int) -> tuple[float, dict[str, Tensor]]:
    return untouched(source, mask.chunk(2)[part], packed_batches(96)[0].input_ids.chunk(2)[part])


def untouched(source: Model, mask: Tensor | None, rows: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    model = build_plain(source, read_config(source), torch.float64)
    rows = packed_batches(96)[0].input_ids if rows is None else rows
    loss = model(**arguments(rows, mask)).loss
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


@pytest.mark.parametrize("layout", [{"zero": 0}, {"zero": 3}, {"tp": 2, "zero": 0}], ids=str)
def test_a_padding_mask_with_dropout_of_attention(layout: dict[str, int]) -> None:
    """Dropout of probabilities, even of none in practice, goes another way than the library's."""
    source = Model(config={**family("gpt2"), "attn_pdrop": 1e-12})
    mask = PADDED.clone()
    mask[2, :5] = 0
    loss, gradients = untouched(source, mask)
    found = run_ranks(2, own_loop, source, plan_for("fp64", **layout), mask)
    if "tp" in layout:
        assert found[0][0] == pytest.approx(loss, rel=1e-7)
        for key, gradient in gradients.items():
            compare(key, found[0][1][key], gradient, 1e-6)
    else:  # each data rank says the mean of its own rows, which have unequal numbers of targets
        parts = [untouched_part(source, mask, part) for part in range(2)]
        assert [value for value, _ in found] == pytest.approx([part[0] for part in parts], rel=1e-7)
        for key in gradients:
            compare(key, found[0][1][key], (parts[0][1][key] + parts[1][1][key]) / 2, 1e-6)


def test_a_mask_with_holes_and_dropout_of_attention_is_refused() -> None:
    source, mask = Model(config={**family("gpt2"), "attn_pdrop": 0.1}), PADDED.clone()
    mask[:, 4] = 0
    with pytest.raises(RankError, match="one run of ones in each row"):
        run_ranks(2, own_loop, source, plan_for("fp64", zero=1), mask)


def test_a_padding_mask_under_context_parallelism_is_refused() -> None:
    with pytest.raises(RankError, match="attention mask together with context parallelism"):
        run_ranks(2, own_loop, Model(config=family("llama")), plan_for("fp64", cp=2), PADDED)
