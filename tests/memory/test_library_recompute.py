"""Gradients are bit-equal with the recompute of Transformers, `model.gradient_checkpointing_enable`, under any plan."""

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lab.families import family
from tests.lab.parity import full_tensor, packed_batches, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.job import Model
from weft.parallel.runtime import set_dropout_seed
from weft.plan import Parallel, Plan, Precision
from weft.topology.mesh import build_mesh, data_rank

MIXED = Precision(param_dtype="bf16")
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
# Ranks, plan, family, what is unusual about it.
CASES: dict[str, tuple[int, Plan, str, dict[str, Any]]] = {
    "zero 0, bf16": (2, Plan(parallel=Parallel(zero=0), precision=MIXED), "llama", {}),
    "zero 3, bf16": (2, Plan(parallel=Parallel(zero=3), precision=MIXED), "llama", {}),
    "tp2 sp": (2, plan_for("fp32", tp=2, zero=1), "llama", {}),
    "tp2, zero 0": (2, plan_for("fp32", tp=2, sp=False, zero=0), "gpt2", DROPOUT),
    "cp2": (2, plan_for("fp32", cp=2, zero=2), "llama", {}),
    "tp2 x ep2": (2, plan_for("fp32", tp=2, ep=2, zero=0), "qwen3_moe", {}),
}


def gradients(
    rank: int, ranks: int, source: Model, plan: Plan, recompute: dict[str, bool] | None
) -> tuple[float, dict[str, Tensor]]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model: Any = weft.parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    if recompute is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recompute)
    rows = packed_batches(96)[0].input_ids.chunk(plan.parallel.data_ranks)[data_rank(mesh)]
    for _ in range(2):
        set_dropout_seed(model, 0, 1)
        model.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
    return loss.item(), {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_library_recompute_is_bit_equal(case: str, reentrant: bool) -> None:
    ranks, plan, name, more = CASES[case]
    source = Model(config={**family(name), **more})
    loss, expected = run_ranks(ranks, gradients, source, plan, None)[0]
    for value, found in run_ranks(ranks, gradients, source, plan, {"use_reentrant": reentrant}):
        assert value == loss
        assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []
