"""Input sharding: a model split over tp or cp is called with full rows and computes the tokens of its rank."""

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from weft.anatomy.roles import Anatomy, standard_name
from weft.anatomy.transformers import ATTENTION, document_masks
from weft.errors import ModelError, PlanError, Refusal, raise_if_refused
from weft.parallel.model_checks import reason_against_decoder
from weft.parallel.sequence.attention_interface import replace_attention
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context_grid import ContextParallel, own_positions, reason_against_heads, sequence_parts
from weft.parallel.sequence.dropout import DropoutContext, has_attention_dropout
from weft.parallel.sequence.forward_pass import ForwardSlot
from weft.parallel.sequence.stacks import head_stacks
from weft.parallel.tensor.rules import read_heads
from weft.plan import ResolvedPlan
from weft.topology.mesh import CONTEXT_AXES, context_rank, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build

# Families that name patterns cannot detect, with the reason of the refusal.
REFUSED_FAMILIES = {
    "doge": "computes its masks from values of tokens",
    "moshi": "has a sliding window that is only in its mask",
}
# Families that derive positions from the attention mask. All other families that support tp or cp use the index in the row
# (tests/parallel/test_sequence_sharding.py checks every family).
POSITIONS_FROM_MASK = ("opt",)
# Families that compute with a mask even where plain causal attention is sufficient. Their model would make one of the tokens of
# this rank, while their attention sees those of the row.
ALWAYS_MASKED = ("falcon",)
ATTENTION_KINDS = ("full_attention", "sliding_attention")
MIXED_KINDS = ("full_attention", "linear_attention")
"""Kinds of masks of layers with an attention and a recurrent mixer (Falcon-H1)."""


