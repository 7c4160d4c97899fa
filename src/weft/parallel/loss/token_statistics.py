"""Log-probabilities and entropy of tokens over a split vocabulary, without gathering the logits.

Preference training and reinforcement learning read the log-probability of each token. Over a vocabulary split as for the cross
entropy of Megatron-LM (Shoeybi et al., 2019), each rank needs the logits of its part alone, and sums over all ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import collectives
from weft.parallel.weights import part_bounds


class TokenStatistics(NamedTuple):
    """Statistics of the distribution p of each token, all [...]; float32, or float64 for float64 logits."""

    log_probs: Tensor
    """log p of the target. Has a gradient."""
    entropy: Tensor
    """- sum of p log p, in nats. Has a gradient."""
    log_sum_squares: Tensor
    """log of the sum of p^2."""
    mean_logits: Tensor
    """Mean of the logits over the vocabulary."""
    is_top1: Tensor
    """1 where the target has the largest logit, the first one among equals; else 0."""


def token_statistics(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None, vocab_size: int = 0
) -> TokenStatistics:
    """Statistics of each token. Differentiable; collective over the group.

    Args:
        logits: [..., vocab], or [..., part of vocab] as split by `part_bounds`.
        targets: [...] token indices in the full vocabulary.
        group: ranks over which the vocabulary is split; all of them get the same values. None if it is not split.
        vocab_size: size of the full vocabulary, if it is split.
    """
    if group is not None and group.size() == 1:
        group = None
    size = vocab_size if group else logits.shape[-1]
    start, length = part_bounds(vocab_size, group.size(), group.rank()) if group else (0, size)
    local = targets - start
    is_local = (local >= 0) & (local < length)
    local = torch.where(is_local, local, 0)[..., None]

    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    with torch.no_grad():
        best, place = wide.max(-1)
        largest = _all_reduce_max(best, group)
        first = -_all_reduce_max(-torch.where(best == largest, start + place, size).to(wide.dtype), group)
    shifted = wide - largest[..., None]
    exponentials = shifted.exp()
    chosen = torch.where(is_local, shifted.gather(-1, local)[..., 0], 0)
    parts = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), chosen])
    sums = collectives.reduce(parts, group) if group else parts
    log_sum = sums[0].log()
    with torch.no_grad():
        parts = torch.stack([exponentials.square().sum(-1), shifted.sum(-1)])
        squares, total = collectives.reduce(parts, group) if group else parts
    return TokenStatistics(
        log_probs=sums[2] - log_sum,
        entropy=log_sum - sums[1] / sums[0],
        log_sum_squares=squares.log() - 2 * log_sum.detach(),
        mean_logits=total / size + largest,
        is_top1=(first == targets).to(wide.dtype),
    )


def _all_reduce_max(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return values
    result = values.clone()
    dist.all_reduce(result, dist.ReduceOp.MAX, group)
    return result
