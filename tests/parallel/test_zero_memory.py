"""Resident bytes of each ZeRO stage equal the formulas."""

import time

import pytest
import torch

from tests.lab.families import family
from tests.lab.live import StorageBytes
from tests.lab.parity import SETTINGS, packed_batches, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import begin_micro_batch
from weft.parallel.data.state_size import count_local_parameters, model_state_bytes
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Comm, Parallel, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward, token_loss
from weft.training.optimizer import build_optimizer
from weft.training.state_bytes import measure_model_state
from weft.training.step import train_step

# Wide enough for activations, norms and uneven shards to be negligible beside weights.
SOURCE = Model(config={**family("llama"), "hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
MOE = Model(config={**family("qwen3_moe"), "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32})
UNIT_BYTES = 4 * 2 * 96 * 128  # embedding and head, the last unit whose gradients are reduced


def count(
    rank: int, world_size: int, plan: Plan, source: Model = SOURCE
) -> tuple[float, dict[str, int], dict[str, float]]:
    """Measured bytes between two micro-batches, in total and by kind, and predicted bytes by kind."""
    plan = resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = build_on_meta(read_config(source), DTYPES[plan.precision.update])
    parameters = read_anatomy(model).parameters
    parallelize(model, plan, mesh)
    materialize(model, source, torch.device("cpu"))
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    batches = share(
        packed_batches(96, max(4, plan.parallel.data_ranks))[0], data_rank(mesh), plan.parallel.data_ranks, 1
    )
    assert train_step(model, optimizer, batches, 1.0).problem is None
    by_kind = measure_model_state(model, optimizer, batches)
    states = [value for state in optimizer.state.values() for value in state.values()]
    with StorageBytes() as live:
        live.track(model)
        live.track(states)
        begin_micro_batch(model, plan, runtime(model).gradient_reducer, last=False)
        token_loss(model, forward(model, batches[0])).backward()
        time.sleep(0.2)  # the thread of gloo frees its buffers a moment later
        total = live.current
        begin_micro_batch(model, plan, runtime(model).gradient_reducer, last=True)
        token_loss(model, forward(model, batches[0])).backward()
    dense, experts = count_local_parameters(model)
    assert plan.parallel.tp > 1 or dense + experts == parameters or plan.parallel.ep > 1
    return total, by_kind, model_state_bytes(dense, plan, experts)


@pytest.mark.parametrize("forward", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_resident_bytes_equal_the_formula(zero: int, forward: str) -> None:
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype=forward))  # type: ignore[arg-type]
    for total, by_kind, predicted in run_ranks(2, count, plan):
        for kind, expected in predicted.items():
            unit = UNIT_BYTES if kind == "gradients" and zero >= 2 else 0
            assert expected - 4096 <= by_kind[kind] <= 1.01 * expected + unit + 4096, kind
        slack = 2 * UNIT_BYTES + 8192  # one unit in flight, and small tensors
        assert total == pytest.approx(sum(predicted.values()), rel=0.02, abs=slack)


@pytest.mark.parametrize("zero", [0, 2])
def test_error_feedback_is_counted(zero: int) -> None:
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="fp32"), comm=Comm(compression="2:4"))
    for _, by_kind, predicted in run_ranks(2, count, plan):
        assert by_kind["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.01, abs=4096)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"tp": 2, "zero": 0}),
        (4, {"tp": 2, "zero": 3}),
        (2, {"cp": 2, "zero": 3}),
        (2, {"ep": 2, "zero": 1}),
        (4, {"tp": 2, "ep": 2, "zero": 3}),
        (4, {"ep": 2, "etp": 2, "zero": 1}),
        (8, {"ep": 2, "etp": 2, "zero": 3}),
        (8, {"zero": 3}),  # fewer experts than ranks
        (8, {"tp": 2, "zero": 3}),  # fewer experts than ranks that share them
    ],
)
def test_axes_split_the_model_state(ranks: int, parallel: dict[str, int]) -> None:
    plan = Plan(parallel=Parallel(**parallel), precision=Precision(param_dtype="bf16"))  # type: ignore[arg-type]
    for total, by_kind, predicted in run_ranks(ranks, count, plan, MOE):
        for kind in ("parameters", "optimizer"):
            assert by_kind[kind] == pytest.approx(predicted[kind], rel=0.01, abs=4096), kind
        assert total <= 1.02 * sum(predicted.values()) + 2 * UNIT_BYTES + 8192


def test_bytes_a_parameter_of_each_stage() -> None:
    totals = [
        sum(model_state_bytes(10**6, resolved(Plan(parallel=Parallel(zero=z)), 8)).values()) for z in (0, 1, 2, 3)
    ]  # type: ignore[arg-type]
    assert totals[0] == (4 + 12) * 10**6
    assert totals[1] == (2 + 4 + 12 / 8) * 10**6
    assert totals[2] == (2 + (4 + 12) / 8) * 10**6
    assert totals[3] == (4 + 12) / 8 * 10**6
