"""Pruning of heads and feed-forward units: channels between two layers, which both become narrower.

Those go whose removal changes the output of the layer that reads them least, if the weights of the others make up for it
(Optimal Brain Surgeon: Hassibi and Stork, 1993; for structures Kurtic et al., ZipLM, 2023); they then do make up for it.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import Block, standard_name
from weft.compress.blocks import BATCH_ROWS, Hessians, calibrate_blocks, check_tokens
from weft.compress.folder import WeightWriter
from weft.compress.gptq import damped
from weft.compress.ranks import Ranks
from weft.compress.smaller import changed, check_shapes, kept_count, key_of, keys_of, not_streamed, shapes_of, text_keys
from weft.compress.source import Source
from weft.errors import ModelError, PlanError
from weft.parallel.tp_rules import (
    DOWN,
    KEY_VALUE,
    LATENT_KEY_VALUE,
    PACKED_FAMILIES,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    QUERY,
    UP,
    count_heads,
    count_kv_heads,
)

HEAD_KEYS = ("num_attention_heads", "decoder_attention_heads")
UNIT_KEYS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size")


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


@dataclass(frozen=True)
class Widths:
    """What each block keeps of its parts, and the configuration of the narrower model."""

    parts: dict[str, _Widths]
    """By part: heads, units."""
    config: Any


def plan_widths(
    model: Source, fraction: float, parts: tuple[str, ...], log: Callable[[str], None], *, optional: bool
) -> Widths:
    """Decide how many heads and units all blocks keep.

    Args:
        model: model to prune.
        fraction: fraction of the heads and units that goes.
        parts: heads, units.
        log: called with a line for a part that stays as it is.
        optional: leave out a part that cannot be pruned, if the other one can.

    Raises:
        ModelError: a part, or no part, can be pruned; or the model cannot be read block by block.
    """
    if not model.is_streamed:
        raise not_streamed(model, "heads and units are pruned", "prune a model of another family, or only its experts")
    found, problems = Widths({}, model.config), {}  # type: Widths, dict[str, ModelError]
    for part in parts:
        try:
            found = _narrow(model, found, part, fraction)
        except ModelError as error:
            if not optional or len(parts) == 1:
                raise
            problems[part] = error
    if not found.parts:
        raise ModelError(
            f"nothing of {model.anatomy.family} can be pruned by {fraction:g}",
            where="recipe",
            rule="; ".join(f"{part}: {_first_line(problem)}" for part, problem in problems.items()),
            fix="choose another fraction, or drop blocks, such as drop=0.3",
        )
    for part, problem in problems.items():
        log(f"{part} stay as they are: {_first_line(problem)}")
    return found


def _first_line(error: ModelError) -> str:
    return str(error).splitlines()[0]


def _narrow(model: Source, before: Widths, part: str, fraction: float) -> Widths:
    """Add a part to what is pruned.

    Raises:
        ModelError: the family has no such part, or no configuration for fewer of it.
    """
    candidates = _fewer_heads(model.config, fraction) if part == "heads" else _fewer_units(model, fraction)
    problem: ModelError | None = None
    for width, keys in candidates:
        widths = {**before.parts, part: width}
        try:
            config = changed(before.config, keys)
            check_shapes(config, set(model.shapes), _shapes_left(model, widths), shapes_of(config))
            return Widths(widths, config)
        except ModelError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _shapes_left(model: Source, widths: dict[str, _Widths]) -> dict[str, torch.Size]:
    """Shapes of all weights and saved buffers of the narrower model."""
    shapes = model.shapes
    for block in model.anatomy.blocks:
        for part, width in widths.items():
            module, first = model.model.get_submodule(block.name), torch.arange(width.kept)
            slices = _slices(model.config, block, module, part, width, first)
            for weight, (dim, kept) in slices.items():
                sizes = list(shapes[weight])
                sizes[dim] = len(kept)
                shapes[weight] = torch.Size(sizes)
    return shapes


def write_narrower(
    model: Source,
    widths: Widths | None,
    rows: Tensor,
    ranks: Ranks,
    writer: WeightWriter,
    log: Callable[[str], None],
) -> None:
    """Write all weights, those of pruned parts narrower. Collective; rank 0 writes.

    Args:
        model: model to prune.
        widths: from `plan_widths`; None: nothing becomes narrower.
        rows: token ids of calibration rows [rows, tokens], int64.
        ranks: ranks that share the work; all have the same arguments.
        writer: writer of the new folder.
        log: called with a line of progress.

    Raises:
        DataError: too few calibration rows.
    """
    written: set[str] = set()
    narrower = None if widths is None else build_on_meta(copy.deepcopy(widths.config), torch.float32)

    def write(name: str, tensor: Tensor) -> None:
        written.add(name)
        writer.write(model.as_stored(name, tensor.contiguous(), narrower if name in model.shapes else None))

    def change(prefix: str, module: nn.Module, hessians: Hessians) -> None:
        block = next(block for block in model.anatomy.blocks if block.name == prefix)
        slices: dict[str, _Slice] = {}
        for part, width in widths.parts.items() if widths else ():
            slices |= _prune_part(model.config, block, module, part, width, hessians)
        for name, weight in module.state_dict().items():
            sliced = slices.get(f"{prefix}.{name}")
            write(f"{prefix}.{name}", weight if sliced is None else weight.index_select(sliced.dim, sliced.kept))
        log(f"{prefix}: pruned")

    if widths is not None:
        blocks = [(block, model.model.get_submodule(block.name)) for block in model.anatomy.blocks]
        readers = [_part(model.config, block, module, part)[2] for part in widths.parts for block, module in blocks]
        check_tokens(rows.numel(), [reader.in_features for reader in readers])
        batches = ranks.share(rows).split(BATCH_ROWS)
        calibrate_blocks(model.model, model.anatomy, model.load, batches, change, ranks=ranks)
    for name in model.names:
        if name not in written:
            write(name, model.read(name))


def _fewer_heads(config: Any, fraction: float) -> Iterator[tuple[_Widths, dict[str, Any]]]:
    """Numbers of heads to keep, the wanted one first, with the keys of their configuration."""
    text = config.get_text_config()
    try:
        heads, kv_heads = count_heads(text), count_kv_heads(text)
    except PlanError as error:  # heads that the configuration does not have, or that differ between layers
        raise ModelError(
            str(error).splitlines()[0],
            where=f"model_type {config.model_type}",
            rule="all blocks keep the same number of heads, which the configuration has",
            fix='set prune_parts = ["units"] in a recipe file',
        ) from None
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelError(
            f"num_kv_shared_layers = {text.num_kv_shared_layers}",
            where=f"model_type {config.model_type}",
            rule="each block chooses its heads, and blocks that share keys and values would choose different ones",
            fix='set prune_parts = ["units"] in a recipe file',
        )
    wanted, per_group = kept_count(kv_heads, fraction, "key and value heads"), heads // kv_heads
    table = text_keys(config)
    key_of(config, HEAD_KEYS, heads, "heads")
    for kept in sorted(range(1, kv_heads), key=lambda count: abs(count - wanted)):
        keys: dict[str, Any] = dict.fromkeys(keys_of(config, HEAD_KEYS, heads), per_group * kept)
        keys |= dict.fromkeys(keys_of(config, ("num_key_value_heads",), kv_heads), kept)
        keys["head_dim"] = table.get("head_dim") or text.hidden_size // heads  # many families read it, if it is there
        yield _Widths(kv_heads, kept, per_group), keys


def _fewer_units(model: Source, fraction: float) -> Iterator[tuple[_Widths, dict[str, Any]]]:
    """Units to keep: a multiple of the largest power of two that matmuls and groups of weights like."""
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
    table = text_keys(model.config)
    unset = next((key for key in UNIT_KEYS if key in table and table[key] is None), "")  # a multiple of the hidden size
    yield _Widths(units, kept), {unset or key_of(model.config, UNIT_KEYS, units, "feed-forward units"): kept}


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


def _part(config: Any, block: Block, module: nn.Module, part: str) -> tuple[tuple[str, ...], str, nn.Linear]:
    """Modules of a part of a block, and the one layer that reads its channels, with its name; names are those in the block.

    Raises:
        ModelError: there is none, or several.
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
    return modules, *found


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
    _, name, reader = _part(config, block, module, part)
    weight, hessian = reader.weight.float(), hessians[f"{name}.weight", 0]
    chosen = choose(weight, hessian, width.groups, width.kept)
    columns = _members(chosen, reader.in_features // width.groups)
    reader.weight.data = refit(weight, hessian, columns).to(reader.weight.dtype)
    return _slices(config, block, module, part, width, chosen)


def _slices(
    config: Any, block: Block, module: nn.Module, part: str, width: _Widths, chosen: Tensor
) -> dict[str, _Slice]:
    """Kept part of each weight that becomes narrower, by full name, for chosen groups of channels [kept]."""
    modules, name, reader = _part(config, block, module, part)
    slices = {f"{block.name}.{name}.weight": _Slice(1, _members(chosen, reader.in_features // width.groups))}
    for each in modules:
        for full, layer in module.get_submodule(each).named_modules(prefix=each):
            if layer is not reader:
                rows = _rows_left(full, layer, config, chosen, width, part)
                slices |= {f"{block.name}.{key}": kept for key, kept in rows.items()}
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
    elif QUERY.fullmatch(last) or LATENT_KEY_VALUE.fullmatch(last):
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
