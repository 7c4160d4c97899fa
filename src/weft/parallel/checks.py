"""Checks before tensor parallelism: divisible heads and hidden units, and a known role for every weight."""

import re
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy, Block, standard_name
from weft.errors import PlanError
from weft.parallel.adapters import is_magnitude, linear_parts
from weft.parallel.tp_rules import (
    ATTENTION_MATRICES,
    MLP_MATRICES,
    PACKED_FAMILIES,
    PACKED_QUERY_KEY_VALUE,
    PACKED_UP,
    PER_HEAD,
    PROJECTION_NORM,
    config_of,
    count_heads,
    count_kv_heads,
    inner_features,
    out_features,
    splits_vocabulary_of,
    wide_norms,
)
from weft.plan import Plan


def check_tp(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool) -> None:
    """Refuse a tp degree that does not divide heads, KV heads or hidden units, and weights without a known role.

    Raises:
        PlanError: the model cannot be split over `tp` ranks. Where other degrees are possible, the fix lists all of them.
    """
    try:
        _check_degree(model, anatomy, tp, sp)
    except PlanError as error:
        if error.fix is None:
            heads = count_heads(model.config.get_text_config())
            valid = [degree for degree in divisors(heads) if degree == 1 or _is_valid(model, anatomy, degree, sp)]
            error.fix = f"set plan.parallel.tp to {one_of(valid)}"
        raise


def _is_valid(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool) -> bool:
    try:
        _check_degree(model, anatomy, tp, sp)
    except PlanError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending, including the number itself."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def one_of(numbers: list[int]) -> str:
    """Text of the choices in a fix: "4", or "one of 1, 2, 4"."""
    return ("one of " if len(numbers) > 1 else "") + ", ".join(map(str, numbers))


def _check_degree(model: PreTrainedModel, anatomy: Anatomy, tp: int, sp: bool) -> None:
    """Refuse one tp degree. Errors that another degree avoids are raised without a fix, which `check_tp` adds."""
    check_decoder(model, anatomy, "tp", may_attend_to_encoder=not sp)
    if splits_vocabulary_of(model):
        _check_outer_weights(model, anatomy, sp)
    else:
        _check_no_dropout(model, anatomy)
        _check_no_sp(model, anatomy, sp)
    _check_blocks(model, anatomy, anatomy.blocks, tp)