def apply_cp(
    model: PreTrainedModel,
    anatomy: Anatomy,
    mesh: DeviceMesh,
    ulysses_chunks: int = 1,
    dropout: DropoutContext | None = None,
) -> AttentionPlans:
    """Replace the attention of a model by context-parallel attention, in place; `shard_inputs` splits the rows.

    Args:
        model: model for which `uses_context_attention` is true.
        anatomy: its roles.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        ulysses_chunks: maximum number of head chunks per Ulysses all-to-all.
        dropout: seed and rows of layout-invariant dropout.

    Returns:
        The plans that the attention modules share.
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
    plans = AttentionPlans(mesh.device_type)
    replace_attention(model, [name for block in anatomy.blocks for name in block.attention], context, plans, dropout)
    return plans


def row_multiple(anatomy: Anatomy, plan: ResolvedPlan) -> int:
    """Number of tokens of which the row length of a split model must be a multiple; `shard_inputs` pads rows to it.

    Args:
        anatomy: roles of the full model.
        plan: plan.
    """
    p = plan.parallel
    # Outside of the tensor-parallel regions, and in experts. Rows with images are not padded: their other inputs are not known,
    # and the model itself computes their positions and masks.
    splits_tokens = p.tp > 1 and not anatomy.tower_blocks and (p.sp or anatomy.has_experts)
    return math.lcm(sequence_parts(p.cp_ulysses, p.cp // p.cp_ulysses), p.cp * p.tp if splits_tokens else 1)


def shard_inputs(
    model: Any, anatomy: Anatomy, plan: ResolvedPlan, mesh: DeviceMesh, slot: ForwardSlot, by_documents: bool
) -> None:
    """Let a split model accept full rows, the same on all ranks of tp and cp, in place.

    The model is called with `input_ids` and, if rows hold several documents, with `position_ids` that restart at each document.
    Positions and masks are computed from the full rows by the rules of the model family, because the forward of the model sees
    only a part of them. Outputs are for the tokens of this rank, in the order of `shard_sequence`. Rows whose length is not a
    multiple of `row_multiple` are padded internally at the end, where no other token attends to the padding.

    Args:
        model: model split over tp or cp.
        anatomy: roles of the full model.
        plan: plan.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        slot: slot of the runtime of the model.
        by_documents: True with the attention of `apply_cp`.
    """
    config = model.config.get_text_config()
    multiple = row_multiple(anatomy, plan)
    sees_full_rows = multiple == 1 and not by_documents
    lengths: list[int] = []

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = ({"input_ids": args[0]} if args else {}) | kwargs
        raise_if_refused(_reason_against_call(arguments))
        rows, positions, mask = arguments["input_ids"], arguments.get("position_ids"), arguments.get("attention_mask")
        lengths.clear()  # a failed forward may have left a length
        if positions is None and sees_full_rows:
            return None  # the model computes positions and masks as on one rank
        if positions is None:
            positions = _positions(anatomy.family, rows, mask if _is_by_token(mask) else None)
        on_host = positions
        if by_documents and slot.current is not None:  # the host would wait for positions on the device
            on_host = slot.current.host_positions()
        lengths.append(rows.shape[1])
        if rows.shape[1] % multiple:
            # A classifier reads its result at the last token that is not padding.
            padding = 0 if anatomy.head else config.pad_token_id
            raise_if_refused(_reason_against_padding(mask, rows.shape[1], multiple, padding))
            # Position 0 is valid in every model, and makes each padding token a separate document.
            rows, positions, on_host = (
                pad_rows(x, multiple, value) for x, value in ((rows, padding), (positions, 0), (on_host, 0))
            )
            mask = mask if mask is None else pad_rows(mask, multiple, 0)
        if by_documents:
            mask = encode_documents(on_host, mask, config)
        else:
            mask = _mask_of_rows(model, anatomy.family, positions, mask)
        own = {"input_ids": shard_sequence(rows, mesh), "position_ids": shard_sequence(positions, mesh)}
        return (), arguments | own | {"attention_mask": mask}

    def leave(_: Any, args: Any, output: Any) -> Any:
        length = lengths.pop() if lengths else 0
        logits = output.get("logits") if isinstance(output, dict) else None
        if plan.parallel.cp == 1 and logits is not None and logits.shape[1] > length > 0:
            output["logits"] = logits[:, :length].clone()  # a clone, because FSDP2 warns about views
        return output

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _reason_against_call(arguments: dict[str, Any]) -> Refusal | None:
    """Reason against the arguments of a call of a split model."""
    keep = arguments.get("logits_to_keep", 0)
    what = rule = fix = ""
    if arguments.get("input_ids") is None:
        what, rule = "without input_ids", "tp and cp split rows of tokens"
        fix = "pass the input_ids of full rows, the same on all ranks of tp and cp"
    elif not isinstance(keep, int) or keep:
        what = "with logits_to_keep"
        rule = "each rank has the logits of its own tokens, which may not be the last tokens of a row"
        fix = "omit logits_to_keep, and select from the logits of all tokens"
    elif arguments.get("past_key_values") is not None:
        what = "with past_key_values"
        rule = "rows are complete, and each rank has the logits of its own tokens or of its part of the vocabulary"
        fix = (
            "generate with a model that is not split: export the weights (weft export) and load them with Transformers"
        )
    return Refusal(f"a split model was called {what}", None, rule, fix, ModelError) if what else None


def _mask_of_rows(model: Any, family: str, positions: Tensor, mask: Any) -> Any:
    """Mask of full rows for attention that sees the tokens of one rank; other masks than [rows, tokens] are kept."""
    if mask is not None and not _is_by_token(mask):
        return mask
    mask = document_masks(model, positions, mask)
    return _causal_mask(model, positions) if mask is None and family in ALWAYS_MASKED else mask


def _is_by_token(mask: Any) -> bool:
    """True for a mask [rows, tokens]."""
    return isinstance(mask, Tensor) and mask.ndim == 2


def _causal_mask(model: PreTrainedModel, positions: Tensor) -> Any:
    """Causal mask of full rows [rows, 1, tokens, tokens], bool or in the dtype of the model.

    Args:
        model: the model.
        positions: [rows, tokens].
    """
    shape_only = torch.empty((*positions.shape, 0), dtype=model.dtype, device=positions.device)
    mask: Any = create_causal_mask(
        config=model.config,
        inputs_embeds=shape_only,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        allow_is_causal_skip=False,
    )
    return mask


def _positions(family: str, rows: Tensor, mask: Tensor | None) -> Tensor:
    """Default positions of a family for the tokens of full rows."""
    if family in POSITIONS_FROM_MASK and mask is not None:
        return (mask.long().cumsum(1) * mask - 1).long()
    return torch.arange(rows.shape[1], device=rows.device).expand_as(rows)


def pad_rows(rows: Tensor, multiple: int, value: int) -> Tensor:
    """Pad full rows [batch, tokens] at the end to a multiple of tokens."""
    return F.pad(rows, (0, -rows.shape[1] % multiple), value=value)


def _reason_against_padding(mask: Any, length: int, multiple: int, padding: int | None) -> Refusal | None:
    """Reason not to pad rows: their mask is not [rows, tokens], or a model that needs a padding token has none."""
    if (mask is None or _is_by_token(mask)) and padding is not None:
        return None
    why = "an attention mask that is not [rows, tokens]" if padding is not None else "a model without pad_token_id"
    return Refusal(
        f"rows of {length} tokens with {why}",
        where="attention_mask",
        rule=f"rows are padded to a multiple of {multiple} tokens for tp and cp, and their mask is padded in the same way",
        fix=f"pad rows and mask before the call (pad_to_multiple_of={multiple} of a collator), or pass a mask [rows, tokens]",
        error=ModelError,
    )


def encode_documents(positions: Tensor, mask: Any, config: Any) -> Any:
    """Document index of each token, passed through Transformers in place of the attention mask.

    The result has four dims, because Transformers passes such masks through unchanged. Padding at the ends of rows forms
    separate documents. Recurrent mixers get none: no token sees the padding after it.
    """
    is_start = positions.diff(prepend=positions[:, :1]) != 1
    if mask is not None:
        raise_if_refused(_reason_against_mask(mask))
        is_start |= mask.diff(prepend=mask[:, :1]) != 0
    documents = is_start.cumsum(1).cpu()[:, None, None]
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - set(ATTENTION_KINDS):
        if mask is not None and not bool(mask[:, 0].all()):
            raise PlanError(
                "padding at the start of a row",
                where="attention_mask",
                rule="a recurrent mixer under cp would take padding for tokens",
                fix='pad rows at the end: tokenizer.padding_side = "right"',
            )
        return {kind: documents if kind in ATTENTION_KINDS else None for kind in (*kinds, *MIXED_KINDS)}
    return dict.fromkeys(kinds, documents) if kinds else documents


def shard_sequence(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """Tokens of this rank from full rows [batch, seq_len, ...], by the zigzag order that balances causal work."""
    if ranks_along(mesh, *CONTEXT_AXES) == 1:
        return rows
    return rows[:, own_positions(rows.shape[1], mesh, rows.device)]


def uses_context_attention(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan) -> bool:
    """True if `context_attention` replaces the attention of a model: with cp > 1, and with attention dropout.

    Where rows are not split and it does not apply, the dropout of Transformers is kept.
    """
    return _needs_context_attention(model, anatomy, plan) and not reason_against_context(model, anatomy, plan)


def reason_against_attention(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan) -> Refusal | None:
    """Reason against cp > 1, or attention dropout with tp > 1: `context_attention`, which they require, does not apply."""
    is_split = plan.parallel.cp * plan.parallel.tp > 1
    needs = is_split and _needs_context_attention(model, anatomy, plan)
    return reason_against_context(model, anatomy, plan) if needs else None


def _needs_context_attention(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan) -> bool:
    """True with dropout, and with cp > 1 unless its ranks divide the heads of the model's own attention."""
    cp = plan.parallel.cp
    drops = cp == 1 and anatomy.is_decoder and has_attention_dropout(model)
    return drops or (cp > 1 and not head_stacks(model, anatomy, cp))


