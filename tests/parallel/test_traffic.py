"""Bytes sent by each ZeRO stage in a training step equal the textbook volume."""

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, share
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.recorder import Recorder
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Parallel, Plan, Precision
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SOURCE = Model(config=family("qwen3"))


def step_traffic(rank: int, world_size: int, plan: Plan, micro_batch: int) -> tuple[dict[str, int], int]:
    plan = plan.resolve(world_size)
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
