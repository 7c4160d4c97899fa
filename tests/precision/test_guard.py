"""Non-finite guard in a pipeline: all ranks name the same origin, whichever stage has the NaN, and no weight changes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.plan import Pipeline, Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import StepResult, train_step

SOURCE = Model(config={**family("qwen3_moe"), "num_hidden_layers": 4})


def nan_weight(model: nn.Module, name: str) -> None:
    """Set one element of a weight to NaN, on the ranks that hold it."""
    parameters = dict(model.named_parameters())
    if name in parameters:
        with torch.no_grad():
            to_local(parameters[name]).flatten()[:1] = math.nan


def nan_gradient(model: nn.Module, name: str) -> None:
    """Set the output gradient of a weight's module to NaN, in every backward."""

    def make_nan(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.nan)

    if name in dict(model.named_parameters()):
        model.get_submodule(name.removesuffix(".weight")).register_forward_hook(make_nan)


def bad_step(
    rank: int, ranks: int, plan: Plan, plant: Callable[[nn.Module, str], None], name: str
) -> tuple[StepResult, bool]:
    """Result of a step, and True if the weights of this rank did not change."""
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(SOURCE), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    plant(model, name)
    before = [to_local(parameter.detach()).clone() for parameter in model.parameters()]
    batches = share(packed_batches(96)[0], data_rank(mesh), plan.parallel.data_ranks, 1)
    result = train_step(model, optimizer, batches, 0.5)
    after = [to_local(parameter.detach()) for parameter in model.parameters()]
    return result, all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, after, strict=True))


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # ranks, plan, rank of the last block
    "1f1b": (2, {"zero": 0}, 1),
    "zb-h1": (2, {"zero": 1, "pipeline": Pipeline(schedule="zb-h1")}, 1),
    "interleaved, zero 3": (4, {"zero": 3, "pipeline": Pipeline(schedule="interleaved", virtual_stages=2)}, 2),
    "zbv": (2, {"zero": 0, "pipeline": Pipeline(schedule="zbv", virtual_stages=2)}, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("plant", "name", "expected"),
    [
        (nan_weight, "model.layers.3.input_layernorm.weight", "the loss and the gradient of lm_head.weight"),
        (nan_gradient, "model.layers.3.self_attn.o_proj.weight", None),
        (nan_gradient, "model.layers.1.self_attn.q_proj.weight", None),
    ],
    ids=["weight", "last stage", "other stage"],
)
def test_all_ranks_name_the_nonfinite_parameter(
    plant: Callable[[nn.Module, str], None], name: str, expected: str | None, layout: str
) -> None:
    ranks, settings, last = LAYOUTS[layout]
    results = run_ranks(ranks, bad_step, plan_for("fp32", pp=2, **settings), plant, name)
    assert len({result.problem for result, _ in results}) == 1
    for result, unchanged in results:
        assert result.problem is not None
        assert f"{expected or f'the gradient of {name}'} not finite" in result.problem
        assert unchanged
    if "layers.3" in name:
        assert str(results[0][0].problem).startswith(f"rank {last}: ")
