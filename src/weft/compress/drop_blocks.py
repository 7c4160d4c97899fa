"""Pruning of whole blocks: those whose output is closest to their input go (ShortGPT: Men et al., 2024)."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.anatomy.build import build_on_meta
from weft.compress.blocks import calibrate_blocks
from weft.compress.ranks import Ranks
from weft.compress.smaller import (
    changed,
    check_shapes,
    difference,
    kept_count,
    key_of,
    keys_of,
    not_streamed,
    text_keys,
)
from weft.compress.source import Source
from weft.errors import ModelError

BLOCK_KEYS = ("num_hidden_layers", "decoder_layers", "num_blocks")
LEADING = ("first_k_dense_replace", "num_dense_layers", "num_hash_layers")
"""Keys with a number of blocks, from the first on, that differ from the others."""
LONGEST_RUN = 8
"""Longest pattern of blocks in the configurations of Transformers, which a model repeats."""
INDEX_LISTS = (
    *("mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "moe_layers"),
    *("local_layer_ids", "hybrid_layer_ids", "ple_layer_ids"),
)
"""Keys with indices of blocks."""
LISTS = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_layers", "indexer_types"),
    *("no_rope_layers", "layer_rope_theta", "intermediate_size", "attention_window"),
    *("num_attention_heads_per_layer", "num_key_value_heads_per_layer", "swiglu_limits", "swiglu_limits_shared"),
    "block_configs",
)
"""Keys with a value for each block. Other lists, such as several end-of-text tokens, may have as many values by chance."""


def drop_blocks(
    model: Source, fraction: float, rows: Sequence[Tensor], ranks: Ranks, log: Callable[[str], None]
) -> None:
    """Remove the blocks that change their inputs least."""
    names = [block.name for block in model.anatomy.blocks]
    left = kept_count(len(names), fraction, "blocks")
    if not model.is_streamed:
        raise not_streamed(model, "blocks are dropped", "prune a model of another family, or only its experts")
    changes: list[float] = []

    def watch(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        pairs = zip(inputs, outputs, strict=True)
        alike = [torch.cosine_similarity(before.float(), after.float(), dim=-1) for before, after in pairs]
        of_tokens = torch.cat([each.flatten() for each in alike])
        total, count = ranks.sum(torch.tensor([of_tokens.sum().item(), len(of_tokens)], dtype=torch.float64)).tolist()
        changes.append(1 - total / count)

    batches = ranks.batches(rows)
    calibrate_blocks(model.model, model.anatomy, model.load, batches, watch=watch)
    kept, config = _blocks_left(model, changes, left)
    log("blocks that are dropped: " + ", ".join(name for i, name in enumerate(names) if i not in kept))
    model.rename(config, _names_left(model, kept))


def _blocks_left(model: Source, changes: list[float], left: int) -> tuple[list[int], Any]:
    """Blocks that are left, and the configuration of their model.

    Blocks of some families depend on their place. Where those that change least cannot go, runs of neighbours go one after the
    other, which keeps patterns such as experts in every second block.

    Args:
        changes: of each block, how much it changes its inputs.
        left: number of blocks that are left.

    Raises:
        ModelError: so many cannot go.
    """
    blocks = range(len(changes))
    try:
        kept = sorted(sorted(blocks, key=changes.__getitem__)[len(blocks) - left :])
        return kept, _config_of_blocks(model, kept)
    except ModelError as error:
        problem = error
    kept, config = list(blocks), model.config
    while len(kept) > left:
        runs = [
            kept[first : first + size]
            for size in range(1, min(LONGEST_RUN, len(kept) - left) + 1)
            for first in range(len(kept) - size + 1)
        ]
        for run in sorted(runs, key=lambda run: sum(changes[block] for block in run) / len(run)):
            fewer = [block for block in kept if block not in run]
            try:
                kept, config = fewer, _config_of_blocks(model, fewer)
                break
            except ModelError:
                continue
        else:
            raise problem
    return kept, config


def _config_of_blocks(model: Source, kept: list[int]) -> Any:
    """Configuration of the model with some of the blocks.

    Raises:
        ModelError: its model has other blocks in their places.
    """
    names = [block.name for block in model.anatomy.blocks]
    config = _without_blocks(model.config, kept, len(names))
    smaller = build_on_meta(copy.deepcopy(config), torch.float32).eval()
    for new, old in enumerate(kept):
        before = model.model.get_submodule(names[old])
        try:
            found = difference(before, smaller.get_submodule(names[new]))
        except AttributeError:
            found = "there is none"
        if found:
            raise ModelError(
                f"{names[old]} cannot take the place of {names[new]}: {found}",
                where="recipe",
                rule="blocks of some families depend on their place, and the configuration cannot describe every choice",
                fix="choose another fraction, or leave drop out of the recipe",
            )
    left = _names_left(model, kept)
    shapes = {name: model.shapes[old] for name, old in left.items() if old in model.shapes}
    check_shapes(config, set(model.shapes), shapes, {n: tensor.shape for n, tensor in smaller.state_dict().items()})
    return config


def _names_left(model: Source, kept: list[int]) -> dict[str, str]:
    """Names of all weights of a model with some of the blocks, each with its name now."""
    names = [block.name for block in model.anatomy.blocks]
    renamed = {f"{names[old]}.": f"{names[new]}." for new, old in enumerate(kept)}
    found = {}
    for name in model.names:
        prefix = next((f"{block}." for block in names if name.startswith(f"{block}.")), "")
        if not prefix:
            found[name] = name
        elif prefix in renamed:
            found[renamed[prefix] + name.removeprefix(prefix)] = name
    return found


def _without_blocks(config: Any, kept: list[int], count: int) -> Any:
    """Configuration with some of the blocks: what it says of each block is kept for those that are left.

    Args:
        config: configuration of all blocks.
        kept: blocks that are left.
        count: number of all blocks.

    Raises:
        ModelError: no key has the number of blocks, or the family refuses the new values.
    """
    table = text_keys(config)
    keys: dict[str, Any] = dict.fromkeys(keys_of(config, BLOCK_KEYS, count), len(kept))
    for name, value in table.items():
        if name in LEADING and isinstance(value, int):
            keys[name] = sum(block < value for block in kept)
        elif name in INDEX_LISTS and isinstance(value, list):
            keys[name] = [new for new, old in enumerate(kept) if old in value]
        elif isinstance(value, dict) and "layer" in name and value and all(str(key).isdecimal() for key in value):
            of_block = {int(key): (type(key), own) for key, own in value.items()}
            keys[name] = {of_block[old][0](new): of_block[old][1] for new, old in enumerate(kept) if old in of_block}
        elif name in LISTS and isinstance(value, list | tuple) and len(value) == count:
            keys[name] = [value[block] for block in kept]
    return changed(config, keys or {key_of(config, BLOCK_KEYS, count, "blocks"): len(kept)})
