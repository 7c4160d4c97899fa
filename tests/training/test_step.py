"""Optimizer step: the same loss for every split of a batch, clipping, and non-finite gradients."""

import math

import pytest
import torch
from torch import nn

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Parallel, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import StepResult, evaluate, train_step

SOURCE = Model(config=family("qwen3_moe"))


def open_model(
    plan: Plan, world_size: int
) -> tuple[Plan, torch.distributed.DeviceMesh, nn.Module, DistributedOptimizer]:
    plan = resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_on_meta(read_config(SOURCE), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    return plan, mesh, model.train(), DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())


def train_split(rank: int, world_size: int, plan: Plan, micro_batch: int) -> list[float]:
    """Losses of three steps, and the loss of an evaluation."""
    *_, model, optimizer = open_model(plan, world_size)
    batches = packed_batches(96)
    losses = []
    for batch in batches:
        micro_batches = share(batch, rank, world_size, micro_batch)
        losses.append(train_step(model, optimizer, micro_batches, 0.5).loss)
    return [*losses, evaluate(model, share(batches[0], rank, world_size, micro_batch))]


def test_loss_is_independent_of_the_split_of_a_batch() -> None:
    expected = run_ranks(1, train_split, plan_for("fp32"), 4)[0]
    for world_size, micro_batch in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]:
        for zero in (0, 2, 3):
            for losses in run_ranks(world_size, train_split, plan_for("fp32", zero=zero), micro_batch):
                assert losses == pytest.approx(expected, rel=1e-6), (world_size, micro_batch, zero)


def poisoned_step(
    rank: int, world_size: int, plan: Plan, guilty: int, module: str, every_time: bool
) -> tuple[StepResult, float]:
    """Run a step with a NaN in the output gradient of a module on one rank; also return the change of the weights."""
    plan, mesh, model, optimizer = open_model(plan, world_size)
    before = gather_weights(model)
    fuse = [10**9 if every_time else 1]

    def poison(_: nn.Module, __: object, output: torch.Tensor) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            fuse[0] -= 1
            return gradient * math.nan if fuse[0] >= 0 else gradient

        if output.requires_grad:
            output.register_hook(spoil)

    if rank == guilty:  # other pipeline ranks may not have the module
        model.get_submodule(module).register_forward_hook(poison)
    batches = share(packed_batches(96)[0], data_rank(mesh), plan.parallel.data_ranks, 1)
    result = train_step(model, optimizer, batches, 0.5)
    after = gather_weights(model)
    return result, max((after[name] - before[name]).abs().max().item() for name in before) if before else 0.0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("guilty", [0, 1])
def test_nan_is_attributed_to_its_rank_and_parameter(zero: int, guilty: int) -> None:
    name = "model.layers.1.self_attn.o_proj"
    for result, moved in run_ranks(2, poisoned_step, plan_for("fp32", zero=zero), guilty, name, True):
        assert result.problem == f"rank {guilty}: the gradient of {name}.weight not finite"
        assert moved == 0


def test_nan_that_does_not_recur_is_reported() -> None:
    results = run_ranks(2, poisoned_step, plan_for("fp32"), 1, "model.layers.0.mlp", False)
    for result, moved in results:
        assert result.problem is not None
        assert "the origin is unknown" in result.problem
        assert moved == 0


def test_overflow_halves_a_dynamic_scale() -> None:
    plan = Plan(precision=Precision(param_dtype="fp16", loss_scale="dynamic"))
    for result, moved in run_ranks(2, poisoned_step, plan, 1, "model.layers.0.mlp", True):
        assert result.problem == "gradients overflowed at loss scale 65536; the next scale is 32768"
        assert result.loss_scale == LossScale(32768.0, dynamic=True)
        assert moved == 0


@pytest.mark.parametrize(("guilty", "block", "stages"), [(0, 0, (0,)), (1, 1, (0, 1))])
def test_overflow_is_counted_by_stage(guilty: int, block: int, stages: tuple[int, ...]) -> None:
    """An overflow in the last stage propagates to the stages before it."""
    plan = Plan(parallel=Parallel(pp=2), precision=Precision(backward="fp16", loss_scale="dynamic"))
    for result, moved in run_ranks(2, poisoned_step, plan, guilty, f"model.layers.{block}.mlp", True):
        assert result.overflowed == stages
        assert f"gradients overflowed on ranks {', '.join(map(str, stages))} of pp" in (result.problem or "")
        assert moved == 0


def scaled_training(rank: int, world_size: int, plan: Plan) -> list[float]:
    *_, model, optimizer = open_model(plan, world_size)
    found = []
    for batch in packed_batches(96):
        result = train_step(model, optimizer, share(batch, rank, world_size, 1), 0.5)
        assert result.problem is None
        found += [result.loss, result.grad_norm]
    return found


def test_loss_scale_only_prevents_underflow() -> None:
    plain = run_ranks(2, scaled_training, plan_for("fp32"))[0]
    scaled = Plan(parallel=Parallel(), precision=Precision(param_dtype="fp32", loss_scale=1024.0))
    assert run_ranks(2, scaled_training, scaled)[0] == pytest.approx(plain, rel=1e-6)
    half = Plan(precision=Precision(param_dtype="fp16", loss_scale="dynamic"))
    assert run_ranks(2, scaled_training, half)[0] == pytest.approx(plain, rel=2e-2)
