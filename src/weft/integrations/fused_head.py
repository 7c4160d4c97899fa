"""Outputs of TRL's fused head for a model that is split over tp or cp.

`trl.trainer.utils.add_fused_lm_head` lets `model(..., labels=labels, fused_lm_head=True)` return log-probabilities of the
labels instead of logits. The supervised fine-tuning of TRL 1.14 replaces the forward of a model with labels by one that returns
their loss and counts. Both apply the head to the hidden states of full rows, which no rank has under tp with sequence
parallelism and under cp. Here the same fields are computed from the gathered logits.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from weft.data import IGNORED
from weft.errors import ModelError

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


def fused_output(model: Any, logits: Tensor, call: dict[str, Any]) -> Any:
    """Output of TRL's fused head.

    Args:
        model: model of `add_fused_lm_head`.
        logits: logits of full rows over the full vocabulary, [rows, tokens, vocabulary].
        call: `labels`, `shift_labels` and `num_items_in_batch` of the forward.

    Returns:
        `FusedCausalLMOutput` with all fields per token, float32, zero where the label is -100; of TRL 1.14, the output with
        a loss and counts of this data rank.

    Raises:
        ModelError: the model returns router logits, whose auxiliary loss needs all tokens of a row on each rank.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "TRL's fused head with output_router_logits = True under tp or cp",
            where="plan.parallel",
            rule="the auxiliary loss of the routers needs all tokens of a row on each rank",
            fix="set output_router_logits = False in the configuration of the model, or use ZeRO and ep alone",
        )
    targets = call.get("shift_labels")
    if targets is None:
        logits, targets = logits[:, :-1], call["labels"][:, 1:]
    mask = targets != IGNORED
    settings = {} if _counts_loss(model) else inspect.getclosurevars(model.forward.__func__).nonlocals
    scaled = logits.float() / settings.get("temperature", 1.0)
    every = scaled.log_softmax(-1)
    chosen = targets.clamp(min=0)[..., None]
    log_probs = every.gather(-1, chosen)[..., 0].masked_fill(~mask, 0)
    with torch.no_grad():
        squares = (2 * every).logsumexp(-1).masked_fill(~mask, 0)
        means = scaled.mean(-1).masked_fill(~mask, 0)
        is_top1 = (scaled.argmax(-1, keepdim=True) == chosen)[..., 0] & mask
    entropy = -(every.exp() * every).sum(-1).masked_fill(~mask, 0)
    items = call.get("num_items_in_batch")
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    if _counts_loss(model):
        from trl.trainer.sft_trainer import _ChunkedCELMHeadOutput  # type: ignore[attr-defined]  # of TRL 1.14

        return _ChunkedCELMHeadOutput(
            loss=loss,
            num_correct_tokens=is_top1.sum().float(),
            entropy_sum=entropy.sum(),
            num_valid_tokens=mask.sum(),
        )
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(
        loss=loss,
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=squares,
        mean_logits=means,
        is_top1=is_top1,
        label_mask=mask,
    )