def _check_no_dropout(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Refuse dropout that each tp rank would draw for itself, although it holds the same activations as the others."""
    for name, module in model.named_modules():
        rates = [getattr(module, key, 0.0) for key in ("p", "dropout", "activation_dropout")]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise PlanError(
                f"dropout in {name} of a {type(model).__name__}",
                where=f"plan.parallel.tp, model_type {anatomy.family}",
                rule="ranks of tp draw the same dropout for decoder-only models alone",
                fix="set the dropout rates in the configuration of the model to 0, or plan.parallel.tp = 1",
            )


def splittable(model: PreTrainedModel, anatomy: Anatomy, tp: int) -> tuple[Block, ...]:
    """Blocks besides those of the decoder that can be split over `tp` ranks; the others are computed by all ranks."""
    found: list[Block] = []
    for block in (*anatomy.tower_blocks, *anatomy.encoder_blocks):
        with suppress(PlanError):
            _check_blocks(model, anatomy, (block,), tp)
            found += [block] * bool(block.attention and block.mlp)
    return tuple(found)


def _check_blocks(model: PreTrainedModel, anatomy: Anatomy, blocks: tuple[Block, ...], tp: int) -> None:
    for block in blocks:
        config = config_of(model, block.name)
        heads, kv_heads = count_heads(config), count_kv_heads(config)
        if heads % tp:
            raise _refusal(anatomy, f"{heads} attention heads cannot be divided by tp = {tp}")
        if kv_heads % tp and tp % kv_heads:
            raise _refusal(anatomy, f"{kv_heads} KV heads cannot be divided by tp = {tp}, nor tp by {kv_heads}")
        for name in (
            child for part in block.attention + block.cross_attention + block.mlp for child in _children(model, part)
        ):
            last = standard_name(config, name)
            packed = PACKED_QUERY_KEY_VALUE.fullmatch(last) or PACKED_UP.fullmatch(last)
            if packed and not block.is_moe and anatomy.family not in PACKED_FAMILIES:
                raise PlanError(
                    f"the row order of {name} is not known",
                    where=f"plan.parallel.tp, model_type {anatomy.family}",
                    rule="a weight that packs several projections is split only in families whose row order is known: "
                    + ", ".join(PACKED_FAMILIES),
                    fix="set plan.parallel.tp = 1, or add this family to PACKED_FAMILIES in src/weft/parallel/tp_rules.py",
                )
        for name in (*block.attention, *block.cross_attention):
            _check_attention(name, model.get_submodule(name), config, tp)
        for name in () if block.is_moe else block.mlp:
            _check_matrices(name, model.get_submodule(name), config, MLP_MATRICES, tp)


def check_head(anatomy: Anatomy, plan: Plan) -> None:
    """Refuse settings that need a vocabulary at the end of a model, for a model that has none.

    Raises:
        PlanError: the model is a classifier or a reward model, and the plan has cp, pp or a backward in fp16.
    """
    p = plan.parallel
    settings = {
        "parallel.cp": p.cp > 1,
        "parallel.pp": p.pp > 1,
        "precision.backward": plan.precision.backward == "fp16",
    }
    if not anatomy.head and any(settings.values()):
        key = next(key for key, is_set in settings.items() if is_set)
        raise PlanError(
            f"plan.{key} for a {anatomy.family} model without output embeddings",
            where=f"plan.{key}",
            rule="classifiers and reward models run under ZeRO and tensor parallelism",
            fix=f"set plan.{key} to {'1' if key.startswith('parallel') else repr('forward')}",
        )


def check_decoder(model: PreTrainedModel, anatomy: Anatomy, axis: str, *, may_attend_to_encoder: bool = False) -> None:
    """Refuse to split a model that is not one stack of decoder blocks with one self-attention each.

    Args:
        model: full model.
        anatomy: its roles.
        axis: axis of the plan that would split it ("tp" or "cp").
        may_attend_to_encoder: True if blocks may attend to an encoder, whose outputs every rank has.

    Raises:
        PlanError: a block attends to an encoder, has several attentions, or is recurrent along the sequence.
    """
    for block in anatomy.blocks:
        if block.recurrence:
            raise PlanError(
                f"{block.recurrence[0]} is recurrent along the sequence",
                where=f"plan.parallel.{axis}, model_type {anatomy.family}",
                rule="tensor and context parallelism split softmax attention and MLPs",
                fix=f"set plan.parallel.{axis} = 1",
            )
        cross = [] if may_attend_to_encoder else [name.rpartition(".")[2] for name in block.cross_attention]
        several = [name for name in block.attention if isinstance(model.get_submodule(name), nn.ModuleList)]
        if cross or several:
            what = (
                f"{block.name} attends to an encoder ({cross[0]})" if cross else f"{several[0]} is a list of attentions"
            )
            raise PlanError(
                what,
                where=f"plan.parallel.{axis}, model_type {anatomy.family}",
                rule="only decoder-only language models are split: one attention per block, over the tokens of the block",
                fix=f"set plan.parallel.{axis} = 1",
            )


def _check_no_sp(model: PreTrainedModel, anatomy: Anatomy, sp: bool) -> None:
    if sp:
        raise PlanError(
            f"sequence parallelism of a {type(model).__name__}",
            where=f"plan.parallel.sp, model_type {anatomy.family}",
            rule="the residual stream of decoder-only models alone is split along the sequence",
            fix="set plan.parallel.sp = false",
        )


def _check_outer_weights(model: PreTrainedModel, anatomy: Anatomy, sp: bool) -> None:
    """Refuse weights outside of blocks, embedding, final norm and head.

    Such weights would see a part of the sequence only, and their gradients would be partial sums. Without sp, all ranks compute
    the same in encoders beside a language model.
    """
    is_multimodal = model.config.get_text_config() is not model.config
    decoder = anatomy.blocks[0].name.rsplit(".", 2)[0] + "."
    known = {anatomy.embedding, anatomy.head, anatomy.final_norm}
    blocks = tuple(f"{block.name}." for block in anatomy.blocks)
    # What follows the body of a model without output embeddings computes the same on all ranks.
    body = f"{model.base_model_prefix}." if not anatomy.head else ""
    for name, module in model.named_modules():
        if not name.startswith(body):
            continue
        has_weights = any(True for _ in module.parameters(recurse=False)) and not isinstance(module, nn.Embedding)
        makes_positions = name.endswith("embed_positions") and not isinstance(module, nn.Embedding)
        if (has_weights or makes_positions) and name not in known and not f"{name}.".startswith(blocks):
            if not is_multimodal or name.startswith(decoder):
                raise _unknown_role(name, "only embeddings, blocks, the final norm and the head are split")
            if sp:
                raise PlanError(
                    f"sequence parallelism beside {name}",
                    where=f"plan.parallel.sp, model_type {anatomy.family}",
                    rule="encoders beside a language model need the whole sequence of its embeddings",
                    fix="set plan.parallel.sp = false",
                )


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
        own = [key for key, _ in module.named_parameters(recurse=False) if not PER_HEAD.fullmatch(key)]
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
    """Refuse an attention whose number of KV heads, read from its weights, differs from the configuration."""
    head_dim, groups = getattr(attention, "head_dim", None), getattr(attention, "num_key_value_groups", None)
    keys = getattr(attention, "k_proj", None)
    found = out_features(keys) // head_dim if keys is not None and head_dim and hasattr(keys, "weight") else kv_heads
    if found != kv_heads or (groups is not None and groups * kv_heads != heads):
        raise PlanError(
            f"{name} has another number of KV heads than the {kv_heads} in the configuration",
            where="plan.parallel.tp",
            rule="heads are divided among tp ranks by the numbers in the configuration",
            fix="set plan.parallel.tp = 1",
        )


def _check_matrices(name: str, part: nn.Module, config: Any, known: tuple[re.Pattern[str], ...], tp: int) -> None:
    """Refuse unknown weights in a part of a block, and hidden units that tp does not divide."""
    for child, module, last, matrix, _ in linear_parts(part, config, name):
        full = f"{name}.{child}" if child else name
        if not any(pattern.fullmatch(last) for pattern in known):
            raise _unknown_role(
                full, f"a linear layer is split by rows or columns according to its name; {last} is not a known name"
            )
        if matrix == "weight" and known is MLP_MATRICES:
            units = inner_features(module, last)
            if units % tp:
                raise PlanError(
                    f"{units} hidden units of {full} cannot be divided by tp = {tp}",
                    where="plan.parallel.tp",
                    rule="every tp rank has the same number of hidden units of an MLP",
                )
    for child, module in part.named_modules():
        full = f"{name}.{child}" if child else name
        # A scalar, such as the parameter of a learned activation, is the same for every hidden unit.
        wide = any(parameter.numel() > 1 for parameter in module.parameters(recurse=False))
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
