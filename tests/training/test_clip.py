"""`weft.clip_grad_norm_` under any plan equals `torch.nn.utils.clip_grad_norm_` on one process."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.lab.families import family
from tests.lab.parity import compare, full_tensor, packed_batches, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import WeftError
from weft.job import Model
from weft.parallel.runtime import reorder_packed
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank

SOURCE = Model(config={**family("qwen3_moe"), "tie_word_embeddings": True})
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "two copies": (4, {"dp_replicate": 2, "zero": 2}),
    "tp2, zero 0": (2, {"tp": 2, "zero": 0}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
    "tp4, 2 kv heads": (4, {"tp": 4, "sp": False, "zero": 1}),
    "cp2 x dp2": (4, {"cp": 2, "zero": 1}),
    "ep2, zero 0": (2, {"ep": 2, "zero": 0}),
    "tp2 x ep2": (4, {"tp": 2, "ep": 2, "zero": 3}),
}


def clip(rank: int, ranks: int, plan: Plan, max_norm: float, norm_type: float) -> tuple[float, dict[str, Tensor]]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = weft.parallelize(build_on_meta(read_config(SOURCE), torch.float64), plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    rows = packed_batches(96)[0].input_ids.chunk(plan.parallel.data_ranks)[data_rank(mesh)]
    model(input_ids=rows, labels=rows).loss.backward()
    norm = weft.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return norm.item(), reorder_packed(model, gradients, by_rank=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.1, 2.0), (0.1, math.inf), (0.1, 3.0), (1e6, 2.0)])
def test_equals_torch_on_one_process(layout: str, max_norm: float, norm_type: float) -> None:
    model = build_plain(SOURCE, read_config(SOURCE), torch.float64)
    rows = packed_batches(96)[0].input_ids
    model(input_ids=rows, labels=rows).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    ranks, parallel = LAYOUTS[layout]
    for found, gradients in run_ranks(ranks, clip, plan_for("fp64", **parallel), max_norm, norm_type):
        assert found == pytest.approx(norm.item(), rel=1e-6)  # the library's loss and norms are in float32
        for name, parameter in model.named_parameters():
            compare(name, gradients[name], parameter.grad, 2e-6)


def test_equals_torch_without_a_process_group() -> None:
    vectors = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    vectors[0].grad, vectors[2].grad = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert weft.clip_grad_norm_(vectors, 1.0).item() == pytest.approx(5.0)
    assert vectors[0].grad.tolist() == pytest.approx([0.6, 0, 0])
    assert vectors[2].grad.tolist() == pytest.approx([0, 0.8, 0])


def test_norm_is_zero_without_parameters_or_gradients() -> None:
    assert weft.clip_grad_norm_([], 1.0).item() == 0
    assert weft.clip_grad_norm_(torch.nn.Parameter(torch.ones(2)), 1.0).item() == 0


def test_nonfinite_norm_leaves_gradients_unchanged() -> None:
    vector = torch.nn.Parameter(torch.zeros(2))
    vector.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(WeftError, match="norm of the gradient is nan"):
        weft.clip_grad_norm_([vector], 1.0, error_if_nonfinite=True)
    assert vector.grad[0] == 1


def clip_stages(rank: int, ranks: int) -> None:
    plan = resolved(plan_for("fp32", pp=2, zero=1), ranks)
    model = weft.parallelize(build_on_meta(read_config(SOURCE), torch.float32), plan, build_mesh(plan, "cpu", ranks))
    weft.clip_grad_norm_(model.parameters(), 1.0)


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(RankError, match=r"use weft\.prepare, whose run clips over all stages"):
        run_ranks(2, clip_stages)
