"""Checks before tensor parallelism: divisible heads and hidden units, and a known role for every weight."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.anatomy.transformers import is_diffusers
from weft.errors import PlanError
from weft.parallel.model_checks import check_decoder, check_streams
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
    count_heads,
    count_kv_heads,
    inner_features,
    is_depthwise,
    out_features,
    regions_of,
    wide_norms,
    width_of_head,
)


def check_tp(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool, *, replicates: bool = False) -> None:
    """Refuse a tp degree that does not divide heads, KV heads or hidden units, and weights without a known role.

    Args:
        model: full model.
        anatomy: its roles.
        tp: number of tp ranks.
        sp: True for sequence parallelism.
        replicates: allow `replicated_parts`, if other parts of the blocks are split.

    Raises:
        PlanError: the model cannot be split over `tp` ranks. Where other degrees are possible, the fix lists all of them.
    """
    try:
        _check_degree(model, anatomy, tp, sp, replicates)
    except PlanError as error:
        if error.fix is None:
            heads = count_heads(model.config.get_text_config())
            valid = [n for n in divisors(heads) if n == 1 or _is_valid(model, anatomy, n, sp, replicates)]
            error.fix = f"set plan.parallel.tp to {one_of(valid)}"
        raise


def _is_valid(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool, replicates: bool) -> bool:
    try:
        _check_degree(model, anatomy, tp, sp, replicates)
    except PlanError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending, including the number itself."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def one_of(numbers: list[int]) -> str:
    """Text of the choices in a fix: "4", or "one of 1, 2, 4"."""
    return ("one of " if len(numbers) > 1 else "") + ", ".join(map(str, numbers))


def _check_degree(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool, replicates: bool) -> None:
    """Refuse one tp degree. Errors that another degree avoids are raised without a fix, which `check_tp` adds."""
    check_decoder(model, anatomy, "tp")
    if anatomy.is_decoder and anatomy.family in READS_EMBEDDING:
        raise PlanError(
            f"the code of {anatomy.family} reads the weight of its embedding",
            where=f"plan.parallel.tp, model_type {anatomy.family}",
            rule="ranks of tp divide the vocabulary: each has a part of this weight",
            fix="set plan.parallel.tp = 1",
        )
    if sp:
        check_streams(model, anatomy, "sp", "set plan.parallel.sp = false")
    if not replicates:
        check_blocks(model, anatomy, anatomy.blocks, tp)
        return
    whole = {
        name: error for block in anatomy.blocks for name, error in replicated_parts(model, anatomy, block, tp).items()
    }
    parts = {part for block in anatomy.blocks for part in (*block.attention, *block.cross_attention, *block.mlp)}
    if not parts:
        count_heads(model.config.get_text_config())
    elif whole.keys() >= parts:
        raise next(iter(whole.values()))


def replicated_parts(model: PreTrainedModel, anatomy: Anatomy, block: Block, tp: int) -> dict[str, PlanError]:
    """Attentions and MLP of a block that each tp rank computes in full, because the role of a weight is not known.

    Returns:
        The reason, by name of the part.

    Raises:
        PlanError: another degree could split the part, or its weights are in several modules that cannot be replicated alone.
    """
    found: dict[str, PlanError] = {}
    dense = () if block.is_moe else block.mlp  # ranks divide the tokens of experts
    for part in (*block.attention, *block.cross_attention, *dense):
        try:
            _check_part(model, anatomy, block, part, tp)
        except PlanError as error:
            if error.fix is None or (part in dense and _is_half(model, part)):
                raise
            found[part] = error
    return found


def _is_half(model: PreTrainedModel, part: str) -> bool:
    """True for an MLP of which another part of the block computes the other half, such as fc1 and fc2."""
    return isinstance(model.get_submodule(part), nn.Linear | Conv1D) or _regions(model, part) != [part]


def splittable(model: Any, anatomy: Anatomy, tp: int) -> tuple[Block, ...]:
    """Blocks besides those of a language model that can be split over `tp` ranks; the others are computed by all ranks.

    All ranks also compute the `replicated_parts` of these blocks. Blocks beside a decoder of text are split as a whole or
    not at all.
    """
    found = list(split_as_a_whole(model, anatomy, tp))
    if not anatomy.is_decoder:
        for block in (block for block in _other_blocks(anatomy) if block not in found and not block.is_moe):
            with suppress(PlanError):
                whole = replicated_parts(model, anatomy, block, tp)
                if _is_complete(model, block, tuple(whole)):
                    found.append(block)
    return tuple(found)


def _other_blocks(anatomy: Anatomy) -> tuple[Block, ...]:
    return (*anatomy.tower_blocks, *anatomy.encoder_blocks) if anatomy.has_roles else anatomy.blocks


def split_as_a_whole(model: Any, anatomy: Anatomy, tp: int) -> Iterator[Block]:
    """Blocks of `splittable` with a known role for every weight of attention and MLP.

    In Lumina-Next, two attentions share an output layer outside of them: those of Diffusers need one of their own.
    """
    for block in _other_blocks(anatomy):
        if block.attention and block.mlp and not _has_layers(block):
            with suppress(PlanError):
                check_blocks(model, anatomy, (block,), tp)
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


def check_blocks(model: PreTrainedModel, anatomy: Anatomy, blocks: tuple[Block, ...], tp: int) -> None:
    """Refuse blocks whose heads or hidden units `tp` does not divide, or with weights whose role is not known.

    Raises:
        PlanError: names the module.
    """
    for block in blocks:
        _check_heads(model, anatomy, block, tp)
        for part in (*block.attention, *block.cross_attention, *block.mlp):
            _check_part(model, anatomy, block, part, tp)


def _check_heads(model: PreTrainedModel, anatomy: Anatomy, block: Block, tp: int) -> None:
    config = config_of(model, block.name)
    heads, kv_heads = count_heads(config), count_kv_heads(config)
    if heads % tp:
        raise _refusal(anatomy, f"{heads} attention heads cannot be divided by tp = {tp}")
    if kv_heads % tp and tp % kv_heads:
        raise _refusal(anatomy, f"{kv_heads} KV heads cannot be divided by tp = {tp}, nor tp by {kv_heads}")


def _check_part(model: PreTrainedModel, anatomy: Anatomy, block: Block, part: str, tp: int) -> None:
    """Refuse an attention or MLP, see `check_blocks`: first weights whose role is not known, then degrees."""
    config = config_of(model, block.name)
    is_attention = part in (*block.attention, *block.cross_attention)
    if is_attention and anatomy.family in FIXED_WIDTH:
        raise PlanError(
            f"the attention of {anatomy.family} computes all heads together",
            where=f"plan.parallel, model_type {anatomy.family}",
            rule="its code reshapes heads to the width of the residual stream",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    if is_attention and SEVERAL_INPUTS & inspect.signature(model.get_submodule(part).forward).parameters.keys():
        raise PlanError(
            f"{part} has several inputs",
            where=f"plan.parallel, model_type {anatomy.family}",
            rule="tp and cp divide the heads of attention with one input, or with the outputs of an encoder beside it",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    families = {anatomy.family, getattr(config, "model_type", None)}  # ModernVBERT has the blocks of ModernBERT
    for name in _children(model, part):
        last = standard_name(config, name)
        packed = PACKED_QUERY_KEY_VALUE.fullmatch(last) or PACKED_UP.fullmatch(last)
        if packed and not block.is_moe and not families & set(PACKED_FAMILIES):
            raise PlanError(
                f"the row order of {name} is not known",
                where=f"plan.parallel.tp, model_type {anatomy.family}",
                rule="a weight that packs several projections is split only in families whose row order is known: "
                + ", ".join(PACKED_FAMILIES),
                fix="set plan.parallel.tp = 1, or add this family to PACKED_FAMILIES in src/weft/parallel/tensor/rules.py",
            )
    if is_attention:
        for name in _regions(model, part):
            _check_attention(name, model.get_submodule(name), config, tp)
        _check_heads(model, anatomy, block, tp)
    elif not block.is_moe:
        for name in _regions(model, part):
            _check_matrices(name, model.get_submodule(name), config, MLP_MATRICES, tp)
        if isinstance(layer := model.get_submodule(part), nn.Linear):
            _check_between(model, part, layer)


def _check_between(model: PreTrainedModel, part: str, layer: nn.Linear) -> None:
    """Refuse half of an MLP beside weights over its hidden units, such as the norm of ConvNeXt V2."""
    parent, _, own_name = part.rpartition(".")
    units, width = max(layer.weight.shape), min(layer.weight.shape)
    for name, module in model.get_submodule(parent).named_children():
        sizes = {parameter.numel() for parameter in module.parameters(recurse=False)}
        if name != own_name and not isinstance(module, nn.Linear) and units in sizes and units != width:
            raise _unknown_role(f"{parent}.{name}", "a weight over the hidden units of an MLP needs all of them")


def _regions(model: PreTrainedModel, part: str) -> list[str]:
    return regions_of(model.get_submodule(part), part)


def _unknown_role(name: str, rule: str) -> PlanError:
    return PlanError(
        f"tensor parallelism does not know the role of {name}",
        where="plan.parallel.tp",
        rule=rule,
        fix="set plan.parallel.tp = 1, or give this module a role in [model.roles] (docs/extending.md)",
    )


def _children(model: PreTrainedModel, part: str) -> list[str]:
    return [f"{part}.{name}" for name, _ in model.get_submodule(part).named_children()]


def _check_attention(name: str, attention: nn.Module, config: Any, tp: int) -> None:
    _check_matrices(name, attention, config, ATTENTION_MATRICES, tp)
    heads, kv_heads = count_heads(config), count_kv_heads(config)
    for child, module in attention.named_modules():
        names = {key: f"{child}.{key}" for key, _ in module.named_parameters(recurse=False)}
        own = [
            key for key, full in names.items() if not PER_HEAD.fullmatch(key) and not PER_HEAD_COLUMNS.fullmatch(full)
        ]
        norm = PROJECTION_NORM.fullmatch(standard_name(config, child))
        if own and not norm and not isinstance(module, nn.Linear | Conv1D) and not is_magnitude(child):
            raise _unknown_role(
                f"{name}.{child or own[0]}", "weights inside attention are split by head, according to their names"
            )
        if norm and any(parameter.ndim > 1 for parameter in module.parameters()):
            raise _unknown_role(f"{name}.{child}", "a norm of queries or keys has one weight per feature")
    _check_kv_heads(name, attention, heads, kv_heads)
    packed = any(PACKED_QUERY_KEY_VALUE.fullmatch(child) for child, _ in attention.named_children())
    wide = any(True for _ in wide_norms(attention, config))
    if kv_heads % tp and (packed or wide):
        reason = "packs queries and KV heads in one weight" if packed else "normalises all KV heads together"
        raise PlanError(
            f"{kv_heads} KV heads cannot be divided by tp = {tp}, and {name} {reason}",
            where="plan.parallel.tp",
            rule="KV heads are replicated on several ranks only if their weight is separate and their norm is per head",
        )


def _check_kv_heads(name: str, attention: Any, heads: int, kv_heads: int) -> None:
    """Refuse an attention whose number of heads differs from the configuration; KV heads are read from its weights."""
    head_dim, groups = width_of_head(attention), getattr(attention, "num_key_value_groups", None)
    keys = getattr(attention, "k_proj", getattr(attention, "to_k", None))
    found = out_features(keys) // head_dim if keys is not None and head_dim and hasattr(keys, "weight") else kv_heads
    own_heads = getattr(attention, "heads", heads)  # Diffusers
    if found != kv_heads or (groups is not None and groups * kv_heads != heads) or own_heads != heads:
        raise PlanError(
            f"{name} has another number of heads or KV heads than the {heads} and {kv_heads} in the configuration",
            where="plan.parallel.tp",
            rule="heads are divided among tp ranks by the numbers in the configuration",
            fix="set plan.parallel.tp = 1",
        )


def _check_matrices(name: str, part: nn.Module, config: Any, known: tuple[re.Pattern[str], ...], tp: int) -> None:
    """Refuse unknown weights in a part of a block, and hidden units that tp does not divide."""
    units_of_layers = set()
    for child, module, last, matrix, _ in linear_parts(part, config, name):
        full = f"{name}.{child}" if child else name
        if not any(pattern.fullmatch(last) for pattern in known):
            raise _unknown_role(
                full, f"a linear layer is split by rows or columns according to its name; {last} is not a known name"
            )
        if matrix == "weight" and known is MLP_MATRICES:
            units = inner_features(module, last)
            units_of_layers.add(units)
            if units % tp:
                raise PlanError(
                    f"{units} hidden units of {full} cannot be divided by tp = {tp}",
                    where="plan.parallel.tp",
                    rule="every tp rank has the same number of hidden units of an MLP",
                )
    if len(units_of_layers) > 1:  # such as a gate and its units in one layer of Diffusers
        raise _unknown_role(name, "all linear layers of an MLP have the same number of hidden units")
    for child, module in part.named_modules():
        full = f"{name}.{child}" if child else name
        # A scalar, such as the parameter of a learned activation, is the same for every hidden unit.
        wide = any(parameter.numel() > 1 for parameter in module.parameters(recurse=False))
        if known is MLP_MATRICES and units_of_layers and is_depthwise(module, max(units_of_layers)):
            continue
        if wide and known is MLP_MATRICES and not isinstance(module, nn.Linear | Conv1D) and not is_magnitude(child):
            raise _unknown_role(
                full, "weights inside an MLP are split by hidden unit, and only those of linear layers are known"
            )


def _refusal(anatomy: Anatomy, what: str) -> PlanError:
    return PlanError(
        what,
        where=f"plan.parallel.tp, model_type {anatomy.family}",
        rule="every tp rank has the same number of heads; with fewer KV heads than ranks, every KV head is on the same "
        "number of ranks",
    )
