"""Auxiliary loss and load of routers equal Transformers, row by row, in every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.families import family
from tests.lab.parity import compare, full_tensor, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.data import MicroBatch
from weft.job import Model
from weft.parallel.experts.router_stats import imbalances_of_blocks
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Pipeline, Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward

COEFFICIENT = 0.5
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # ranks, plan.parallel, micro-batch
    "one rank": (1, {"zero": 1}, 2),
    "zero 3": (2, {"zero": 3}, 1),
    "tp2 sp x ep2": (2, {"tp": 2, "ep": 2, "zero": 1}, 2),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 0}, 4),
    "cp2 ring": (2, {"cp": 2, "zero": 0}, 2),
    "cp2 x tp2 x ep4": (4, {"cp": 2, "tp": 2, "ep": 4, "zero": 1}, 1),
    "pp2": (2, {"pp": 2, "zero": 1, "pipeline": Pipeline(schedule="zb-h1")}, 1),
    "pp2 virtual x tp2": (4, {"pp": 2, "tp": 2, "zero": 0, "pipeline": Pipeline(schedule="zbv", virtual_stages=2)}, 1),
}


def source(name: str, **changes: Any) -> Model:
    settings = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return Model(config={**family(name), **settings, **changes})


def rows() -> MicroBatch:
    """Rows of one document: Transformers accepts no precomputed mask together with router logits."""
    batch = packed_batches(96)[0]
    positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids).contiguous()
    return MicroBatch(batch.input_ids, positions, batch.targets)


def split(
    rank: int, ranks: int, model_source: Model, plan: Plan, micro_batch: int
) -> tuple[dict[str, torch.Tensor], float | None]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(model_source), torch.float64), plan, mesh)
    materialize(model, model_source, torch.device("cpu"))
    model.train()
    batch = rows()
    tokens, p = int((batch.targets != -100).sum()), plan.parallel
    mine = share(batch, data_rank(mesh), p.data_ranks, micro_batch)
    forward_backward(model, mine, p.gradient_ranks / tokens, p.gradient_ranks / len(batch.input_ids))
    gradients = {name: full_tensor(parameter.grad).clone() for name, parameter in model.named_parameters()}
    loads = runtime(model).router_stats.take_loads()
    imbalances = None if loads is None else imbalances_of_blocks(runtime(model).anatomy, loads, torch.device("cpu"))
    return gradients, None if imbalances is None else max(imbalances.tolist())


@pytest.mark.must("parity: auxiliary loss of routers", case="qwen3_moe-pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe"])
def test_gradients_and_load(name: str, layout: str) -> None:
    blocks = 4 if "virtual" in layout else 2
    check(source(name, num_hidden_layers=blocks), *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["pp2", "pp2 virtual x tp2"])
@pytest.mark.parametrize("dense", [[0], [0, 1], [2, 3]], ids=str)
def test_stages_without_experts(dense: list[int], layout: str) -> None:
    """A stage without experts passes on the sums of earlier stages, and reports a load of 0."""
    check(source("qwen3_moe", num_hidden_layers=4, mlp_only_layers=dense), *LAYOUTS[layout])


def check(model_source: Model, ranks: int, parallel: dict[str, Any], micro_batch: int) -> None:
    """Compare gradients and load with Transformers, row by row."""
    model, batch = build_plain(model_source, read_config(model_source), torch.float64), rows()
    model.train()
    loads: dict[str, torch.Tensor] = {}

    def count(layer: str, index: torch.Tensor) -> None:
        loads[layer] = loads.get(layer, 0) + torch.bincount(index.flatten(), minlength=4)

    for layer, module in model.named_modules():
        if layer.endswith("experts"):
            module.register_forward_pre_hook(lambda _, args, layer=layer: count(layer, args[1]))
    for row in range(len(batch.input_ids)):
        out = model(input_ids=batch.input_ids[row : row + 1], output_router_logits=True, use_cache=False)
        tokens = (batch.targets != -100).sum()
        loss = F.cross_entropy(out.logits[0], batch.targets[row], reduction="sum") / tokens
        (loss + COEFFICIENT * out.aux_loss / len(batch.input_ids)).backward()
    expected_load = max(float(load.max() / load.double().mean()) for load in loads.values())
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    results = run_ranks(ranks, split, model_source, plan_for("fp64", **parallel), micro_batch)
    assert max(load for _, load in results) == pytest.approx(expected_load, rel=1e-12)
    for gradients, _ in results:
        for key, gradient in gradients.items():
            compare(key, gradient, expected[key], 1e-6)  # Transformers sums its counts in float32
    assert {key for gradients, _ in results for key in gradients} == expected.keys()


def test_auxiliary_loss_changes_router_gradients() -> None:
    without = Model(config=family("mixtral"))
    gradients, _ = run_ranks(1, split, source("mixtral"), plan_for("fp64", zero=1), 2)[0]
    expected, _ = run_ranks(1, split, without, plan_for("fp64", zero=1), 2)[0]
    assert any((gradients[key] - expected[key]).abs().max() > 1e-4 for key in gradients if "gate" in key)


def custom_loop(rank: int, ranks: int, model_source: Model) -> list[int]:
    mesh = build_mesh(plan_for("fp32"), "cpu", ranks)
    model = parallelize(build_plain(model_source, read_config(model_source), torch.float32), plan_for("fp32"), mesh)
    model.train()
    tokens, kept = torch.arange(16).view(2, 8), []
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        kept.append(len(runtime(model).router_stats.logits))
    return kept


def test_router_logits_do_not_accumulate_in_a_custom_loop() -> None:
    (kept,) = run_ranks(1, custom_loop, source("mixtral"))
    assert kept == [2, 2, 2]


def test_experts_without_indices_have_no_load_metric() -> None:
    """Llama 4 calls its experts with tokens only."""
    config = {**family("llama"), "model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 48}
    gradients, load = run_ranks(1, split, Model(config=config), plan_for("fp64", zero=1), 4)[0]
    assert load is None
    assert all(gradient.isfinite().all() for gradient in gradients.values())
