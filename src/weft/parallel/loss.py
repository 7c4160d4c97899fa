"""Cross entropy of logits whose vocabulary is split over ranks; they are never gathered (Shoeybi et al., Megatron-LM, 2019)."""

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
    """Sum of cross entropies over the targets that are not ignored, in float32 (float64 for float64 logits).

    Args:
        logits: [..., vocab], or this rank's part of the vocabulary, as `part_bounds` cuts it.
        targets: [...] token numbers of the whole vocabulary, or `ignored`.
        ignored: the target that does not count.
        group: ranks that share the vocabulary; all of them get the same sum. None: logits are whole.
        vocab_size: of the whole vocabulary, where it is shared.
    """
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    if group is None or group.size() == 1:
        return F.cross_entropy(wide, targets.flatten(), ignore_index=ignored, reduction="sum")
    return _VocabularyParallel.apply(wide, targets.flatten(), ignored, group, vocab_size)


def vocab_size(model: PreTrainedModel) -> int:
    """Numbers in the logits of a token, over all ranks."""
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
        here = counted & (local >= 0) & (local < length)
        local = torch.where(here, local, 0)

        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest[:, None]).exp_()
        # The sum of exponentials of all ranks, and the target's logit, which one rank has: one message.
        sums = torch.stack([exponentials.sum(-1), logits.gather(-1, local[:, None])[:, 0] * here])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() + largest - sums[1]
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, here, counted)
        return (losses * counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, local, here, counted = ctx.saved_tensors
        result = probabilities * counted[:, None]
        result[torch.arange(len(local), device=local.device), local] -= here.to(result.dtype)
        return result.mul_(gradient), None, None, None, None
