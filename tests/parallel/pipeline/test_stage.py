"""Computations and memory of a stage follow its schedule; steps may differ in length; a schedule may be user-defined."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lab.families import family
from tests.lab.parity import assert_parity, compare, full_tensor, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.comm.collectives import all_reduce
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Model, Optimizer
from weft.memory.live_bytes import LiveBytes
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.plan_schedule import load_schedule
from weft.parallel.pipeline.schedule import Schedule, peak_in_flight
from weft.parallel.pipeline.stage import Stage
from weft.parallel.runtime import runtime
from weft.plan import Parallel, Pipeline, Plan
from weft.topology.mesh import build_mesh
from weft.training.forward_backward import forward_backward
from weft.training.optimizer import build_optimizer
from weft.training.step import evaluate

# All weight sizes differ from each other and from the number of tokens.
SIZES = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
LLAMA = Model(config={**family("llama"), **SIZES, "num_hidden_layers": 4})
MATRICES = {(48, 40): 1, (24, 40): 2, (40, 48): 1, (56, 40): 2, (40, 56): 1}  # of a block, by shape
MICRO_BATCHES = 4


def open_model(rank: int, ranks: int, plan: Plan, source: Model) -> tuple[Any, Plan, Any]:
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    return model.train(), plan, mesh


class MatmulCounter(TorchDispatchMode):
    """Number of matmuls by shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes[tuple(result.shape)] += 1
        return result


def count_matmuls(rank: int, ranks: int, plan: Plan) -> Counter[tuple[int, ...]]:
    model, *_ = open_model(rank, ranks, plan, LLAMA)
    batches = share(packed_batches(96)[0], 0, 1, 1)
    with MatmulCounter() as counter:
        forward_backward(model, batches, 1.0)
    return counter.shapes


@pytest.mark.must("parity: pipeline schedules", case="0-dualpipev-2")
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("zero", [0, 3])
def test_each_weight_gradient_is_computed_once(schedule: str, stages: int, zero: int) -> None:
    plan = plan_for("fp32", Pipeline(schedule=schedule, virtual_stages=stages), pp=2, zero=zero)
    for shapes in run_ranks(2, count_matmuls, plan):
        assert {shape: shapes[shape] for shape in MATRICES} == {
            shape: count * 2 * MICRO_BATCHES
            for shape, count in MATRICES.items()  # 2 blocks per rank
        }


def watch_bytes(
    rank: int, ranks: int, plan: Plan, num_micro_batches: int
) -> tuple[Schedule, list[tuple[int, str, int]]]:
    """Activation bytes after each action of a step: (stage, kind, bytes)."""
    model, *_ = open_model(rank, ranks, plan, LLAMA)
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer()), model, detect())
    batches = share(packed_batches(96, num_micro_batches * 2, 64)[0], 0, 1, 2)
    forward_backward(model, batches, 1.0)
    seen: list[tuple[int, str, int]] = []

    def recording(method: Any, kind: str) -> Any:
        def call(stage: Stage, *args: Any, **kwargs: Any) -> Any:
            out = method(stage, *args, **kwargs)
            split = kind == "B" and not kwargs.get("full_backward", True)
            seen.append((stage.stage_index, "I" if split else kind, live.current["activations"]))
            return out

        return call

    names = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
    with mock.patch.multiple(Stage, **{name: recording(getattr(Stage, name), kind) for name, kind in names.items()}):
        live = LiveBytes()
        optimizer.track(live)
        with live:
            forward_backward(model, batches, 1.0)
    pipeline = runtime(model).pipeline
    assert pipeline is not None
    return pipeline.schedule_of(num_micro_batches), seen


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("interleaved", 2), ("zbv", 2)]
)
def test_activation_memory_follows_the_schedule(schedule: str, stages: int) -> None:
    """Bytes held are a fixed cost per forward without backward, plus a fixed cost per pending weight gradient."""
    plan = plan_for("fp32", Pipeline(schedule=schedule, virtual_stages=stages), pp=2, zero=0)
    for rank, (order, seen) in enumerate(run_ranks(2, watch_bytes, plan, 8)):
        if schedule in ("gpipe", "1f1b", "interleaved"):
            seen = [entry for entry in seen if entry[1] != "W"]
        actions = [action for slot in order.slots[rank] for action in slot]
        assert [(stage, kind) for stage, kind, _ in seen] == [(action.stage, action.kind) for action in actions]
        sizes = torch.tensor([size for *_, size in seen]).double()
        # After each action: a constant for messages in flight; per stage, forwards that wait for B or I, and pending W.
        counts = [[1] * len(seen)]
        for stage in order.stages_of_rank(rank):
            own = ["".join(kind for index, kind, _ in seen[: i + 1] if index == stage) for i in range(len(seen))]
            counts.append([kinds.count("F") - kinds.count("B") - kinds.count("I") for kinds in own])
            counts.append([kinds.count("I") - kinds.count("W") for kinds in own])
        held = torch.tensor(counts).double().T
        held = held[:, held.any(0)]
        cost = torch.linalg.lstsq(held, sizes[:, None]).solution
        assert (held @ cost - sizes[:, None]).abs().max() < 0.05 * sizes.max()
        assert cost[0] < 0.1 * cost[1]
        if schedule in ("gpipe", "1f1b"):
            assert sizes.max() == pytest.approx(peak_in_flight(order)[rank] * cost[1].item(), rel=0.1)


