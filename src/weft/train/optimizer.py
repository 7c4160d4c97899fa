"""Optimizer construction and learning-rate schedule."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from weft.job import Optimizer
from weft.parallel.one_bit_adam import OneBitAdam

COSINE_FLOOR = 0.1  # final learning rate as a fraction of the peak
DECAY_SHARE = (
    0.2  # fraction of steps in the decay phase of "wsd" (Hägele et al., Scaling Laws Beyond Fixed Durations, 2024)
)


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of a job for sharded or unsharded parameters. Weight decay applies to matrices, not to vectors."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in trainable:  # a fused update requires tensors of a single mesh
        by_mesh[parameter.ndim >= 2, getattr(parameter, "device_mesh", None)].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": settings.weight_decay if decays else 0.0}
        for (decays, _), parameters in by_mesh.items()
    ] or [{"params": []}]  # all stages of this pipeline rank are frozen
    if settings.name == "onebit-adam":
        return OneBitAdam(groups, settings.lr, settings.betas, settings.eps, settings.freeze_steps)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Learning rate of a step, from 1 to `steps`: linear warm-up, then the schedule."""
    warmup = min(settings.warmup_steps, steps)
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    if settings.schedule == "cosine":
        return settings.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
    if settings.schedule == "wsd":
        remaining = steps - step
        return settings.lr * min(1.0, (remaining + 1) / max(DECAY_SHARE * steps, 1.0))
    return settings.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