def reason_against_context(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan) -> Refusal | None:
    """Reason why `context_attention` cannot replace the attention of a model.

    The attention does not use AttentionInterface, has an unsupported kind, or its heads cannot be split.
    """
    p, config = plan.parallel, model.config.get_text_config()
    axis = "cp" if p.cp > 1 or p.tp == 1 else "tp"
    where = f"plan.parallel.{axis}, model_type {anatomy.family}"
    fix = (
        "set plan.parallel.cp = 1"
        if axis == "cp"
        else "set plan.parallel.tp = 1, or the model's attention dropout to 0"
    )
    if reason := reason_against_decoder(model, anatomy, axis, p.tp * p.cp):
        return reason
    if anatomy.family in REFUSED_FAMILIES:
        return Refusal(
            f"{anatomy.family} {REFUSED_FAMILIES[anatomy.family]}",
            where=where,
            rule="attention over a split sequence supports causality, documents and sliding windows",
            fix=fix,
        )
    inside = tuple(f"{name}." for block in anatomy.blocks for name in block.attention)
    for name, _ in model.named_modules():
        if ATTENTION.fullmatch(standard_name(config, name)) and not f"{name}.".startswith(inside):
            return Refusal(
                f"{name} is an attention outside of the decoder's blocks",
                where=where,
                rule="all attention modules must be in one stack of decoder blocks, over the tokens of the rows",
                fix=f"{fix}, or train the text model alone",
            )
    layer_types = getattr(config, "layer_types", None) or ()
    kinds = {
        kind
        for kind, block in zip(layer_types, anatomy.blocks, strict=False)
        if kind not in ATTENTION_KINDS and block.attention and not block.recurrence
    }
    if kinds or not _uses_attention_interface(model, anatomy):
        what = (
            f"{', '.join(sorted(kinds))} layers" if kinds else "attention that does not go through AttentionInterface"
        )
        return Refusal(
            f"{anatomy.family} has {what}",
            where=where,
            rule="context parallelism and layout-invariant attention dropout need Transformers' AttentionInterface, with full "
            "or sliding causal attention",
            fix=fix,
        )
    counts = read_heads(config)
    if isinstance(counts, Refusal):
        return counts
    return reason_against_heads(counts[0] // p.tp, max(counts[1] // p.tp, 1), p.cp_ulysses)


def _uses_attention_interface(model: PreTrainedModel, anatomy: Anatomy) -> bool:
    """True if the attention of a model is called through AttentionInterface.

    Models with recurrent mixers do not declare it, because other engines could not keep their states.
    """
    if getattr(model, "_supports_attention_backend", False):
        return True
    forwards = [
        inspect.unwrap(type(model.get_submodule(name)).forward) for block in anatomy.blocks for name in block.attention
    ]
    is_recurrent = any(block.recurrence for block in anatomy.blocks)
    return is_recurrent and all("ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names for forward in forwards)


def _reason_against_mask(mask: Any) -> Refusal | None:
    """Reason against a mask of more than padding at the ends of rows: it cannot be encoded as documents."""
    if not _is_by_token(mask) or bool((F.pad(mask.int(), (1, 0)).diff() == 1).sum(1).gt(1).any()):
        return Refusal(
            "an attention mask that is not [rows, tokens] with one run of ones in each row",
            where="attention_mask",
            rule="attention over split rows (plan.parallel.cp) and layout-invariant attention dropout support causality, "
            "documents, windows and padding",
            fix="mark documents by position_ids that restart, or set plan.parallel.cp = 1 and the attention dropout of the "
            "model to 0",
        )
    return None


def split_rows(build: "Build") -> None:
    """Step of `parallelize`: the model takes full rows, and makes masks for the attention that was chosen."""
    build.begin("split_rows", "split_tensors", "split_context", "attend_by_documents")
    build.runtime.takes_full_rows = build.choices.takes_full_rows
    if build.choices.takes_full_rows:
        by_documents = build.choices.attention == "context"
        shard_inputs(build.model, build.full_anatomy, build.plan, build.mesh, build.runtime.forward_slot, by_documents)
