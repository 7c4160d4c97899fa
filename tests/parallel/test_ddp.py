"""Gradient buckets of DDP: unused parameters, several backwards, and persistent buffers."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn

from tests.lab.families import family
from tests.lab.parity import SETTINGS, assert_parity, compare, full_tensor, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.comm.compression.codecs import build_feedback
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.data.ddp import GradientReducer, Unit
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Comm, Parallel, Plan, Precision
from weft.topology.mesh import build_mesh
from weft.training.forward_backward import forward_backward
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.first.spare = nn.Linear(2, 2)  # no rank uses it

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x) if both else x).sum()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, world_size: int, rank_that_skips: int) -> dict[str, torch.Tensor]:
    """Gradients after two steps, of which the second has two micro-batches; one rank never uses the second block."""
    model = TwoBlocks()
    reducer = GradientReducer([Unit(name, torch.distributed.group.WORLD) for name in ("second", "first", "")])
    model.register_forward_pre_hook(reducer.prepare)
    both = rank != rank_that_skips
    model(inputs(rank, 0), both).backward()
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    for micro_batch in (1, 2):
        reducer.last_micro_batch = micro_batch == 2
        model(inputs(rank, micro_batch), both).backward()
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == addresses
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_averages_with_a_parameter_that_one_rank_does_not_use() -> None:
    for rank_that_skips in (-1, 0, 1):
        plain = TwoBlocks()
        for rank in (0, 1):
            for micro_batch in (1, 2):
                (plain(inputs(rank, micro_batch), rank != rank_that_skips) / 2).backward()
        used = {name: p for name, p in plain.named_parameters() if p.grad is not None}
        for gradients in run_ranks(2, train, rank_that_skips):
            assert gradients.keys() == used.keys()
            for name, parameter in used.items():
                torch.testing.assert_close(gradients[name], parameter.grad, msg=f"{name}, {rank_that_skips} skips")


class Branches(nn.Module):
    """Model with a weight that only the first step uses, and a weight that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.once, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.always(x)
        return (self.once(x) if step == 0 else x).square().sum()


def three_steps(model: nn.Module, ranks: range) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        for rank in ranks:
            (model(inputs(rank, step), step) / (1 if len(ranks) == 1 else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def replicated_steps(rank: int, world_size: int, compression: str) -> dict[str, torch.Tensor]:
    model = Branches()
    plan = Plan(comm=Comm(compression=compression))  # type: ignore[arg-type]
    feedback = build_feedback(plan.comm)
    reducer = GradientReducer([Unit("", torch.distributed.group.WORLD)], feedback)
    model.register_forward_pre_hook(reducer.prepare)
    if feedback is not None:
        model.register_forward_pre_hook(lambda *_: feedback.begin(1.0, None))
    return three_steps(model, range(rank, rank + 1))


def forget_model(rank: int, world_size: int, zero: int) -> int:
    source, plan = Model(config=family("llama")), resolved(plan_for("fp32", zero=zero), world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, build_mesh(plan, "cpu", world_size))
    materialize(model, source, torch.device("cpu"))
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    train_step(model, optimizer, share(packed_batches(96)[0], rank, world_size, 2), SETTINGS.clip_norm)
    parameters = [ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_nothing_refers_to_is_freed(zero: int, ranks: int) -> None:
    assert run_ranks(ranks, forget_model, zero) == [0] * ranks


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_weight_decay_skips_weights_without_gradient(compression: str) -> None:
    expected = three_steps(Branches(), range(2))
    torch.testing.assert_close(expected["never.weight"], Branches().never.weight.detach(), rtol=0, atol=0)
    for weights in run_ranks(2, replicated_steps, compression):
        for name, weight in expected.items():
            exact = name.startswith("never")
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5 if compression == "none" else 0.05}
            torch.testing.assert_close(weights[name], weight, **close, msg=name)


def test_unused_vision_tower_is_not_updated() -> None:
    assert_parity(Model(config=shrunk("gemma3")), plan_for("fp32", zero=0), world_size=2, micro_batch=2)


def step_in_bfloat16(rank: int, world_size: int, name: str, zero: int) -> tuple[float, dict[str, torch.Tensor]]:
    plan = resolved(Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="bf16")), world_size)  # type: ignore[arg-type]
    source, mesh = Model(config=shrunk(name)), build_mesh(plan, "cpu", world_size)
    model = parallelize(build_plain(source, read_config(source), torch.float32), plan, mesh).train()
    loss = forward_backward(model, share(packed_batches(96)[0], rank, world_size, 2), 1.0)
    return loss.item(), {
        name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", ["xglm", "mvp", "trocr"])
def test_families_whose_buffers_or_masks_have_another_dtype_than_forward(name: str) -> None:
    """The inputs of blocks are cast as under the other stages."""
    loss, expected = run_ranks(2, step_in_bfloat16, name, 1)[0]
    value, found = run_ranks(2, step_in_bfloat16, name, 0)[0]
    assert value == pytest.approx(loss, rel=1e-6)
    for key, gradient in expected.items():
        if not key.endswith("k_proj.bias"):  # zero except for rounding
            compare(key, found[key], gradient, 0.02)  # bfloat16 gradients, summed in another order
