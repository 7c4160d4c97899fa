"""How whole rows enter a model whose sequences are split over ranks (context parallelism), and which part a rank has."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.errors import PlanError
from weft.parallel.context import ContextParallel, check_heads, check_sequence, context_attention, natural_positions
from weft.plan import Plan

IMPLEMENTATION = "weft_context"


def split_sequences(model: PreTrainedModel, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh) -> None:
    """Let every rank of cp run its part of each row, in place; attention reaches over all parts.

    The model is called with whole rows, the same on all ranks of cp: `input_ids` and, if rows hold several documents,
    `position_ids` that restart with each. Outputs are those of this rank's tokens, in the order of `part_of_rows`.

    Raises:
        PlanError: the model's attention or heads cannot be split, or rows cannot be cut so often.
    """
    ulysses, ring = mesh["cp_ulysses"], mesh["cp_ring"]
    check_attention(model, anatomy, plan)
    context = ContextParallel(
        ulysses.get_group() if ulysses.size() > 1 else None,
        ring.get_group() if ring.size() > 1 else None,
        ulysses.size(),
        ring.size(),
        mesh.get_local_rank("cp_ring") * ulysses.size() + mesh.get_local_rank("cp_ulysses"),
    )
    register_attention()
    model.set_attn_implementation(IMPLEMENTATION)
    for name in (name for block in anatomy.blocks for name in block.attention):
        attention: Any = model.get_submodule(name)
        attention.context = context
        attention.config._attn_implementation = IMPLEMENTATION  # where tensor parallelism gave it a copy
    config = model.config.get_text_config()

    def cut(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = ({"input_ids": args[0]} if args else {}) | kwargs
        rows = arguments["input_ids"]
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        _refuse_mask(arguments.get("attention_mask"))
        documents = (positions.diff(prepend=positions[:, :1]) != 1).cumsum(1)
        carrier = documents.cpu()[:, None, None]  # in the place of a mask, where Transformers passes it on as it is
        kinds = set(getattr(config, "layer_types", None) or ())
        own = {"input_ids": part_of_rows(rows, mesh), "position_ids": part_of_rows(positions, mesh)}
        return (), arguments | own | {"attention_mask": dict.fromkeys(kinds, carrier) if kinds else carrier}

    model.register_forward_pre_hook(cut, with_kwargs=True)


def register_attention() -> None:
    """Make the attention known to Transformers under the name of `IMPLEMENTATION`, and its masks: none but the carrier."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, context_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


def separates_documents(model: PreTrainedModel) -> bool:
    """Whether the model is told documents apart by position ids alone, and wants no mask."""
    return bool(model.config._attn_implementation == IMPLEMENTATION)


def part_of_rows(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of whole rows [batch, seq_len, ...]: two ends of the row for each, so that causal work is equal."""
    ulysses, ring = mesh["cp_ulysses"].size(), mesh["cp_ring"].size()
    check_sequence(rows.shape[1], ulysses, ring)
    rank = mesh.get_local_rank("cp_ring") * ulysses + mesh.get_local_rank("cp_ulysses")
    return rows[:, natural_positions(rows.shape[1], ulysses, ring, rank).to(rows.device)]


def check_attention(model: PreTrainedModel, anatomy: Anatomy, plan: Plan) -> None:
    """Refuse context parallelism for a model whose attention has no door for it, or whose heads do not fit.

    Raises:
        PlanError: with the reason.
    """
    p, config = plan.parallel, model.config.get_text_config()
    for block in anatomy.blocks:
        if block.recurrence:
            raise PlanError(
                f"{block.recurrence[0]} carries a state along the sequence",
                where=f"plan.parallel.cp, model_type {anatomy.family}",
                rule="context parallelism splits softmax attention only",
                fix="set plan.parallel.cp = 1",
            )
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    check_heads(config.num_attention_heads // p.tp, max(kv_heads // p.tp, 1), p.cp_ulysses)


def _refuse_mask(mask: Any) -> None:
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        raise PlanError(
            "an attention mask together with context parallelism",
            where="attention_mask",
            rule="rows are split by token; which tokens see each other is told by position_ids that restart",
            fix="leave attention_mask out and pass position_ids, or set plan.parallel.cp = 1",
        )
