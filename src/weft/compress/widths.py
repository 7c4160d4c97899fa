"""Pruning of heads and feed-forward units: channels between two layers, which both become narrower.

Those go whose removal changes the output of the layer that reads them least, if the weights of the others make up for it
(Optimal Brain Surgeon: Hassibi and Stork, 1993; for structures Kurtic et al., ZipLM, 2023); they then do make up for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from weft.anatomy.roles import Block, standard_name
from weft.compress.blocks import BATCH_ROWS, Hessians, calibrate_blocks, check_tokens
from weft.compress.folder import WeightWriter
from weft.compress.gptq import damped
from weft.compress.ranks import Ranks
from weft.compress.smaller import changed, kept_count, key_of, not_streamed
from weft.compress.source import Source
from weft.errors import ModelError, PlanError
from weft.parallel.tp_rules import (
    DOWN,
    KEY_VALUE,
    PACKED_FAMILIES,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    QUERY,
    UP,
    count_heads,
    count_kv_heads,
)

UNIT_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


class _Slice(NamedTuple):
    """Kept part of a weight."""

    dim: int
    kept: Tensor
    """Indices along the dimension."""


class _Widths(NamedTuple):
    """Channels between the layers of a part, in groups of which some are kept."""

    groups: int
    kept: int
    per_group: int = 1
    """Query heads that share a key and value head."""


def prune_widths(
    model: Source,
    fraction: float,
    parts: tuple[str, ...],
    rows: Tensor,
    ranks: Ranks,
    writer: WeightWriter,
    log: Callable[[str], None],
) -> tuple[dict[str, Tensor], Any]:
    """Write all weights, those of pruned parts narrower.

    Returns:
        Tensors on the meta device with the shapes of the written ones, and the smaller configuration.
    """
    if not model.is_streamed:
        raise not_streamed(model, "heads and units are pruned", "prune a model of another family, or only its experts")
    shapes: dict[str, Tensor] = {}
    widths, config = {}, model.config
    if "heads" in parts:
        widths["heads"], config = _fewer_heads(config, fraction)
    if "units" in parts:
        widths["units"], config = _fewer_units(model, config, fraction)

    def write(name: str, tensor: Tensor) -> None:
        shapes[name] = tensor.to("meta")
        writer.write(model.as_stored(name, tensor.contiguous()))

    def change(prefix: str, module: nn.Module, hessians: Hessians) -> None:
        block = next(block for block in model.anatomy.blocks if block.name == prefix)
        slices: dict[str, _Slice] = {}
        for part, width in widths.items():
            slices |= _prune_part(model.config, block, module, part, width, hessians)
        for name, weight in module.state_dict().items():
            sliced = slices.get(f"{prefix}.{name}")
            write(f"{prefix}.{name}", weight if sliced is None else weight.index_select(sliced.dim, sliced.kept))
        log(f"{prefix}: pruned")

    if parts:
        check_tokens(
            rows.numel(), [layer.in_features for layer in model.model.modules() if isinstance(layer, nn.Linear)]
        )
        batches = ranks.share(rows).split(BATCH_ROWS)
        calibrate_blocks(model.model, model.anatomy, model.load, batches, change, ranks=ranks)
    for name in model.names:
        if name not in shapes:
            write(name, model.read(name))
    return shapes, config


def _fewer_heads(config: Any, fraction: float) -> tuple[_Widths, Any]:
    """Heads that are kept: the number next to the wanted one that is valid in a configuration of the family."""
    try:
        heads, kv_heads = count_heads(config), count_kv_heads(config)
    except PlanError as error:  # heads that the configuration does not have, or that differ between layers
        raise ModelError(
            str(error).splitlines()[0],
            where=f"model_type {config.model_type}",
            rule="all blocks keep the same number of heads, which the configuration has",
            fix='set prune_parts = ["units"] in a recipe file',
        ) from None
    wanted, per_group = kept_count(kv_heads, fraction, "key and value heads"), heads // kv_heads
    table = config.to_dict()
    for kept in sorted(range(1, kv_heads), key=lambda count: abs(count - wanted)):
        keys = {key_of(config, ("num_attention_heads",), heads, "heads"): per_group * kept}
        if "num_key_value_heads" in table:
            keys["num_key_value_heads"] = kept
        if "head_dim" in table:
            keys["head_dim"] = table["head_dim"] or config.hidden_size // heads
        try:
            return _Widths(kv_heads, kept, per_group), changed(config, keys)
        except (ValueError, StrictDataclassError):  # hidden_size is not a multiple of the number of heads
            continue
    raise ModelError(
        f"a configuration of {config.model_type} with fewer than {kv_heads} key and value heads is not valid",
        where="recipe",
        rule="the pruned model has a valid configuration of its family",
        fix='set prune_parts = ["units"] in a recipe file',
    )


def _fewer_units(model: Source, config: Any, fraction: float) -> tuple[_Widths, Any]:
    """Units that are kept: a multiple of the largest power of two that matmuls and groups of weights like."""
    readers = (_reader(model.model, model.config, block.mlp) for block in model.anatomy.blocks)
    units = next((layer.in_features for _, layer in filter(None, readers)), 0)
    if not units:
        raise ModelError(
            f"{model.anatomy.family} has no feed-forward layer with a known name",
            where="recipe",
            rule="feed-forward units are the inputs of an nn.Linear such as down_proj, fc2 or c_proj",
            fix='set prune_parts = ["heads"] in a recipe file',
        )
    multiple = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if units % size == 0 and units >= 8 * size)
    kept = kept_count(units, fraction, "feed-forward units", multiple)
    return _Widths(units, kept), changed(config, {key_of(config, UNIT_KEYS, units, "feed-forward units"): kept})


def _reader(model: nn.Module, config: Any, modules: tuple[str, ...]) -> tuple[str, nn.Linear] | None:
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


def _prune_part(
    config: Any, block: Block, module: nn.Module, part: str, width: _Widths, hessians: Hessians
) -> dict[str, _Slice]:
    """Choose what a part of a block keeps, and let the layer that reads it make up for the rest, in place.

    Args:
        config: configuration before pruning.
        block: names of the block's parts.
        module: the block.
        part: heads or units.
        width: what is kept.
        hessians: of its matrices.

    Returns:
        Kept part of each weight that becomes narrower, by full name.
    """
    prefix = f"{block.name}."
    modules = tuple(name.removeprefix(prefix) for name in (block.attention if part == "heads" else block.mlp))
    found = _reader(module, config, modules)
    if found is None:
        raise ModelError(
            f"the {part} of {block.name} are not read by one linear layer",
            where="recipe",
            rule="one layer, such as o_proj or down_proj, reads the heads of an attention or the units of an MLP",
            fix="leave this part out of prune_parts",
        )
    name, reader = found
    weight, hessian = reader.weight.float(), hessians[f"{name}.weight", 0]
    chosen = choose(weight, hessian, width.groups, width.kept)
    columns = _members(chosen, reader.in_features // width.groups)
    reader.weight.data = refit(weight, hessian, columns).to(reader.weight.dtype)
    slices = {f"{prefix}{name}.weight": _Slice(1, columns)}
    for each in modules:
        for full, layer in module.get_submodule(each).named_modules(prefix=each):
            if layer is not reader:
                slices |= {
                    f"{prefix}{key}": s for key, s in _rows_left(full, layer, config, chosen, width, part).items()
                }
    return slices


def _members(groups: Tensor, size: int) -> Tensor:
    """Indices of the members of groups of a size."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _rows_left(
    name: str, layer: nn.Module, config: Any, chosen: Tensor, width: _Widths, part: str
) -> dict[str, _Slice]:
    """Kept rows of the weights of a layer that writes the channels of a part."""
    last = standard_name(config, name)
    own = dict(layer.named_parameters(recurse=False))
    of_group, of_query = (chosen, width.groups), (_members(chosen, width.per_group), width.groups * width.per_group)
    projections: list[tuple[Tensor, int]] = []
    if part == "units":
        projections = [of_group] * (2 if PACKED_UP.fullmatch(last) else 1 if UP.fullmatch(last) else 0)
    elif QUERY.fullmatch(last):
        projections = [of_query]
    elif KEY_VALUE.fullmatch(last):
        projections = [of_group]
    elif PACKED_QUERY_KEY_VALUE.fullmatch(last) and config.model_type in PACKED_FAMILIES:
        projections = [of_query, of_group, of_group]
    else:
        own = {key: value for key, value in own.items() if PER_HEAD.fullmatch(key)}
        projections = [of_query]
    return {f"{name}.{key}": _Slice(0, _rows(value.shape[0], projections)) for key, value in own.items() if projections}


