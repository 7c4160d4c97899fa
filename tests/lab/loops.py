"""A loop of a user's own on ranks, beside PyTorch alone in one process that has the rows of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from tests.lab.pool import run_ranks
from weft.plan import Plan

STEPS = 3


@dataclass(frozen=True)
class Loop:
    """Functions of a module, so that ranks can be sent them."""

    make: Callable[[], nn.Module]
    """Makes the model with its weights, the same in each call."""
    loss: Callable[[Any, int, int], Tensor]
    """Loss of (model, step, rank)."""
    pooled: Callable[[Any, int], Tensor] | None = None
    """Loss of (model, step) for the rows of both ranks; None: the mean of the losses of both ranks."""
    decay: float = 0.1


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    """Parameters and buffers."""


def _optimizer(decay: float, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=decay, eps=1e-3)


def train_alone(loop: Loop, ranks: int = 2) -> Trained:
    """PyTorch alone."""
    model = loop.make()
    optimizer, losses = _optimizer(loop.decay, model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        if loop.pooled is None:
            loss = torch.stack([loop.loss(model, step, rank) for rank in range(ranks)]).mean()
        else:
            loss = loop.pooled(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, _state(model))


def train_on_rank(rank: int, ranks: int, loop: Loop, plan: Plan) -> Trained:
    """`weft.prepare` on one rank."""
    run = weft.prepare(loop.make(), optimizer=partial(_optimizer, loop.decay), plan=plan)
    losses = []
    for step in range(STEPS):
        with run.accumulate():
            losses.append(run.backward(loop.loss(run.model, step, run.data_rank)).item())
        run.step()
    return Trained(losses, _state(run.model))


def _state(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def check_loop(loop: Loop, plan: Plan, ranks: int = 2, tolerance: float = 2e-6) -> list[Trained]:
    """Compare losses and weights on ranks with PyTorch alone; returns what the ranks have."""
    expected, found = train_alone(loop, ranks), run_ranks(ranks, train_on_rank, loop, plan)
    for own in found:
        torch.testing.assert_close(own.losses, expected.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(own.weights, expected.weights, rtol=tolerance, atol=tolerance)
    return found
