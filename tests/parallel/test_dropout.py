"""With dropout, every layout has the same loss and gradients as one rank."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import TOLERANCE, ParityRecord, compare, packed_batches, plan_for, run_plan
from tests.lab.pool import RankError, run_ranks
from weft.job import Model
from weft.plan import Pipeline

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**family("gpt2"), "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "qwen3_moe": {**family("qwen3_moe"), "attention_dropout": 0.2},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # ranks, plan.parallel, micro-batch
    "zero 3": (2, {"zero": 3}, 1),
    "tp2 sp": (2, {"tp": 2, "zero": 1}, 2),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 1}, 4),
    "cp2 ring": (2, {"cp": 2, "zero": 0}, 2),
    "cp2 ulysses x tp2": (4, {"cp": 2, "cp_ulysses": 2, "tp": 2, "zero": 1}, 1),
    "pp2": (2, {"pp": 2, "zero": 0, "pipeline": Pipeline(schedule="zb-h1")}, 1),
    "pp2 virtual x tp2": (4, {"pp": 2, "tp": 2, "zero": 1, "pipeline": Pipeline(schedule="zbv", virtual_stages=2)}, 1),
    "pp2 x cp2": (4, {"pp": 2, "cp": 2, "zero": 3}, 2),
}


ONE_RANK: tuple[int, dict[str, Any], int] = (1, {"zero": 1}, 4)


def trace(name: str, ranks: int, parallel: dict[str, Any], micro_batch: int, blocks: int = 2) -> ParityRecord:
    """ParityRecord of rank 0, with the gradients of all pipeline stages."""
    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": blocks}
    model, plan = Model(config={**MODELS[name], **depth}), plan_for("fp32", **parallel)
    traces = run_ranks(ranks, run_plan, model, plan, packed_batches(96), micro_batch)
    gradients = {key: gradient for trace in traces for key, gradient in trace.gradients.items()}
    return replace(traces[0], gradients=gradients)


@cache
def trace_of_one_rank(name: str, blocks: int) -> ParityRecord:
    return trace(name, *ONE_RANK, blocks)


@pytest.mark.must("parity: dropout", case="qwen3_moe-pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_equal_in_every_layout(name: str, layout: str) -> None:
    blocks = 4 if "virtual" in layout else 2
    expected, found = trace_of_one_rank(name, blocks), trace(name, *LAYOUTS[layout], blocks)
    compare("losses", torch.tensor(found.losses), torch.tensor(expected.losses), TOLERANCE["fp32"])
    for key, gradient in expected.gradients.items():
        compare(key, found.gradients[key], gradient, TOLERANCE["fp32"])


# Attention that does not use Transformers' AttentionInterface, with the dropout of its default configuration.
WITHOUT_INTERFACE = {
    "model_type": "xglm",
    "vocab_size": 96,
    "d_model": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
}
WITH_OWN_DROPOUT = {
    "model_type": "gpt_neo",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "attention_dropout": 0.1,
}


@pytest.mark.parametrize("config", [WITHOUT_INTERFACE, WITH_OWN_DROPOUT], ids=["xglm", "gpt_neo"])
def test_data_parallelism_supports_any_dropout(config: dict[str, Any]) -> None:
    for zero in (0, 3):
        found = run_ranks(2, run_plan, Model(config=config), plan_for("fp32", zero=zero), packed_batches(96), 2)[0]
        assert all(abs(loss - 4.6) < 0.5 for loss in found.losses)


def test_tp_refuses_attention_dropout_without_attention_interface() -> None:
    with pytest.raises(RankError, match="tp = 1, or the model's attention dropout to 0"):
        run_ranks(2, run_plan, Model(config=WITH_OWN_DROPOUT), plan_for("fp32", tp=2), packed_batches(96), 2)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_changes_the_loss(name: str) -> None:
    config = {key: 0.0 if "drop" in key else value for key, value in MODELS[name].items()}
    without = run_ranks(1, run_plan, Model(config=config), plan_for("fp32", zero=1), packed_batches(96), 4)[0]
    assert abs(without.losses[0] - trace_of_one_rank(name, 2).losses[0]) > 1e-4
