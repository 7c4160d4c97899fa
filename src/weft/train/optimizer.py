"""Optimizer construction and learning-rate schedule."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from weft.errors import JobError
from weft.job import Optimizer
from weft.own_code import load_function
from weft.parallel.one_bit_adam import OneBitAdam

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
    if settings.name != "adamw":
        return _own_optimizer(groups, settings)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def _own_optimizer(groups: list[dict[str, Any]], settings: Optimizer) -> torch.optim.Optimizer:
    optimizer = load_function(settings.name, "optimizer.name")(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"{settings.name} returned {type(optimizer).__name__}",
            where="optimizer.name",
            rule="the function returns a torch.optim.Optimizer of the parameter groups that it gets",
            fix="return the optimizer",
        )
    return optimizer


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Learning rate of a step, from 1 to `steps`: linear warm-up, then the schedule."""
    if ":" in settings.schedule:
        return float(load_function(settings.schedule, "optimizer.schedule")(step, steps, settings))
    warmup = min(settings.warmup_steps, steps)
    if step <= warmup:
        return settings.lr * step / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    decays = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress}
    decays["polynomial"] = (1 - progress) ** settings.power
    if settings.schedule in decays:
        return settings.lr * (settings.floor + (1 - settings.floor) * decays[settings.schedule])
    if settings.schedule == "wsd":
        remaining = steps - step
        return settings.lr * min(1.0, (remaining + 1) / max(DECAY_SHARE * steps, 1.0))
    return settings.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