def _rows(total: int, sizes: list[tuple[Tensor, int]]) -> Tensor:
    """Rows of a weight that are left, of projections one after the other.

    Args:
        total: rows of the weight.
        sizes: of each projection, the groups that are left, and their number before.
    """
    per_group, start, found = total // sum(groups for _, groups in sizes), 0, []
    for kept, groups in sizes:
        found.append(start + _members(kept, per_group))
        start += groups * per_group
    return torch.cat(found)


def choose(weight: Tensor, hessian: Tensor, groups: int, kept: int) -> Tensor:
    """Groups of columns to keep: those whose removal would change the outputs most, even if the others made up for it.

    Args:
        weight: [out, in], float32.
        hessian: [in, in], sum of x xT over the inputs.
        groups: number of groups of columns.
        kept: number of groups to keep.

    Returns:
        [kept], in ascending order.
    """
    size = weight.shape[1] // groups
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian)))
    blocks = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)])
    columns = weight.T.unflatten(0, (groups, size))  # [groups, size, out]
    costs = (columns * torch.linalg.solve(blocks, columns)).sum((1, 2))
    return costs.topk(kept).indices.sort().values


def refit(weight: Tensor, hessian: Tensor, index: Tensor) -> Tensor:
    """Weights with the least squared error of the outputs that use only some of the inputs.

    Args:
        weight: [out, in], float32; not changed.
        hessian: [in, in], sum of x xT over the inputs.
        index: columns that are used; all others are zero in the result.
    """
    removed = torch.ones(weight.shape[1], dtype=torch.bool).index_fill(0, index, False).nonzero().flatten()
    whole = damped(hessian)
    missing = weight[:, removed] @ whole[removed][:, index]
    correction = torch.cholesky_solve(missing.T, torch.linalg.cholesky(whole[index][:, index])).T
    result = torch.zeros_like(weight)
    result[:, index] = weight[:, index] + correction
    return result