def run_own_model(rank: int, ranks: int, plan: Plan) -> tuple[float, dict[str, torch.Tensor]]:
    """One step of a model that was loaded before `parallelize`, as in a user's training loop."""
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_plain(LLAMA, read_config(LLAMA), torch.float32).train(), plan, mesh)
    loss = forward_backward(model, share(packed_batches(96)[0], 0, 1, 1), 1.0)
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
    return all_reduce(loss, mesh, ("pp",)).item(), gradients


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_loaded_model_can_be_partitioned(zero: int) -> None:
    (expected, gradients), *_ = run_ranks(1, run_own_model, plan_for("fp32", zero=1))
    for loss, found in run_ranks(2, run_own_model, plan_for("fp32", pp=2, zero=zero)):
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, gradient in found.items():
            compare(name, gradient, gradients[name], 1e-5)


def call(rank: int, ranks: int, plan: Plan) -> None:
    model, *_ = open_model(rank, ranks, plan, LLAMA)
    model(input_ids=packed_batches(96)[0].input_ids)


def test_partitioned_model_cannot_be_called_directly() -> None:
    with pytest.raises(RankError, match=r"use train_step or evaluate of weft\.training\.step"):
        run_ranks(2, call, plan_for("fp32", pp=2, zero=1))


def run_lengths(rank: int, ranks: int, plan: Plan) -> list[float]:
    """Losses of steps with different row lengths and micro-batch sizes."""
    model, plan, mesh = open_model(rank, ranks, plan, LLAMA)
    losses = []
    for seq_len, rows in ((16, 4), (32, 4), (24, 6), (16, 2)):
        batches = share(packed_batches(96, rows, seq_len)[0], 0, 1, 4)
        loss = forward_backward(model, batches, 1.0)
        losses.append(all_reduce(loss, mesh, ("pp",)).item())
    return losses


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zbv", 2)])
def test_steps_may_differ_in_length(schedule: str, stages: int) -> None:
    plan = plan_for("fp32", Pipeline(schedule=schedule, virtual_stages=stages), pp=2, zero=1)
    alone = run_ranks(1, run_lengths, plan_for("fp32", zero=1))[0]
    for losses in run_ranks(2, run_lengths, plan):
        assert losses == pytest.approx(alone, rel=1e-6)


def evaluate_without_buffers(rank: int, ranks: int, plan: Plan) -> list[float]:
    """Held-out losses, with messages as those of NCCL that exceed its buffers: a rank waits for each one when it is issued."""
    store, issued, transfer = dist.group.WORLD.get_group_store(), Counter[str](), dist.batch_isend_irecv

    def rendezvous(ops: list[dist.P2POp]) -> list[dist.Work]:
        for op in ops:
            sends = op.op is dist.isend
            route = f"{rank} to {op.group_peer}" if sends else f"{op.group_peer} to {rank}"
            key, issued[route] = f"{plan.pipeline.schedule}, {route}, message {issued[route]}", issued[route] + 1
            if sends:
                store.wait([key], timedelta(seconds=20))
            else:
                store.set(key, "the receive is issued")
        works = transfer(ops)
        for work in works:
            work.wait()
        return works

    model, plan, _ = open_model(rank, ranks, plan, LLAMA)
    with mock.patch.object(dist, "batch_isend_irecv", rendezvous):
        return [evaluate(model, share(packed_batches(96, rows)[0], 0, 1, 1)) for rows in (4, 5)]


@pytest.mark.parametrize(("schedule", "stages"), [("interleaved", 2), ("zbv", 2), ("1f1b", 1)])
def test_evaluation_needs_no_buffers_of_the_transport(schedule: str, stages: int) -> None:
    plan = plan_for("fp32", Pipeline(schedule=schedule, virtual_stages=stages), pp=2, zero=1)
    alone = run_ranks(1, evaluate_without_buffers, plan_for("fp32", zero=1))[0]
    for losses in run_ranks(2, evaluate_without_buffers, plan):
        assert losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.must("format: pipeline schedule, file.csv")
def test_user_defined_schedule_file(tmp_path: Path) -> None:
    """1F1B with a joint slot and a reduction of torch, in a file."""
    file = tmp_path / "own.csv"
    file.write_text(
        "0F0,0F1,0F2,0B0,0F3,,0B1,0B2,0B3,0REDUCE_GRAD\n1F0,1B0,1F1,(1F2;1B1)OVERLAP_F_B,1I2,1F3,1W2,1B3\n",
        encoding="utf-8",
    )
    plan = plan_for("fp32", Pipeline(schedule=str(file)), pp=2, zero=1)
    assert_parity(LLAMA, plan, 2, micro_batch=1)


def test_schedule_file_that_deadlocks_is_refused_with_its_cycle(tmp_path: Path) -> None:
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", encoding="utf-8")
    plan = resolved(Plan(parallel=Parallel(pp=2), pipeline=Pipeline(schedule=str(file))), 2)
    with pytest.raises(PlanError, match="rank 0 waits with 0B0 for 1B0 on rank 1, which waits with 1F1 for 0F1"):
        load_schedule(plan, 2)
