"""Whether attention masks survive packing and splitting, by experiments on a small copy of the model."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from weft.anatomy.documents import RunRows, check_packing, run_rows
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import document_masks, read_anatomy
from weft.device.detect import detect
from weft.errors import JobError, Refusal
from weft.parallel.sequence.attention_interface import replace_attention
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context_grid import ContextParallel
from weft.parallel.sequence.rows import encode_documents, reason_against_attention, uses_context_attention
from weft.parallel.sequence.varlen import uses_varlen
from weft.plan import ResolvedPlan


def reason_against_packing(
    model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan, seq_len: int
) -> Refusal | None:
    """Reason against packed rows: the documents of a row influence each other, by `check_packing`.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        plan: it decides how the rows of the experiment are run.
        seq_len: tokens per row.

    Returns:
        A refusal also if the plan has to replace the attention of the model and cannot.
    """
    if uses_varlen(model, anatomy, plan, detect().type):
        return None  # it has compared documents in rows with documents alone
    if reason := reason_against_attention(model, anatomy, plan):
        return reason
    problem = check_packing(model, anatomy, seq_len, _select_runner(model, anatomy, plan)[0]).problem
    if not problem:
        return None
    return Refusal(
        f"{anatomy.family} cannot keep packed documents apart: {problem}",
        where="data.packing = true",
        rule="the result of a document does not depend on the other documents of its row (tested on a small copy)",
        fix="set data.packing = false, for one document or part of a document per row",
        error=JobError,
    )


def reason_against_masks(
    model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan, seq_len: int | None
) -> Refusal | None:
    """Reason against splitting a model that needs more than the attention masks of Weft provide.

    A split model gets precomputed masks or the attention of Weft instead of the masks that its own forward makes.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        plan: plan.
        seq_len: tokens per row, if known.

    Returns:
        A refusal if the attention cannot be replaced, or rows of one document differ from the unmodified model, in an
        experiment on a small copy.
    """
    if reason := reason_against_attention(model, anatomy, plan):
        return reason
    run, axis = _select_runner(model, anatomy, plan)
    problem = check_packing(model, anatomy, seq_len, run, packed=False).problem if axis else None
    if not problem:
        return None
    is_split = plan.parallel.cp * plan.parallel.tp > 1
    where, lost = (f"plan.parallel.{axis}", f"under {axis}") if is_split else ("attention dropout", "with dropout")
    return Refusal(
        f"the attention masks of {anatomy.family} are lost {lost}: {problem}",
        where=f"{where}, model_type {anatomy.family}",
        rule="the masks and the attention of Weft support causality, documents and sliding windows (tested on a small copy "
        "of the model)",
        fix=f"set plan.parallel.{axis} = 1" if is_split else "set the model's attention dropout to 0",
    )


def _select_runner(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan) -> tuple[RunRows, str | None]:
    """Function that runs rows as the plan does, and the axis that replaces the masks of the model, if any."""
    if uses_context_attention(model, anatomy, plan):
        return _run_context, "cp" if plan.parallel.cp > 1 or plan.parallel.tp == 1 else "tp"
    if plan.parallel.tp > 1 and anatomy.is_decoder:  # others get full rows, and make their masks
        return _run_masked, "tp"
    return run_rows, None


def _run_masked(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows with precomputed masks, as in tensor parallelism."""
    masks = document_masks(model, position_ids)
    return model(input_ids=input_ids, position_ids=position_ids, attention_mask=masks, use_cache=False).logits


def _run_context(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits of rows with the attention of context parallelism, on one rank."""
    names = [name for block in read_anatomy(model).blocks for name in block.attention]
    replace_attention(model, names, ContextParallel(None, None, 1, 1, 0), AttentionPlans("cpu"))
    documents = encode_documents(position_ids, None, model.config.get_text_config())
    return model(input_ids=input_ids, position_ids=position_ids, attention_mask=documents, use_cache=False).logits
