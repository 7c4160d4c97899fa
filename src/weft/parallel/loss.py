"""Vocabulary-parallel cross entropy, without gathering the logits (Shoeybi et al., Megatron-LM, 2019)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from weft.parallel.weights import part_bounds


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, ignored: int, group: dist.ProcessGroup | None = None, vocab_size: int = 0
) -> Tensor:
    """Sum of cross entropies over the targets that are not ignored, in float32 (in float64 for float64 logits).

    Args:
        logits: [..., vocab], or [..., part of vocab] as split by `part_bounds`.
        targets: [...] token indices in the full vocabulary, or `ignored`.
        ignored: index of targets that do not count.
        group: ranks over which the vocabulary is split; all of them return the same sum. None if it is not split.
        vocab_size: size of the full vocabulary, if it is split.
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    if group is None or group.size() == 1:
        return F.cross_entropy(wide, targets.flatten(), ignore_index=ignored, reduction="sum")
    return _VocabularyParallel.apply(wide, targets.flatten(), ignored, group, vocab_size)


def vocab_size(model: PreTrainedModel) -> int:
    """Size of the output vocabulary over all ranks."""
    head: Any = model.get_output_embeddings()
    return int(head.weight.shape[0])


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignored: int, group: dist.ProcessGroup, vocab_size: int
    ) -> Tensor:
        start, length = part_bounds(vocab_size, group.size(), group.rank())
        counted = targets != ignored
        local = targets - start
        is_local = counted & (local >= 0) & (local < length)
        local = torch.where(is_local, local, 0)

        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest[:, None]).exp_()
        # One all-reduce for the sum of exponentials and for the logit of the target, which one rank holds.
        sums = torch.stack([exponentials.sum(-1), logits.gather(-1, local[:, None])[:, 0] * is_local])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + largest - sums[1]
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, is_local, counted)
        return (losses * counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, local, is_local, counted = ctx.saved_tensors
        result = probabilities * counted[:, None]
        result[torch.arange(len(local), device=local.device), local] -= is_local.to(result.dtype)
        return result.mul_(gradient), None, None, None, None
