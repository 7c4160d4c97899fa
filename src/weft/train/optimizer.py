"""The update: AdamW over shards, the course of the learning rate, and the norm of the gradient."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.job import Optimizer
from weft.train.one_bit_adam import OneBitAdam

COSINE_FLOOR = 0.1  # of the peak learning rate, at the last step
DECAY_SHARE = 0.2  # of all steps, spent decaying by "wsd" (Hägele et al., Scaling Laws Beyond Fixed Durations, 2024)


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """The update rule of a job, on the model's parameters as they are, sharded or not. Matrices decay; vectors do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in trainable:  # one fused update takes tensors of one mesh only
        by_mesh[parameter.ndim >= 2, getattr(parameter, "device_mesh", None)].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": settings.weight_decay if decays else 0.0}
        for (decays, _), parameters in by_mesh.items()
    ] or [{"params": []}]  # of a rank of a pipeline whose stages are frozen
    if settings.name == "onebit-adam":
        return OneBitAdam(groups, settings.lr, settings.betas, settings.eps, settings.freeze_steps)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Learning rate of a step (from 1 to `steps`): linear warm-up, then the schedule."""
    warmup = min(settings.warmup_steps, steps)
    if step <= warmup:
        return settings.lr * step / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    if settings.schedule == "cosine":
        return settings.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))
    if settings.schedule == "wsd":
        left = steps - step
        return settings.lr * min(1.0, (left + 1) / max(DECAY_SHARE * steps, 1.0))
    return settings.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use this learning rate for the next step, in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def square_of_gradients(parameters: Iterable[nn.Parameter], ranks: int) -> torch.Tensor:
    """This rank's share of the squared norm of all gradients: the sum over ranks is that of the whole model, in any layout.

    A gradient that several ranks hold counts on each of them by its part.

    Args:
        parameters: whose gradients count; on all `ranks` the same ones, or shards of them.
        ranks: that share the parameters: all, or those of a stage of a pipeline.

    Returns:
        A float64 scalar.
    """
    local: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        shards = 1
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = math.prod(mesh.size(axis) for axis, p in enumerate(gradient.placements) if not p.is_replicate())
            gradient = gradient.to_local()
        local[shards].append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    for shards, gradients in local.items():
        norms = torch.stack(torch._foreach_norm(gradients, dtype=_norm_dtype(gradients[0])))
        total = total.to(norms.device) + norms.double().square().sum() * shards / ranks
    return total


def _norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by a factor, in place."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
