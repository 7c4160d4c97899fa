"""Stacks of blocks within which the sequence or the heads are divided, and the weights of a model outside of them."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy, Block
from weft.parallel.tensor.checks import split_as_a_whole

Stacks = tuple[tuple[Block, ...], ...]


def sequence_stacks(model: Any, anatomy: Anatomy, tp: int) -> Stacks | None:
    """Stacks of blocks within which sequence parallelism splits the residual stream.

    Returns:
        None for a decoder of text, whose stream is split from the embedding to the head. The stream of a decoder with weights
        outside of embeddings, blocks, final norm and head, or that computes positions itself, is split within its blocks.
    """
    if anatomy.is_decoder:
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        return None if takes_positions and not _outer_weights(model, anatomy) else (anatomy.blocks,)
    own = tuple(
        block for block in split_as_a_whole(model, anatomy, tp) if not _needs_rows(model.get_submodule(block.name))
    )
    found: dict[str, list[Block]] = {}
    for block in anatomy.all_blocks:
        found.setdefault(block.name.rpartition(".")[0], []).append(block)
    is_split = (*own, *(anatomy.blocks if anatomy.has_roles else ()))
    return tuple(tuple(stack) for stack in found.values() if all(block in is_split for block in stack))


def _needs_rows(block: nn.Module) -> bool:
    """True for a block with a convolution along the sequence (Conformer), or over packed sequences without a dim of rows."""
    convolutions = (module for module in block.modules() if isinstance(module, nn.Conv1d))
    is_packed = "cu_seqlens" in inspect.signature(block.forward).parameters
    return is_packed or any(module.kernel_size != (1,) for module in convolutions)


def head_stacks(model: Any, anatomy: Anatomy, cp: int) -> Stacks:
    """Stacks of blocks whose heads are divided over `cp` ranks (`context_heads.py`).

    Returns:
        () for one rank, and for a decoder without an encoder of images or sounds beside it, whose attention is replaced.
    """
    if cp == 1:
        return ()
    if anatomy.is_decoder:
        return (anatomy.blocks,) if anatomy.tower_blocks and has_outer_weights(model, anatomy) else ()
    return sequence_stacks(model, anatomy, cp) or ()


def has_outer_weights(model: PreTrainedModel, anatomy: Anatomy) -> bool:
    """True if a model has weights besides those of its language model, such as a vision tower."""
    decoder = anatomy.blocks[0].name.rsplit(".", 2)[0] + "." if anatomy.blocks else ""
    return model.config.get_text_config() is not model.config and any(
        name != anatomy.head and not name.startswith(decoder) for name, _ in _outer_modules(model, anatomy)
    )


def _outer_modules(model: PreTrainedModel, anatomy: Anatomy) -> Iterator[tuple[str, nn.Module]]:
    """Modules with own weights besides blocks, embedding, final norm and head."""
    known = {anatomy.embedding, anatomy.head, anatomy.final_norm}
    blocks = tuple(f"{block.name}." for block in anatomy.blocks)
    for name, module in model.named_modules():
        has_weights = any(True for _ in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding)
        makes_positions = name.endswith("embed_positions") and not isinstance(module, nn.Embedding)
        if (has_weights or makes_positions) and name not in known and not f"{name}.".startswith(blocks):
            yield name, module


def _outer_weights(model: PreTrainedModel, anatomy: Anatomy) -> list[str]:
    """Modules outside of blocks, embedding, final norm and head that need whole sequences.

    If the stream were split there, they would see a part of the sequence only, and their gradients would be partial sums.
    What follows the body of a model without output embeddings has whole sequences.
    """
    body = f"{model.base_model_prefix}." if not anatomy.head else ""
    return [name for name, _ in _outer_modules(model, anatomy) if name.startswith(body)]
