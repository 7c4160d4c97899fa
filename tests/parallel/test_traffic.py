"""Bytes sent by each ZeRO stage in a training step equal the textbook volume."""

from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, share
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.recorder import Recorder
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Parallel, Plan, Precision
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SOURCE = Model(config=family("qwen3"))


def step_traffic(rank: int, world_size: int, plan: Plan, micro_batch: int) -> tuple[dict[str, int], int]:
    plan = resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = build_on_meta(read_config(SOURCE), torch.float32)
    parameters = read_anatomy(model).parameters
    parallelize(model, plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    with Recorder() as recorder:
        batches = share(packed_batches(96)[0], rank, world_size, micro_batch)
        train_step(model, optimizer, batches, 1.0)
    return recorder.bytes_by("operation"), parameters


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_ranks(zero: int, micro_batch: int) -> None:
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="bf16"))  # type: ignore[arg-type]
    traffic, parameters = run_ranks(2, step_traffic, plan, micro_batch)[0]
    micro_batches = 2 // micro_batch
    half = parameters // 2  # (n - 1) / n for n = 2 ranks
    if zero == 0:
        expected = {"all_reduce": 2 * 4 * half}
    elif zero < 3:
        expected = {"all_gather": 2 * half, "reduce_scatter": 4 * half * (micro_batches if zero == 2 else 1)}
    else:  # gathered in forward and again in backward, except embedding and head, which stay gathered in between
        expected = {"all_gather": 2 * half * 2 * micro_batches, "reduce_scatter": 4 * half * micro_batches}
    for operation, size in expected.items():
        slack = 0.35 if zero == 3 and operation == "all_gather" else 0.02  # this tiny model is mostly embedding
        assert size * (1 - slack) <= traffic[operation] <= size * 1.02 + 64, operation
    assert sum(size for operation, size in traffic.items() if operation not in expected) < 200  # loss, tokens, norm


def open_frozen(world_size: int, plan: Plan) -> tuple[Any, DistributedOptimizer]:
    """Model of which only the norms of the blocks are trained, and its optimizer."""
    plan = resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model: Any = build_on_meta(read_config(SOURCE), torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers." in name and parameter.ndim == 1
    parallelize(model, plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, detect())


def frozen_traffic(rank: int, world_size: int, plan: Plan) -> dict[str, int]:
    model, optimizer = open_frozen(world_size, plan)
    with Recorder() as recorder:
        train_step(model, optimizer, share(packed_batches(96)[0], rank, world_size, 1), 1.0)
    return recorder.bytes_by("operation")


@pytest.mark.parametrize("zero", [1, 2])
def test_frozen_weights_are_not_gathered(zero: int) -> None:
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="fp32"))  # type: ignore[arg-type]
    model = build_on_meta(read_config(SOURCE), torch.float32)
    trained = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 1)
    traffic = run_ranks(2, frozen_traffic, plan)[0]
    assert 4 * trained // 2 <= traffic["all_gather"] < 4 * trained // 2 + 200  # and the loss


def train_unfrozen(rank: int, world_size: int, plan: Plan) -> float:
    model, optimizer = open_frozen(world_size, plan)
    batches = packed_batches(96)
    train_step(model, optimizer, share(batches[0], rank, world_size, 1), 1.0)
    model.model.norm.weight.requires_grad_()
    return train_step(model, optimizer, share(batches[1], rank, world_size, 1), 1.0).grad_norm


def test_weights_that_are_unfrozen_later_are_refused_where_their_gradients_are_not_reduced() -> None:
    plans = [Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="fp32")) for zero in range(4)]
    for plan in plans[:3]:
        with pytest.raises(RankError, match=r"model\.norm\.weight trains, but was frozen"):
            run_ranks(2, train_unfrozen, plan)
    alone = run_ranks(1, train_unfrozen, plans[0])[0]
    assert run_ranks(2, train_unfrozen, plans[3])[0] == pytest.approx(alone, rel=1e-5)
