"""Settings of an optimizer's parameter groups in a checkpoint, such as learning rates and counters of updates."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.checkpoint.slices import named_weights
from weft.comm.objects import all_gather_json
from weft.errors import CheckpointError
from weft.parallel.runtime import runtime

NAMES = "parameters"
"""Key of the names of a group's parameters in a checkpoint."""

KIND_SETTINGS = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "beta2_decay"})
"""Settings of a parameter group that tell kinds of PyTorch's optimizers apart."""


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters of each group of this rank."""
    names = {parameter: name for name, parameter in named_weights(model, runtime(model).anatomy).items()}
    return [sorted(names[p] for p in group["params"] if p in names) for group in optimizer.param_groups]


def settings_of(
    optimizer: torch.optim.Optimizer, names: list[list[str]], stages: dist.ProcessGroup
) -> tuple[dict[str, Any], ...]:
    """Settings of all parameter groups that JSON can hold, and the names of their parameters. Collective over `stages`.

    Args:
        optimizer: optimizer of this rank.
        names: result of `group_names`.
        stages: ranks of the pp axis. Their groups with the same settings become one.
    """
    plain = (int, float, str, list, tuple)  # also bool
    own = [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    pairs = list(zip(own, names, strict=True))
    gathered = all_gather_json(pairs, stages) if stages.size() > 1 else [pairs]
    merged: dict[str, dict[str, Any]] = {}
    for settings, own_names in (pair for pairs in gathered for pair in pairs):
        found = merged.setdefault(json.dumps(settings, sort_keys=True), {**settings, NAMES: []})
        found[NAMES] = sorted({*found[NAMES], *own_names})
    return tuple(merged[key] for key in sorted(merged))  # in the same order under every plan


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


def restore_settings(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Set the settings of parameter groups from a checkpoint; JSON has lists for tuples such as betas."""
    for group, values in _saved_settings(model, optimizer, saved):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def restore_counters(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    """Set what the optimizer itself keeps in its groups, such as a number of updates; all settings are those of the job."""
    for group, values in _saved_settings(model, optimizer, saved):
        group.update({key: value for key, value in values.items() if key not in optimizer.defaults})


def _saved_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a group and the saved settings of its first parameter: stages and plans order groups differently."""
    of_name = {name: group for group in saved for name in group.get(NAMES, ())}
    for group, names in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        if names and names[0] in of_name:
            yield group, {key: value for key, value in of_name[names[0]].items() if key != NAMES}
