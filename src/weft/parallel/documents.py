"""Refuse models whose rows would not be computed as their authors wrote them: packed rows, and rows of split models."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from weft.anatomy.documents import Run, run_rows, try_documents
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import document_masks, read_anatomy
from weft.errors import JobError, PlanError
from weft.parallel.context import ContextParallel
from weft.parallel.sequence_sharding import IMPLEMENTATION, carry_documents, register_attention, takes_over_attention
from weft.plan import Plan


def check_packing(model: PreTrainedModel, anatomy: Anatomy, plan: Plan, seq_len: int) -> None:
    """Refuse packed rows for a model that does not compute each document as if it were alone, by `try_documents`.

    Args:
        model: whole; the meta device is enough.
        anatomy: its roles.
        plan: resolved; rows are tried the way it runs them.
        seq_len: tokens of a row.

    Raises:
        JobError: with what was found.
        PlanError: the plan cannot take the model's attention over.
    """
    run, _ = _way(model, anatomy, plan)
    problem = try_documents(model, anatomy, seq_len, run).problem
    if problem:
        raise JobError(
            f"{anatomy.family} cannot keep packed documents apart: {problem}",
            where="data.packing = true",
            rule="each document of a row is computed as if it were alone; tried on a small copy of the model",
            fix="set data.packing = false: one piece of one document a row",
        )


def check_rows(model: PreTrainedModel, anatomy: Anatomy, plan: Plan, seq_len: int | None) -> None:
    """Refuse to split a model whose own code adds to its masks what masks made ahead, or our attention, do not have.

    Args:
        model: whole; the meta device is enough.
        anatomy: its roles.
        plan: resolved.
        seq_len: tokens of a row, where it is known.

    Raises:
        PlanError: rows of one document are not computed as by the untouched model; tried on a small copy.
    """
    run, axis = _way(model, anatomy, plan)
    problem = try_documents(model, anatomy, seq_len, run, packed=False).problem if axis else None
    if problem:
        is_split = plan.parallel.cp * plan.parallel.tp > 1
        where, lost = (f"plan.parallel.{axis}", f"under {axis}") if is_split else ("attention dropout", "with dropout")
        raise PlanError(
            f"{anatomy.family} attends in a way that is lost {lost}: {problem}",
            where=f"{where}, model_type {anatomy.family}",
            rule="masks made ahead, and attention that Weft computes, know causality, documents and sliding windows; "
            "tried on a small copy of the model",
            fix=f"set plan.parallel.{axis} = 1" if is_split else "set the model's attention dropout to 0",
        )


def _way(model: PreTrainedModel, anatomy: Anatomy, plan: Plan) -> tuple[Run, str | None]:
    """How a plan runs rows, and the axis that needs other masks than the model's own."""
    if takes_over_attention(model, anatomy, plan):
        return _run_context, "cp" if plan.parallel.cp > 1 or plan.parallel.tp == 1 else "tp"
    if plan.parallel.tp > 1:
        return _run_masked, "tp"
    return run_rows, None


def _run_masked(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows under masks that are made ahead, as under tensor parallelism."""
    masks = document_masks(model, position_ids)
    return model(input_ids=input_ids, position_ids=position_ids, attention_mask=masks, use_cache=False).logits


def _run_context(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows by the attention of context parallelism, here on one rank."""
    register_attention()
    model.set_attn_implementation(IMPLEMENTATION)
    for name in (name for block in read_anatomy(model).blocks for name in block.attention):
        attention: Any = model.get_submodule(name)
        attention.context = ContextParallel(None, None, 1, 1, 0)
    documents = carry_documents(position_ids, None, model.config.get_text_config())
    return model(input_ids=input_ids, position_ids=position_ids, attention_mask=documents, use_cache=False).logits
