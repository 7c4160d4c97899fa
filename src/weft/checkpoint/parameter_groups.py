"""Settings of an optimizer's parameter groups in a checkpoint, such as learning rates and counters of updates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError

KIND_SETTINGS = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "beta2_decay"})
"""Settings of a parameter group that tell kinds of PyTorch's optimizers apart."""


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Settings of each parameter group that JSON can hold."""
    plain = (int, float, str, list, tuple)  # also bool
    return tuple(
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    )


def check_kind(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]], folder: Path) -> None:
    """Refuse a checkpoint of another kind of optimizer, by the settings of its parameter groups.

    Raises:
        CheckpointError: the optimizer of the checkpoint has other settings.
    """
    own = {key for group in optimizer.param_groups for key in group} & KIND_SETTINGS
    then = {key for group in saved for key in group} & KIND_SETTINGS
    if saved and own != then:
        raise CheckpointError(
            f"the checkpoint is not of {type(optimizer).__name__}: its optimizer has the settings "
            f"{', '.join(sorted(then))}, this one {', '.join(sorted(own))}",
            where=str(folder),
            rule="the states of an optimizer are loaded into the same kind of optimizer",
            fix="prepare the model with the optimizer of the checkpoint",
        )


def restore_settings(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Set the settings of parameter groups from a checkpoint; JSON has lists for tuples such as betas."""
    for group, values in zip(optimizer.param_groups, _by_group(optimizer, saved), strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def restore_counters(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Set what the optimizer itself keeps in its groups, such as a number of updates; all settings are those of the job."""
    for group, values in zip(optimizer.param_groups, _by_group(optimizer, saved), strict=True):
        group.update({key: value for key, value in values.items() if key not in optimizer.defaults})


def _by_group(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Saved settings of each group; of another number of groups, as in a stage of a pipeline, what all groups share."""
    if len(saved) == len(optimizer.param_groups):
        return saved
    first = saved[0] if saved else {}
    shared = {key: value for key, value in first.items() if all(group.get(key) == value for group in saved)}
    return [shared] * len(optimizer.param_groups)
