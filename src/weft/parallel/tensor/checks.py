"""Checks before tensor parallelism: divisible heads and hidden units, and a known role for every weight."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.anatomy.transformers import is_diffusers
from weft.errors import Refusal
from weft.parallel.model_checks import reason_against_decoder, reason_against_streams
from weft.parallel.tensor.adapters import is_magnitude, linear_parts
from weft.parallel.tensor.rules import (
    ATTENTION_MATRICES,
    DOWN,
    FIXED_WIDTH,
    MLP_MATRICES,
    PACKED_FAMILIES,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    PER_HEAD_COLUMNS,
    PROJECTION_NORM,
    READS_EMBEDDING,
    SEVERAL_INPUTS,
    config_of,
    inner_features,
    is_depthwise,
    out_features,
    read_heads,
    regions_of,
    wide_norms,
    width_of_head,
)


@dataclass(frozen=True)
class Indivisible:
    """Reason against one degree of tp, which other degrees may avoid."""

    what: str
    where: str
    rule: str


Reasons = dict[str, Refusal | Indivisible]


def reason_against_tp(
    model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool, *, replicates: bool = False
) -> Refusal | None:
    """Reason against a tp degree: it does not divide heads, KV heads or hidden units, or a weight has no known role.

    Args:
        model: full model.
        anatomy: its roles.
        tp: number of tp ranks.
        sp: True for sequence parallelism.
        replicates: allow `replicated_parts`, if other parts of the blocks are split.

    Returns:
        Where other degrees are possible, the fix lists all of them.
    """
    reason = _reason_against_degree(model, anatomy, tp, sp, replicates)
    if not isinstance(reason, Indivisible):
        return reason
    heads = read_heads(model.config.get_text_config())
    if isinstance(heads, Refusal):
        return heads
    others = (n for n in divisors(heads[0]) if n > 1)
    valid = [n for n in others if not _reason_against_degree(model, anatomy, n, sp, replicates)]
    return Refusal(reason.what, reason.where, reason.rule, f"set plan.parallel.tp to {one_of([1, *valid])}")


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending, including the number itself."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def one_of(numbers: list[int]) -> str:
    """Text of the choices in a fix: "4", or "one of 1, 2, 4"."""
    return ("one of " if len(numbers) > 1 else "") + ", ".join(map(str, numbers))


def _reason_against_degree(
    model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool, replicates: bool
) -> Refusal | Indivisible | None:
    if unlike := reason_against_decoder(model, anatomy, "tp"):
        return unlike
    if anatomy.is_decoder and anatomy.family in READS_EMBEDDING:
        return Refusal(
            f"the code of {anatomy.family} reads the weight of its embedding",
            where=f"plan.parallel.tp, model_type {anatomy.family}",
            rule="ranks of tp divide the vocabulary: each has a part of this weight",
            fix="set plan.parallel.tp = 1",
        )
    if sp and (added := reason_against_streams(model, anatomy, "sp", "set plan.parallel.sp = false")):
        return added
    if not replicates:
        return reason_against_blocks(model, anatomy, anatomy.blocks, tp)
    whole: Reasons = {}
    for block in anatomy.blocks:
        reasons = _reasons_against_parts(model, anatomy, block, tp)
        if reason := _reason_against_replicas(model, block, reasons):
            return reason
        whole |= reasons
    parts = {part for block in anatomy.blocks for part in (*block.attention, *block.cross_attention, *block.mlp)}
    if not parts:
        heads = read_heads(model.config.get_text_config())
        return heads if isinstance(heads, Refusal) else None
    return next(iter(whole.values())) if whole.keys() >= parts else None


def _reasons_against_parts(model: PreTrainedModel, anatomy: Anatomy, block: Block, tp: int) -> Reasons:
    """Attentions and MLP of a block that cannot be split, with the reason."""
    dense = () if block.is_moe else block.mlp  # ranks divide the tokens of experts
    parts = (*block.attention, *block.cross_attention, *dense)
    return {part: reason for part in parts if (reason := _reason_against_part(model, anatomy, block, part, tp))}


def _reason_against_replicas(model: PreTrainedModel, block: Block, reasons: Reasons) -> Refusal | Indivisible | None:
    """First of `reasons` for a part that another degree could split, or that cannot be replicated alone.

    The latter is an MLP of which another part of the block computes the other half, such as fc1 and fc2.
    """
    for part, reason in reasons.items():
        is_half = isinstance(model.get_submodule(part), nn.Linear | Conv1D) or _regions(model, part) != [part]
        if isinstance(reason, Indivisible) or (part in block.mlp and is_half):
            return reason
    return None


def replicated_parts(model: PreTrainedModel, anatomy: Anatomy, block: Block, tp: int) -> tuple[str, ...]:
    """Attentions and MLP of a block that each tp rank computes in full, because the role of a weight is not known."""
    return tuple(_reasons_against_parts(model, anatomy, block, tp))


def splittable(model: Any, anatomy: Anatomy, tp: int) -> tuple[Block, ...]:
    """Blocks besides those of a language model that can be split over `tp` ranks; the others are computed by all ranks.

    All ranks also compute the `replicated_parts` of these blocks. Blocks beside a decoder of text are split as a whole or
    not at all.
    """
    found = list(split_as_a_whole(model, anatomy, tp))
    if not anatomy.is_decoder:
        for block in (block for block in _other_blocks(anatomy) if block not in found and not block.is_moe):
            reasons = _reasons_against_parts(model, anatomy, block, tp)
            if not _reason_against_replicas(model, block, reasons) and _is_complete(model, block, tuple(reasons)):
                found.append(block)
    return tuple(found)


def _other_blocks(anatomy: Anatomy) -> tuple[Block, ...]:
    return (*anatomy.tower_blocks, *anatomy.encoder_blocks) if anatomy.has_roles else anatomy.blocks


def split_as_a_whole(model: Any, anatomy: Anatomy, tp: int) -> Iterator[Block]:
    """Blocks of `splittable` with a known role for every weight of attention and MLP.

    In Lumina-Next, two attentions share an output layer outside of them: those of Diffusers need one of their own.
    """
    for block in _other_blocks(anatomy):
        is_whole = block.attention and block.mlp and not _has_layers(block)
        if not is_whole or reason_against_blocks(model, anatomy, (block,), tp):
            continue
        if not is_diffusers(model) or _is_complete(model, block, ()):
            yield block


def _has_layers(block: Block) -> bool:
    """True for a stage of several layers (SegFormer), inside of which the shape of the stream changes."""
    names = [part.removeprefix(f"{block.name}.") for part in (*block.attention, *block.mlp)]
    return any(re.match(r"(?!layer\.)\w+\.\d+\.", name) for name in names)  # T5 has a list `layer` of attention and MLP


def _is_complete(model: Any, block: Block, whole: tuple[str, ...]) -> bool:
    """True if something is split, and the output of each split attention and of the split MLPs is summed over ranks."""

    def layers(part: str) -> list[str]:
        config = config_of(model, block.name)
        names = _regions(model, part)
        return [layer.last for name in names for layer in linear_parts(model.get_submodule(name), config, name)]

    attentions = [layers(part) for part in (*block.attention, *block.cross_attention) if part not in whole]
    mlps = [layer for part in block.mlp if part not in whole for layer in layers(part)]
    sums = [any(DOWN.fullmatch(layer) for layer in found) for found in (*attentions, *([mlps] if mlps else []))]
    return bool(sums) and all(sums) and (not mlps or not all(map(DOWN.fullmatch, mlps)))


def reason_against_blocks(
    model: PreTrainedModel, anatomy: Anatomy, blocks: tuple[Block, ...], tp: int
) -> Refusal | Indivisible | None:
    """Reason against blocks whose heads or hidden units `tp` does not divide, or with weights whose role is not known."""
    for block in blocks:
        if reason := _reason_against_heads(model, anatomy, block, tp):
            return reason
        for part in (*block.attention, *block.cross_attention, *block.mlp):
            if reason := _reason_against_part(model, anatomy, block, part, tp):
                return reason
    return None


def _reason_against_heads(
    model: PreTrainedModel, anatomy: Anatomy, block: Block, tp: int
) -> Refusal | Indivisible | None:
    counts = read_heads(config_of(model, block.name))
    if isinstance(counts, Refusal):
        return counts
    heads, kv_heads = counts
    what = ""
    if heads % tp:
        what = f"{heads} attention heads cannot be divided by tp = {tp}"
    elif kv_heads % tp and tp % kv_heads:
        what = f"{kv_heads} KV heads cannot be divided by tp = {tp}, nor tp by {kv_heads}"
    rule = "every tp rank has the same number of heads; with fewer KV heads than ranks, every KV head is on the same "
    where = f"plan.parallel.tp, model_type {anatomy.family}"
    return Indivisible(what, where, f"{rule}number of ranks") if what else None


def _reason_against_part(
    model: PreTrainedModel, anatomy: Anatomy, block: Block, part: str, tp: int
) -> Refusal | Indivisible | None:
    """Reason against an attention or MLP, see `reason_against_blocks`: first weights of unknown role, then degrees."""
    config = config_of(model, block.name)
    is_attention = part in (*block.attention, *block.cross_attention)
    if is_attention and anatomy.family in FIXED_WIDTH:
        return Refusal(
            f"the attention of {anatomy.family} computes all heads together",
            where=f"plan.parallel, model_type {anatomy.family}",
            rule="its code reshapes heads to the width of the residual stream",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    if is_attention and SEVERAL_INPUTS & inspect.signature(model.get_submodule(part).forward).parameters.keys():
        return Refusal(
            f"{part} has several inputs",
            where=f"plan.parallel, model_type {anatomy.family}",
            rule="tp and cp divide the heads of attention with one input, or with the outputs of an encoder beside it",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    families = {anatomy.family, getattr(config, "model_type", None)}  # ModernVBERT has the blocks of ModernBERT
    for child, _ in model.get_submodule(part).named_children():
        last = standard_name(config, f"{part}.{child}")
        packed = PACKED_QUERY_KEY_VALUE.fullmatch(last) or PACKED_UP.fullmatch(last)
        if packed and not block.is_moe and not families & set(PACKED_FAMILIES):
            return Refusal(
                f"the row order of {part}.{child} is not known",
                where=f"plan.parallel.tp, model_type {anatomy.family}",
                rule="a weight that packs several projections is split only in families whose row order is known: "
                + ", ".join(PACKED_FAMILIES),
                fix="set plan.parallel.tp = 1, or add this family to PACKED_FAMILIES in src/weft/parallel/tensor/rules.py",
            )
    if not is_attention and block.is_moe:
        return None
    for name in _regions(model, part):
        region = model.get_submodule(name)
        reason = (
            _reason_against_attention(name, region, config, tp)
            if is_attention
            else _reason_against_matrices(name, region, config, MLP_MATRICES, tp)
        )
        if reason:
            return reason
    if is_attention:
        return _reason_against_heads(model, anatomy, block, tp)
    layer = model.get_submodule(part)
    return _reason_against_half(model, part, layer) if isinstance(layer, nn.Linear) else None


def _reason_against_half(model: PreTrainedModel, part: str, layer: nn.Linear) -> Refusal | None:
    """Reason against half of an MLP beside weights over its hidden units, such as the norm of ConvNeXt V2."""
    parent, _, own_name = part.rpartition(".")
    units, width = max(layer.weight.shape), min(layer.weight.shape)
    for name, module in model.get_submodule(parent).named_children():
        sizes = {parameter.numel() for parameter in module.parameters(recurse=False)}
        if name != own_name and not isinstance(module, nn.Linear) and units in sizes and units != width:
            return _unknown_role(f"{parent}.{name}", "a weight over the hidden units of an MLP needs all of them")
    return None


def _regions(model: PreTrainedModel, part: str) -> list[str]:
    return regions_of(model.get_submodule(part), part)


def _unknown_role(name: str, rule: str) -> Refusal:
    return Refusal(
        f"tensor parallelism does not know the role of {name}",
        where="plan.parallel.tp",
        rule=rule,
        fix="set plan.parallel.tp = 1, or give this module a role in [model.roles] (docs/extending.md)",
    )


def _reason_against_attention(name: str, attention: Any, config: Any, tp: int) -> Refusal | Indivisible | None:
    if unknown := _reason_against_matrices(name, attention, config, ATTENTION_MATRICES, tp):
        return unknown
    if isinstance(counts := read_heads(config), Refusal):
        return counts
    heads, kv_heads = counts
    for child, module in attention.named_modules():
        names = {key: f"{child}.{key}" for key, _ in module.named_parameters(recurse=False)}
        own = [
            key for key, full in names.items() if not PER_HEAD.fullmatch(key) and not PER_HEAD_COLUMNS.fullmatch(full)
        ]
        norm = PROJECTION_NORM.fullmatch(standard_name(config, child))
        if own and not norm and not isinstance(module, nn.Linear | Conv1D) and not is_magnitude(child):
            rule = "weights inside attention are split by head, according to their names"
            return _unknown_role(f"{name}.{child or own[0]}", rule)
        if norm and any(parameter.ndim > 1 for parameter in module.parameters()):
            return _unknown_role(f"{name}.{child}", "a norm of queries or keys has one weight per feature")
    if _has_other_heads(attention, heads, kv_heads):
        return Refusal(
            f"{name} has another number of heads or KV heads than the {heads} and {kv_heads} in the configuration",
            where="plan.parallel.tp",
            rule="heads are divided among tp ranks by the numbers in the configuration",
            fix="set plan.parallel.tp = 1",
        )
    packed = any(PACKED_QUERY_KEY_VALUE.fullmatch(child) for child, _ in attention.named_children())
    wide = any(True for _ in wide_norms(attention, config))
    if kv_heads % tp and (packed or wide):
        why = "packs queries and KV heads in one weight" if packed else "normalises all KV heads together"
        return Indivisible(
            f"{kv_heads} KV heads cannot be divided by tp = {tp}, and {name} {why}",
            where="plan.parallel.tp",
            rule="KV heads are replicated on several ranks only if their weight is separate and their norm is per head",
        )
    return None


def _has_other_heads(attention: Any, heads: int, kv_heads: int) -> bool:
    """True if the number of heads of an attention differs from the configuration; KV heads are read from its weights."""
    head_dim, groups = width_of_head(attention), getattr(attention, "num_key_value_groups", None)
    keys = getattr(attention, "k_proj", getattr(attention, "to_k", None))
    found = out_features(keys) // head_dim if keys is not None and head_dim and hasattr(keys, "weight") else kv_heads
    own_heads = getattr(attention, "heads", heads)  # Diffusers
    return found != kv_heads or (groups is not None and groups * kv_heads != heads) or own_heads != heads


def _reason_against_matrices(
    name: str, part: nn.Module, config: Any, known: tuple[re.Pattern[str], ...], tp: int
) -> Refusal | Indivisible | None:
    """Reason against a part of a block with unknown weights, or with hidden units that tp does not divide."""
    units_of_layers = set()
    for child, module, last, matrix, _ in linear_parts(part, config, name):
        full = f"{name}.{child}" if child else name
        if not any(pattern.fullmatch(last) for pattern in known):
            rule = f"a linear layer is split by rows or columns according to its name; {last} is not a known name"
            return _unknown_role(full, rule)
        if matrix == "weight" and known is MLP_MATRICES:
            units = inner_features(module, last)
            units_of_layers.add(units)
            if units % tp:
                return Indivisible(
                    f"{units} hidden units of {full} cannot be divided by tp = {tp}",
                    where="plan.parallel.tp",
                    rule="every tp rank has the same number of hidden units of an MLP",
                )
    if len(units_of_layers) > 1:  # such as a gate and its units in one layer of Diffusers
        return _unknown_role(name, "all linear layers of an MLP have the same number of hidden units")
    for child, module in part.named_modules() if known is MLP_MATRICES else ():
        # A scalar, such as the parameter of a learned activation, is the same for every hidden unit.
        wide = any(parameter.numel() > 1 for parameter in module.parameters(recurse=False))
        if units_of_layers and is_depthwise(module, max(units_of_layers)):
            continue
        if wide and not isinstance(module, nn.Linear | Conv1D) and not is_magnitude(child):
            rule = "weights inside an MLP are split by hidden unit, and only those of linear layers are known"
            return _unknown_role(f"{name}.{child}" if child else name, rule)
    return None
