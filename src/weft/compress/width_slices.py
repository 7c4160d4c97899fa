"""Rows and columns of the weights of a block that belong to its heads or feed-forward units."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Block, standard_name
from weft.errors import ModelError
from weft.parallel.tensor.rules import (
    DOWN,
    KEY_VALUE,
    LATENT_KEY_VALUE,
    PACKED_FAMILIES,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    QUERY,
    UP,
)


class Slice(NamedTuple):
    """Kept part of a weight."""

    dim: int
    kept: Tensor
    """Indices along the dimension."""


class Width(NamedTuple):
    """Channels between the layers of a part, in groups of which some are kept."""

    groups: int
    kept: int
    per_group: int = 1
    """Query heads that share a key and value head."""


def part_of(config: Any, block: Block, module: nn.Module, part: str) -> tuple[tuple[str, ...], str, nn.Linear]:
    """Modules of a part of a block, and the one layer that reads its channels, with its name; names are those in the block.

    Raises:
        ModelError: there is none, or several.
    """
    prefix = f"{block.name}."
    modules = tuple(name.removeprefix(prefix) for name in (block.attention if part == "heads" else block.mlp))
    found = reader_of(module, config, modules)
    if found is None:
        raise ModelError(
            f"the {part} of {block.name} are not read by one linear layer",
            where="recipe",
            rule="one layer, such as o_proj or down_proj, reads the heads of an attention or the units of an MLP",
            fix="leave this part out of prune_parts",
        )
    return modules, *found


def reader_of(model: nn.Module, config: Any, modules: tuple[str, ...]) -> tuple[str, nn.Linear] | None:
    """The one linear layer of some modules that reads their heads or units; None without one."""
    found = [
        (name, layer)
        for module in modules
        for name, layer in model.get_submodule(module).named_modules(prefix=module)
        if isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and DOWN.fullmatch(standard_name(config, name))
    ]
    return found[0] if len(found) == 1 else None


def slices_of(
    config: Any, block: Block, module: nn.Module, part: str, width: Width, chosen: Tensor
) -> dict[str, Slice]:
    """Kept part of each weight that becomes narrower, by full name, for chosen groups of channels [kept]."""
    modules, name, reader = part_of(config, block, module, part)
    slices = {f"{block.name}.{name}.weight": Slice(1, members(chosen, reader.in_features // width.groups))}
    for each in modules:
        for full, layer in module.get_submodule(each).named_modules(prefix=each):
            if layer is not reader:
                rows = _rows_left(full, layer, config, chosen, width, part)
                slices |= {f"{block.name}.{key}": kept for key, kept in rows.items()}
    return slices


def members(groups: Tensor, size: int) -> Tensor:
    """Indices of the members of groups of a size."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _rows_left(name: str, layer: nn.Module, config: Any, chosen: Tensor, width: Width, part: str) -> dict[str, Slice]:
    """Kept rows of the weights of a layer that writes the channels of a part."""
    last = standard_name(config, name)
    own = dict(layer.named_parameters(recurse=False))
    of_group, of_query = (chosen, width.groups), (members(chosen, width.per_group), width.groups * width.per_group)
    projections: list[tuple[Tensor, int]] = []
    if part == "units":
        projections = [of_group] * (2 if PACKED_UP.fullmatch(last) else 1 if UP.fullmatch(last) else 0)
    elif QUERY.fullmatch(last) or LATENT_KEY_VALUE.fullmatch(last):
        projections = [of_query]
    elif KEY_VALUE.fullmatch(last):
        projections = [of_group]
    elif PACKED_QUERY_KEY_VALUE.fullmatch(last) and config.model_type in PACKED_FAMILIES:
        projections = [of_query, of_group, of_group]
    else:
        own = {key: value for key, value in own.items() if PER_HEAD.fullmatch(key)}
        projections = [of_query]
    return {f"{name}.{key}": Slice(0, _rows(value.shape[0], projections)) for key, value in own.items() if projections}


def _rows(total: int, sizes: list[tuple[Tensor, int]]) -> Tensor:
    """Rows of a weight that are left, of projections one after the other.

    Args:
        total: rows of the weight.
        sizes: of each projection, the groups that are left, and their number before.
    """
    per_group, start, found = total // sum(groups for _, groups in sizes), 0, []
    for kept, groups in sizes:
        found.append(start + members(kept, per_group))
        start += groups * per_group
    return torch.cat(found)
