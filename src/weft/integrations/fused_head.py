"""Outputs of TRL's fused head for a model that is split over tp or cp.

`trl.trainer.utils.add_fused_lm_head` lets `model(..., labels=labels, fused_lm_head=True)` return log-probabilities of the
labels instead of logits. The supervised fine-tuning of TRL 1.14 replaces the forward of a model with labels by one that returns
their loss and counts. Both apply the head to the hidden states of full rows, which no rank has under tp with sequence
parallelism and under cp. Here the same fields are computed from the logits of each rank, which are not gathered.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data import IGNORED
from weft.parallel.loss.cross_entropy import vocab_size
from weft.parallel.loss.logits import gather_tokens, tokens_of_rank
from weft.parallel.loss.token_statistics import token_statistics
from weft.parallel.runtime import runtime
from weft.topology.mesh import ranks_along

ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of a forward that the loss of a fused head needs."""
COUNTS_LOSS = "_chunked_ce_forward"
"""Name of the forward of TRL 1.14 that returns a loss and counts."""


def take_arguments(model: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the arguments of a fused head from those of a forward.

    Args:
        model: model whose forward is called.
        kwargs: arguments of the forward; changed in place.

    Returns:
        `ARGUMENTS` of the call; None without a fused head.
    """
    has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if not kwargs.pop("fused_lm_head", False) and not (has_labels and _counts_loss(model)):
        return None
    return {name: kwargs.pop(name) for name in ARGUMENTS if name in kwargs}


def _counts_loss(model: Any) -> bool:
    return getattr(model.forward, "__name__", "") == COUNTS_LOSS


def fused_output(model: Any, logits: Tensor, tokens: int, call: dict[str, Any]) -> Any:
    """Output of TRL's fused head. Collective over tp and cp.

    Args:
        model: model of TRL's fused head.
        logits: logits of this rank, [rows, tokens of this rank, part of the vocabulary].
        tokens: tokens of a full row.
        call: `ARGUMENTS` of the forward.

    Returns:
        `FusedCausalLMOutput` with all fields per token, float32, zero where the label is -100; of TRL 1.14, the output with
        a loss and counts of this data rank.
    """
    targets, counted = call.get("shift_labels"), tokens
    if targets is None:
        targets, counted = F.pad(call["labels"][:, 1:], (0, 1), value=IGNORED), tokens - 1
    settings = {} if _counts_loss(model) else inspect.getclosurevars(model.forward.__func__).nonlocals
    mesh = runtime(model).mesh
    group = mesh.get_group("tp") if ranks_along(mesh, "tp") > 1 else None
    own = tokens_of_rank(model, targets, logits.shape[1], IGNORED).clamp(min=0)
    scaled = logits.float() / settings.get("temperature", 1.0)
    found = torch.stack(token_statistics(scaled, own, group, vocab_size(model)), -1)
    found = gather_tokens(model, found, tokens)[:, :counted]
    mask = targets[:, :counted] != IGNORED
    log_probs, entropy, squares, means, is_top1 = found.masked_fill(~mask[..., None], 0).unbind(-1)
    items = call.get("num_items_in_batch")
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    if _counts_loss(model):
        from trl.trainer.sft_trainer import _ChunkedCELMHeadOutput  # type: ignore[attr-defined]  # of TRL 1.14

        return _ChunkedCELMHeadOutput(
            loss=loss,
            num_correct_tokens=is_top1.detach().sum(),
            entropy_sum=entropy.detach().sum(),
            num_valid_tokens=mask.sum(),
        )
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(
        loss=loss,
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=squares.detach(),
        mean_logits=means.detach(),
        is_top1=is_top1.bool(),
        label_mask=mask,
    )
