"""How whole rows enter a model whose sequences are split over ranks (context parallelism), and which part a rank has."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import ATTENTION, document_masks
from weft.errors import ModelError, PlanError
from weft.parallel.checks import check_decoder
from weft.parallel.context import ContextParallel, check_heads, context_attention, own_positions, sequence_parts
from weft.parallel.dropout import has_attention_dropout
from weft.parallel.tp_rules import count_heads, count_kv_heads
from weft.plan import Plan
from weft.topology.mesh import CONTEXT_AXES, context_rank, ranks_along

IMPLEMENTATION = "weft_context"
# What no name tells.
REFUSED_FAMILIES = {
    "doge": "makes its masks from values of the tokens that a rank holds",
    "moshi": "has a sliding window that only its mask knows",
}
# Families that count positions by the attention mask; all others that tp or cp take count them by the place in the row
# (tests/parallel/test_sequence_sharding.py looks at every one).
POSITIONS_FROM_MASK = ("opt",)
ATTENTION_KINDS = ("full_attention", "sliding_attention")


def split_sequences(model: PreTrainedModel, anatomy: Anatomy, mesh: DeviceMesh, ulysses_chunks: int = 1) -> None:
    """Let attention reach over the parts of a row that the ranks of cp hold, in place; `shard_inputs` cuts the rows.

    Heads of Ulysses travel in `ulysses_chunks`. The model has passed `takes_over_attention`.
    """
    ulysses, ring = mesh["cp_ulysses"], mesh["cp_ring"]
    context = ContextParallel(
        ulysses.get_group() if ulysses.size() > 1 else None,
        ring.get_group() if ring.size() > 1 else None,
        ulysses.size(),
        ring.size(),
        context_rank(mesh),
        ulysses_chunks=ulysses_chunks,
    )
    register_attention()
    model.set_attn_implementation(IMPLEMENTATION)
    for name in (name for block in anatomy.blocks for name in block.attention):
        attention: Any = model.get_submodule(name)
        attention.context = context
        attention.config._attn_implementation = IMPLEMENTATION  # where tensor parallelism gave it a copy


def row_multiple(anatomy: Anatomy, plan: Plan) -> int:
    """Number of tokens that a row of a split model must be a multiple of; shard_inputs pads other rows to it.

    Args:
        anatomy: of the whole model.
        plan: resolved.
    """
    p = plan.parallel
    splits_tokens = p.tp > 1 and (p.sp or anatomy.has_experts)  # between matrices, and in front of experts
    return math.lcm(sequence_parts(p.cp_ulysses, p.cp // p.cp_ulysses), p.cp * p.tp if splits_tokens else 1)


def shard_inputs(model: Any, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh) -> None:
    """Let a split model be called as before, with whole rows, the same on all ranks of tp and cp, in place.

    `input_ids` and, if rows hold several documents, `position_ids` that restart with each. What the model would otherwise
    make from the part of the rows that it sees (positions, masks) is made from the whole, as its family makes it; outputs
    are those of this rank's tokens, in the order of `shard_sequence`. Rows whose length the ranks do not divide are padded
    inside: at the end, where no token sees the padding.

    Args:
        model: split over tp or cp.
        anatomy: of the whole model.
        plan: resolved.
        mesh: with the axes of `weft.topology.mesh`.
    """
    config = model.config.get_text_config()
    own_attention = model.config._attn_implementation == IMPLEMENTATION
    multiple = row_multiple(anatomy, plan)
    sees_whole_rows = multiple == 1 and not own_attention
    lengths: list[int] = []

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = ({"input_ids": args[0]} if args else {}) | kwargs
        rows, positions, mask = (arguments.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
        if rows is None:
            raise ModelError(
                "a split model was called without input_ids",
                rule="rows of tokens are what tp and cp ranks split",
                fix="pass input_ids, whole and the same on all ranks of tp and cp",
            )
        if not isinstance(keep := arguments.get("logits_to_keep", 0), int) or keep:
            raise ModelError(
                "a split model was called with logits_to_keep",
                rule="each rank has logits of its own tokens, which need not be the last ones of a row",
                fix="leave logits_to_keep out, and pick from the logits of all tokens",
            )
        if arguments.get("past_key_values") is not None:
            raise ModelError(
                "a split model was called with past_key_values",
                rule="rows are whole, and each rank has logits of its own tokens or of its part of the vocabulary",
                fix="generate with a model that is not split: export the weights (weft export) and load them with Transformers",
            )
        lengths.clear()  # of a forward that failed
        if positions is None and sees_whole_rows:
            return None  # the model makes positions and masks as on one rank
        by_token = isinstance(mask, Tensor) and mask.ndim == 2
        if positions is None:
            positions = _positions(anatomy.family, rows, mask if by_token else None)
        lengths.append(rows.shape[1])
        if rows.shape[1] % multiple:
            _check_padding(mask, rows.shape[1], multiple)
            # Position 0 is within the limits of every model; each token of padding is a document of its own.
            rows, positions = pad_rows(rows, multiple, 0), pad_rows(positions, multiple, 0)
            mask = mask if mask is None else pad_rows(mask, multiple, 0)
        if own_attention:
            mask = carry_documents(positions, mask, config)
        elif mask is None or by_token:
            mask = document_masks(model, positions, mask)
        own = {"input_ids": shard_sequence(rows, mesh), "position_ids": shard_sequence(positions, mesh)}
        return (), arguments | own | {"attention_mask": mask}

    def leave(_: Any, args: Any, output: Any) -> Any:
        length = lengths.pop() if lengths else 0
        logits = output.get("logits") if isinstance(output, dict) else None
        if plan.parallel.cp == 1 and logits is not None and logits.shape[1] > length > 0:
            output["logits"] = logits[:, :length].clone()  # FSDP2 warns of a view
        return output

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)
    model.takes_whole_rows = True


def _positions(family: str, rows: Tensor, mask: Tensor | None) -> Tensor:
    """The positions that a family gives the tokens of whole rows when it is told none."""
    if family in POSITIONS_FROM_MASK and mask is not None:
        return (mask.long().cumsum(1) * mask - 1).long()
    return torch.arange(rows.shape[1], device=rows.device).expand_as(rows)


def pad_rows(rows: Tensor, multiple: int, value: int) -> Tensor:
    """Whole rows [batch, tokens], padded at their ends to a multiple of tokens."""
    return F.pad(rows, (0, -rows.shape[1] % multiple), value=value)


def _check_padding(mask: Any, length: int, multiple: int) -> None:
    """Refuse to pad rows under a mask that is not by token."""
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return
    raise ModelError(
        f"rows of {length} tokens with an attention mask that is not [rows, tokens]",
        where="attention_mask",
        rule=f"rows are padded to a multiple of {multiple} tokens, which tp and cp ranks divide, and their mask with them",
        fix=f"pad rows and mask yourself (pad_to_multiple_of={multiple} of a collator), or pass a mask of [rows, tokens]",
    )


def carry_documents(positions: Tensor, mask: Any, config: Any) -> Any:
    """The number of each token's document, in the place of a mask: Transformers passes four dims on as they are.

    Padding at the ends of rows is a document of its own.
    """
    borders = positions.diff(prepend=positions[:, :1]) != 1
    if mask is not None:
        _check_mask(mask)
        borders |= mask.diff(prepend=mask[:, :1]) != 0
    documents = borders.cumsum(1).cpu()[:, None, None]
    kinds = set(getattr(config, "layer_types", None) or ())
    return dict.fromkeys(kinds, documents) if kinds else documents


def register_attention() -> None:
    """Make the attention known to Transformers under the name of `IMPLEMENTATION`, and its masks: none but the carrier."""
    AttentionInterface.register(IMPLEMENTATION, context_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


def shard_sequence(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of whole rows [batch, seq_len, ...]: two ends of the row for each, so that causal work is equal."""
    if ranks_along(mesh, *CONTEXT_AXES) == 1:
        return rows
    return rows[:, own_positions(rows.shape[1], mesh).to(rows.device)]


