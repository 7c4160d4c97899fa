"""A split model is called with full rows, with or without labels, masks and positions; loss and gradients are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import family
from tests.lab.parity import compare, full_tensor, packed_batches, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.lab.shrink import PROVED, shrunk
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import reorder_packed
from weft.parallel.sequence.rows import POSITIONS_FROM_MASK
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank

PADDED = torch.ones(4, 16, dtype=torch.int64)
PADDED[1, 12:] = 0
PADDED_LEFT = PADDED.clone()
PADDED_LEFT[0, :5] = 0
PADDED_LEFT[2, :3] = 0
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 0}),
    "cp2 ring x dp2": (4, {"cp": 2, "zero": 3}),
    "cp2 ulysses": (2, {"cp": 2, "cp_ulysses": 2, "zero": 0}),
    "tp2 x cp2": (4, {"tp": 2, "cp": 2, "zero": 0}),
}


def arguments(rows: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    if mask is None:
        return {"input_ids": rows, "labels": rows}
    seen = mask * torch.cat([mask[:, :1], mask[:, :-1]], 1)  # predictions of padding tokens are not defined
    return {"input_ids": rows, "labels": rows.masked_fill(seen == 0, -100), "attention_mask": mask}


def custom_loop(
    rank: int, ranks: int, source: Model, plan: Plan, mask: Tensor | None, length: int = 16
) -> tuple[float, dict[str, Tensor]]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    rows, parts, part = packed_batches(96)[0].input_ids[:, :length], plan.parallel.data_ranks, data_rank(mesh)
    loss = model(**arguments(rows.chunk(parts)[part], None if mask is None else mask.chunk(parts)[part])).loss
    loss.backward()
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return loss.item(), reorder_packed(model, gradients, by_rank=False)


def untouched(source: Model, mask: Tensor | None, length: int = 16) -> tuple[float, dict[str, Tensor]]:
    model = build_plain(source, read_config(source), torch.float64)
    loss = model(**arguments(packed_batches(96)[0].input_ids[:, :length], mask)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    source: Model, ranks: int, parallel: dict[str, Any], mask: Tensor | None, length: int = 16, biases: bool = True
) -> None:
    """Check that loss and gradients of every rank equal the unmodified model on all rows."""
    loss, gradients = untouched(source, mask, length)
    for value, found in run_ranks(ranks, custom_loop, source, plan_for("fp64", **parallel), mask, length):
        assert value == pytest.approx(loss, rel=1e-7)
        for key, gradient in gradients.items():
            if biases or not key.endswith("k_proj.bias"):
                compare(key, found[key], gradient, 1e-6)  # Transformers computes the loss in float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "phi3"])
def test_labels(name: str, layout: str) -> None:
    assert_same(Model(config=family(name)), *LAYOUTS[layout], None)


def padded_source(name: str) -> Model:
    return Model(config=shrunk(name) if name == "opt" else family(name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt_oss"])
def test_padding_on_the_left_and_on_the_right(name: str, layout: str) -> None:
    # The gradient of key biases is zero except for rounding.
    assert_same(padded_source(name), *LAYOUTS[layout], PADDED_LEFT, biases=name != "opt")


@pytest.mark.parametrize("layout", ["tp2 sp", "cp2 ring x dp2", "cp2 ulysses", "tp2 x cp2"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_whose_length_the_ranks_do_not_divide(layout: str, masked: bool) -> None:
    mask = PADDED_LEFT[:, :13] if masked else None
    assert_same(Model(config=family("gpt_oss")), *LAYOUTS[layout], mask, 13)


def test_rows_up_to_the_last_position_of_the_model() -> None:
    """13 tokens are padded to 16, more than the model has positions."""
    assert_same(Model(config={**family("gpt2"), "n_positions": 13}), *LAYOUTS["tp2 x cp2"], None, 13)


def test_experts_split_tokens_without_sequence_parallelism() -> None:
    assert_same(Model(config=family("qwen3_moe")), 2, {"tp": 2, "sp": False, "zero": 0}, PADDED[:, :13], 13)


def logits_of_odd_rows(rank: int, ranks: int, source: Model) -> Tensor:
    plan = resolved(plan_for("fp64", tp=2, zero=1), ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    return model(input_ids=packed_batches(96)[0].input_ids[:, :13]).logits.detach()


def test_logits_have_the_length_of_the_rows() -> None:
    source = Model(config=family("llama"))
    parts = run_ranks(2, logits_of_odd_rows, source)
    expected = build_plain(source, read_config(source), torch.float64)(packed_batches(96)[0].input_ids[:, :13]).logits
    compare("logits", torch.cat(parts, -1), expected.detach(), 1e-6)


@pytest.mark.parametrize("layout", [{"zero": 0}, {"zero": 3}, {"tp": 2, "zero": 0}], ids=str)
@pytest.mark.parametrize("length", [16, 13])
def test_a_padding_mask_with_dropout_of_attention(layout: dict[str, int], length: int) -> None:
    """Attention dropout, even at a negligible rate, replaces the attention of Transformers."""
    source = Model(config={**family("gpt2"), "attn_pdrop": 1e-12})
    assert_same(source, 2, layout, PADDED_LEFT[:, :length], length)


@pytest.mark.parametrize("parallel", [{"zero": 1}, {"cp": 2}], ids=str)
def test_mask_with_holes_is_refused(parallel: dict[str, int]) -> None:
    source, mask = Model(config={**family("gpt2"), "attn_pdrop": 0.1}), PADDED.clone()
    mask[:, 4] = 0
    with pytest.raises(RankError, match="one run of ones in each row"):
        run_ranks(2, custom_loop, source, plan_for("fp64", **parallel), mask)


def derives_positions_from_mask(name: str) -> bool:
    """True if a family, called with a mask and no positions, gives tokens after padding other positions than their index."""
    source = Model(config=shrunk(name))
    model = build_plain(source, read_config(source), torch.float32).eval()
    rows, mask = packed_batches(96)[0].input_ids, PADDED_LEFT
    indices = torch.arange(rows.shape[1]).expand_as(rows)
    with torch.no_grad():
        default = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
        explicit = model(input_ids=rows, attention_mask=mask, use_cache=False, position_ids=indices).logits
    return not torch.allclose(default[mask > 0], explicit[mask > 0], atol=1e-4)


@pytest.mark.parametrize("name", sorted({*PROVED["tp"], *PROVED["cp"], "biogpt"}))
def test_families_that_derive_positions_from_the_mask_are_known(name: str) -> None:
    assert derives_positions_from_mask(name) == (name in POSITIONS_FROM_MASK)


def mask_of_pairs(rank: int, ranks: int) -> None:
    plan = resolved(plan_for("fp64", tp=2), ranks)
    model = build_plain(Model(config=family("llama")), read_config(Model(config=family("llama"))), torch.float64)
    split = parallelize(model, plan, build_mesh(plan, "cpu", ranks))
    split(torch.ones(1, 7, dtype=torch.int64), attention_mask=torch.ones(1, 1, 7, 7, dtype=torch.bool))


def test_rows_that_cannot_be_padded_here_are_refused_with_the_multiple() -> None:
    with pytest.raises(RankError, match=r"pad_to_multiple_of=2 of a collator"):
        run_ranks(2, mask_of_pairs)
