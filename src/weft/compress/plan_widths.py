"""Numbers of heads and feed-forward units that a pruning keeps: those that the configuration of a family can describe."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.anatomy.roles import Block
from weft.compress.smaller import changed, check_shapes, kept_count, key_of, keys_of, not_streamed, shapes_of, text_keys
from weft.compress.source import Source
from weft.compress.width_slices import Width, part_of, reader_of, slices_of
from weft.errors import ModelError, Refusal
from weft.parallel.tensor.rules import read_heads

HEAD_KEYS = ("num_attention_heads", "decoder_attention_heads")
UNIT_KEYS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size")


@dataclass(frozen=True)
class Widths:
    """Widths of the parts of all blocks, and the configuration of the narrower model."""

    parts: dict[str, Width]
    """By part: heads, units."""
    config: Any


def plan_widths(
    model: Source, fraction: float, parts: tuple[str, ...], log: Callable[[str], None], *, optional: bool
) -> Widths:
    """Decide how many heads and units all blocks keep.

    Args:
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
            expected = shapes_of(config)
        except ModelError as error:  # such as a hidden size that is not a multiple of the number of heads
            problem = problem or error
            continue
        check_shapes(config, set(model.shapes), _shapes_left(model, widths), expected)
        return Widths(widths, config)
    assert problem is not None
    raise problem


def _shapes_left(model: Source, widths: dict[str, Width]) -> dict[str, torch.Size]:
    """Shapes of all weights and saved buffers of the narrower model."""
    shapes = model.shapes
    for block in model.anatomy.blocks:
        for part, width in widths.items():
            module, first = model.model.get_submodule(block.name), torch.arange(width.kept)
            slices = slices_of(model.config, block, module, part, width, first)
            _check_norms(model.config, block, module, part, slices)
            for weight, (dim, kept) in slices.items():
                sizes = list(shapes[weight])
                sizes[dim] = len(kept)
                shapes[weight] = torch.Size(sizes)
    return shapes


def _check_norms(config: Any, block: Block, module: nn.Module, part: str, slices: Container[str]) -> None:
    """Check that no norm runs over all heads or units: it would have another result for those that are left.

    Raises:
        ModelError: one does.
    """
    modules, _, reader = part_of(config, block, module, part)
    for each in modules:
        for name, weight in module.get_submodule(each).named_parameters(prefix=each):
            is_whole = weight.ndim == 1 and weight.numel() == reader.in_features
            if is_whole and name.endswith(".weight") and f"{block.name}.{name}" not in slices:
                raise ModelError(
                    f"{block.name}.{name} is of all {part}",
                    where=f"model_type {config.model_type}",
                    rule="a norm over all heads or units would change those that are left",
                    fix="leave this part out of prune_parts",
                )


def _fewer_heads(config: Any, fraction: float) -> Iterator[tuple[Width, dict[str, Any]]]:
    """Numbers of heads to keep, the wanted one first, with the keys of their configuration."""
    text = config.get_text_config()
    counts = read_heads(text)
    if isinstance(counts, Refusal):  # heads that the configuration does not have, or that differ between layers
        raise ModelError(
            counts.what,
            where=f"model_type {config.model_type}",
            rule="all blocks keep the same number of heads, which the configuration has",
            fix='set prune_parts = ["units"] in a recipe file',
        )
    heads, kv_heads = counts
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
        yield Width(kv_heads, kept, per_group), keys


def _fewer_units(model: Source, fraction: float) -> Iterator[tuple[Width, dict[str, Any]]]:
    """Units to keep: a multiple of the largest power of two that matmuls and groups of weights like."""
    readers = (reader_of(model.model, model.config, block.mlp) for block in model.anatomy.blocks)
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
    of_blocks = {key: [kept] * len(table[key]) for key in UNIT_KEYS if isinstance(table.get(key), list)}
    unset = next((key for key in UNIT_KEYS if key in table and table[key] is None), "")  # a multiple of the hidden size
    yield (
        Width(units, kept),
        of_blocks or {unset or key_of(model.config, UNIT_KEYS, units, "feed-forward units"): kept},
    )
