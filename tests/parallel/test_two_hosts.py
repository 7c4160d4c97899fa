"""Training on two emulated hosts equals training on one host."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import compare, full_tensor, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.backends import hierarchical
from weft.backends.hierarchical import TwoLevelGroup
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.recorder import Recorder
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Comm, Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank, group_of_all
from weft.training.forward_backward import forward, forward_backward
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "replicas of shards": {"dp_replicate": 2, "dp_shard": 2},
    "cp ring": {"cp": 4},
    "cp Ulysses": {"cp": 2, "cp_ulysses": 2, "zero": 0},
    "tp 4": {"tp": 4, "zero": 0},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "ep 4": {"ep": 4},
    "ep 4, zero 0": {"ep": 4, "zero": 0},
    "tp 2, ep 4": {"tp": 2, "ep": 4},
}


def built(rank: int, ranks: int, model: Model, plan: Plan, hosts: int) -> tuple[Any, Any]:
    """Parallelized model and mesh, with the ranks divided equally among the hosts."""
    with mock.patch.object(hierarchical, "host_id", return_value=[f"host {rank * hosts // ranks}"]):
        mesh = build_mesh(plan, "cpu", ranks)
        split = parallelize(build_on_meta(read_config(model), DTYPES[plan.precision.update]), plan, mesh)
        group_of_all(mesh)
    materialize(split, model, torch.device("cpu"))
    return split, mesh


def trained(
    rank: int, ranks: int, model: Model, plan: Plan, hosts: int, micro_batch: int = 2
) -> tuple[list[float], dict[str, Any], dict[str, int]]:
    """Losses of three steps, final weights, and bytes by kind of link."""
    plan = resolved(plan, ranks)
    split, mesh = built(rank, ranks, model, plan, hosts)
    optimizer = DistributedOptimizer(build_optimizer(split, Optimizer()), split, detect())
    losses = []
    with Recorder() as recorder:
        for batch in packed_batches(96, rows=8)[:3]:
            mine = share(batch, data_rank(mesh), plan.parallel.data_ranks, micro_batch)
            losses.append(train_step(split, optimizer, mine, 1.0).loss)
    weights = {name: full_tensor(p).detach().clone() for name, p in split.named_parameters()}
    return losses, weights, recorder.bytes_by("link")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts(layout: str) -> None:
    moe = "ep" in LAYOUTS[layout]
    model = Model(config={**family("qwen3_moe" if moe else "qwen3"), "tie_word_embeddings": False})
    plan = plan_for("fp64", **LAYOUTS[layout])
    expected = run_ranks(4, trained, model, plan, 1)
    for (losses, weights, bytes_by_link), (expected_losses, expected_weights, _) in zip(
        run_ranks(4, trained, model, plan, 2), expected, strict=True
    ):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        assert "between" in bytes_by_link
        for name, weight in weights.items():
            compare(name, weight, expected_weights[name], 1e-9)


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("parallel", [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "pp": 2, "tp": 1}], ids=str)
def test_overlapped_reduce_scatter_equals_one_host(parallel: dict[str, Any], micro_batch: int) -> None:
    model = Model(config={**family("qwen3"), "tie_word_embeddings": False})
    plan = plan_for("fp32", **parallel)
    expected = run_ranks(4, trained, model, plan, 1, micro_batch)
    found = run_ranks(4, trained, model, plan, 2, micro_batch)
    for (losses, weights, _), (expected_losses, expected_weights, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, weight in weights.items():
            compare(name, weight, expected_weights[name], 1e-4, at_least=3e-4)


def in_flight(rank: int, ranks: int, model: Model, zero: int) -> list[int]:
    """Number of reduce-scatters in flight at the end of the backward of each block."""
    plan = resolved(plan_for("fp32", zero=zero), ranks)
    split, mesh = built(rank, ranks, model, plan, 2)
    found: list[int] = []
    scatters = runtime(split).reduce_scatters
    assert scatters is not None
    for block in split.model.layers:
        block.register_full_backward_hook(lambda *_: found.append(len(scatters.in_flight)))
    forward_backward(split, share(packed_batches(96)[0], data_rank(mesh), 4, 2), 1.0)
    assert not scatters.in_flight
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_reduce_scatter_overlaps_backward(zero: int) -> None:
    """When the backward of a block ends, the gradients of later blocks are in flight, at most two at once, oldest first."""
    blocks = 4
    model = Model(config={**family("qwen3"), "num_hidden_layers": blocks})
    for found in run_ranks(4, in_flight, model, zero):
        assert found == [min(ended, 2) for ended in range(blocks)]


@pytest.mark.parametrize(
    "parallel", [{"zero": 0}, {"zero": 2}, {"zero": 3}, {"dp_replicate": 2, "dp_shard": 2}], ids=str
)
@pytest.mark.parametrize("compress_scope", ["inter_node", "all"])
def test_compressed_between_hosts(compress_scope: str, parallel: dict[str, Any]) -> None:
    """Losses stay close to uncompressed training, and fewer bytes are sent between hosts."""
    model = Model(config={**family("qwen3"), "tie_word_embeddings": False})
    plain = plan_for("fp32", **parallel)
    plan = plain.model_copy(update={"comm": Comm(compression="int8", compress_scope=compress_scope)})
    expected = run_ranks(4, trained, model, plain, 2)[0]
    found = run_ranks(4, trained, model, plan, 2)
    for losses, weights, _ in found:
        assert losses == pytest.approx(expected[0], rel=1e-3)
        for name, weight in weights.items():
            assert torch.equal(weight, found[0][1][name])
    # All-gathers of uncompressed weights, each with as many bytes as the gradients.
    gathers = {2: 1, 3: 2}.get(parallel.get("zero", 0), 0)
    assert found[0][2].get("between", 0) < (gathers + 0.35) / (gathers + 1) * expected[2]["between"]


def gathers_in_flight(rank: int, ranks: int, model: Model, ahead: int) -> list[int]:
    """Number of all-gathers in flight at the end of the forward of each block."""
    plan = resolved(plan_for("fp64", zero=3), ranks)
    plan = plan.model_copy(update={"comm": Comm(prefetch=ahead)})
    split, mesh = built(rank, ranks, model, plan, 2)
    running, found, issue = 0, [], TwoLevelGroup.all_gather_single

    def watched(self: Any, *args: Any) -> Any:
        nonlocal running
        work = issue(self, *args)
        finish, running = work.finish, running + 1

        def finished() -> None:
            nonlocal running
            running -= 1
            finish()

        work.finish = finished
        return work

    for block in split.model.layers:
        block.register_forward_hook(lambda *_: found.append(running))
    with mock.patch.multiple(TwoLevelGroup, all_gather_single=watched, _allgather_base=watched), torch.no_grad():
        forward(split, share(packed_batches(96)[0], data_rank(mesh), 4, 2)[0])
    return found


def test_forward_prefetches_weights() -> None:
    model = Model(config={**family("qwen3"), "num_hidden_layers": 4})
    for ahead, expected in ((0, [0, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 2, 1, 0])):
        assert run_ranks(4, gathers_in_flight, model, ahead) == [expected] * 4