def takes_over_attention(model: PreTrainedModel, anatomy: Anatomy, plan: Plan) -> bool:
    """Whether `context_attention` computes the attention of a model: where its sequences are split, and where it has dropout.

    Raises:
        PlanError: it has to, for cp > 1 or for dropout under tp > 1, and cannot.
    """
    p = plan.parallel
    if p.cp == 1 and not has_attention_dropout(model):
        return False
    try:
        check_attention(model, anatomy, plan)
    except PlanError:
        if p.cp * p.tp > 1:
            raise
        return False  # the library's own dropout: rows are whole here
    return True


def check_attention(model: PreTrainedModel, anatomy: Anatomy, plan: Plan) -> None:
    """Refuse a model whose attention has no door for ours, or whose heads do not fit the ranks of Ulysses.

    Raises:
        PlanError: with the reason.
    """
    p, config = plan.parallel, model.config.get_text_config()
    axis = "cp" if p.cp > 1 or p.tp == 1 else "tp"
    where = f"plan.parallel.{axis}, model_type {anatomy.family}"
    fix = (
        "set plan.parallel.cp = 1"
        if axis == "cp"
        else "set plan.parallel.tp = 1, or the model's attention dropout to 0"
    )
    check_decoder(model, anatomy, axis)
    if anatomy.family in REFUSED_FAMILIES:
        raise PlanError(
            f"{anatomy.family} {REFUSED_FAMILIES[anatomy.family]}",
            where=where,
            rule="attention over a split sequence knows causality, documents and sliding windows",
            fix=fix,
        )
    inside = tuple(f"{name}." for block in anatomy.blocks for name in block.attention)
    for name, _ in model.named_modules():
        if ATTENTION.fullmatch(name.rpartition(".")[2]) and not f"{name}.".startswith(inside):
            raise PlanError(
                f"{name} is an attention outside of the decoder's blocks",
                where=where,
                rule="all attention of a model goes over the tokens of its rows, in one stack of blocks",
                fix=f"{fix}, or train the text model alone",
            )
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in ATTENTION_KINDS}
    if kinds or not getattr(model, "_supports_attention_backend", False):
        what = (
            f"{', '.join(sorted(kinds))} layers" if kinds else "attention that does not go through AttentionInterface"
        )
        raise PlanError(
            f"{anatomy.family} has {what}",
            where=where,
            rule="context parallelism, and dropout that is the same for every layout, enter by Transformers' "
            "AttentionInterface, with full or sliding causal attention",
            fix=fix,
        )
    heads = count_heads(config)
    check_heads(heads // p.tp, max(count_kv_heads(config) // p.tp, 1), p.cp_ulysses)


def _check_mask(mask: Any) -> None:
    """A mask that hides nothing, or padding at the ends of rows, is carried as documents; another cannot be."""
    by_token = isinstance(mask, Tensor) and mask.ndim == 2
    if not by_token or bool((F.pad(mask.int(), (1, 0)).diff() == 1).sum(1).gt(1).any()):
        raise PlanError(
            "an attention mask that is not [rows, tokens] with one run of ones in each row",
            where="attention_mask",
            rule="attention over split rows (plan.parallel.cp), and attention whose dropout is the same for every layout, know "
            "causality, documents, windows and padding",
            fix="tell documents by position_ids that restart, or set plan.parallel.cp = 1 and the model's attention dropout "
            "to 0",
        )
