"""Optimizer construction and learning-rate schedule."""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weft.errors import JobError
from weft.job import Optimizer
from weft.optimizers.adafactor import Adafactor
from weft.optimizers.muon import Muon
from weft.optimizers.one_bit_adam import OneBitAdam
from weft.own_code import failure_of, finite_number, load_function
from weft.parallel.runtime import runtime

DECAY_SHARE = (
    0.2  # fraction of steps in the decay phase of "wsd" (Hägele et al., Scaling Laws Beyond Fixed Durations, 2024)
)

OTHER_PACKAGES = {"lion": "pytorch_optimizer:Lion"}
"""Classes of optimizers with a name of their own; the extra weft-train[optimizers] installs the packages."""
OF_THE_JOB = ("params", "groups", "lr", "betas", "eps", "weight_decay", "fused", "foreach", "kwargs")
"""Arguments of optimizers that are no options: other keys of the job set them, or Weft."""


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of a job for sharded or unsharded parameters. Matrices decay; vectors and biases do not.

    Args:
        model: parallelized model; any model with optimizers other than Muon.
        settings: table of the job.

    Raises:
        JobError: the named function or class does not make an optimizer of PyTorch, or does not have an option.
    """
    hidden = set(_hidden_matrices(model)) if settings.name == "muon" else set()
    by_kind: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # a fused update requires tensors of a single mesh
            decays = parameter.ndim >= 2 and "bias" not in name.rpartition(".")[2]  # biases of experts have two dims
            by_kind[decays, parameter in hidden, getattr(parameter, "device_mesh", None)].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": settings.weight_decay if decays else 0.0}
        | ({"orthogonalize": is_hidden} if settings.name == "muon" else {})
        for (decays, is_hidden, _), parameters in by_kind.items()
    ] or [{"params": []}]  # all stages of this pipeline rank are frozen
    if settings.name == "onebit-adam":
        return _make(OneBitAdam, groups, settings, freeze_steps=settings.freeze_steps)
    if settings.name == "muon":
        in_bf16 = runtime(model).plan.precision.param_dtype == "bf16"
        return _make(Muon, groups, settings, dtype=torch.bfloat16 if in_bf16 else None)
    if settings.name == "adafactor":
        return _make(Adafactor, groups, settings)
    if settings.name == "adamw":
        return _make(torch.optim.AdamW, groups, settings, fused=True)
    function: Any = load_function(OTHER_PACKAGES.get(settings.name, settings.name), "optimizer.name")
    if isinstance(function, type) and issubclass(function, torch.optim.Optimizer):
        return _make(function, groups, settings)
    optimizer = function(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"{settings.name} returned {type(optimizer).__name__}",
            where="optimizer.name",
            rule="the function returns a torch.optim.Optimizer of the parameter groups that it gets",
            fix="return the optimizer",
        )
    return optimizer


def _make(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], settings: Optimizer, **own: Any
) -> torch.optim.Optimizer:
    """Create an optimizer with those of lr, betas and eps that it has in this form, and with the options of the job."""
    known = inspect.signature(kind).parameters
    shared = {
        name: getattr(settings, name)
        for name in ("lr", "betas", "eps")
        if name in known and _has_form(known[name].default, getattr(settings, name))
    }
    options = [name for name in known if name not in (*OF_THE_JOB, *own)]
    unknown = settings.options.keys() - options
    try:
        if not unknown:
            return kind(groups, **{**shared, **own, **settings.options})
        problem = f"{kind.__name__} has no option {sorted(unknown)[0]}"
    except (TypeError, ValueError) as error:  # an invalid value
        problem = str(error)
    raise JobError(
        problem,
        where="optimizer.options",
        rule=f"the options of {kind.__name__} are {', '.join(options) or 'none'}; lr, betas, eps and weight_decay are keys of "
        "[optimizer]",
        fix="remove the option, or correct its name or value",
    )


def _has_form(default: Any, value: Any) -> bool:
    """True if an argument takes a value: it has no default, or one of the same type and length."""
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple | list) and len(default) == len(value)
    return isinstance(default, int | float)


def _hidden_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights of the linear layers and experts of the blocks, which Muon orthogonalizes."""
    present = dict(model.named_modules())
    for block in runtime(model).anatomy.blocks:
        for name, module in present[block.name].named_modules(prefix=block.name) if block.name in present else ():
            is_expert = any(f"{name}.".startswith(f"{experts}.") for experts in block.experts)
            for last, parameter in module.named_parameters(recurse=False):
                is_weight = parameter.ndim == 2 and last == "weight" and not isinstance(module, nn.Embedding)
                if is_weight or (parameter.ndim == 3 and is_expert):
                    yield parameter


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Learning rate of a step, from 1 to `steps`: linear warm-up, then the schedule.

    Raises:
        DataError: a schedule of the user fails, or returns no finite number.
    """
    if ":" in settings.schedule:
        function = load_function(settings.schedule, "optimizer.schedule")
        try:
            rate = function(step, steps, settings)
        except Exception as error:  # of the code of the user
            raise failure_of(error, settings.schedule, "optimizer.schedule") from None
        return finite_number(rate, f"step {step}", settings.schedule, "optimizer.schedule")
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
