"""Vocabulary-parallel cross entropy, without gathering the logits (Shoeybi et al., Megatron-LM, 2019)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from weft.comm.collectives import unsplit
from weft.compute.cross_entropy import Softmax, Vocabulary, softmax_gradient, softmax_losses
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
    return _VocabularyParallel.apply(wide, targets.flatten(), ignored, own_vocabulary(group, vocab_size))


def own_vocabulary(group: dist.ProcessGroup, vocab_size: int) -> Vocabulary:
    """Part of the vocabulary of this rank, as split by `part_bounds`."""
    if group.size() == 1:
        return Vocabulary()
    return Vocabulary(part_bounds(vocab_size, group.size(), group.rank())[0], group)


def gather_vocabulary(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Gather logits of the full vocabulary. Differentiable; collective.

    Args:
        logits: [..., part of the vocabulary], as split by `part_bounds`.
        vocab_size: size of the full vocabulary.
        group: ranks over which the vocabulary is split.
    """
    if group.size() == 1:
        return logits
    lengths = [part_bounds(vocab_size, group.size(), rank)[1] for rank in range(group.size())]
    padded = F.pad(logits, (0, max(lengths) - logits.shape[-1]))
    gathered = unsplit(padded, group, -1).unflatten(-1, (group.size(), max(lengths)))
    return torch.cat([gathered[..., rank, :length] for rank, length in enumerate(lengths)], -1)


def vocab_size(model: PreTrainedModel) -> int:
    """Size of the output vocabulary over all ranks."""
    head: Any = model.get_output_embeddings()
    return int(head.weight.shape[0])


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, vocabulary: Vocabulary) -> Tensor:
        found = softmax_losses(logits.clone(), targets, ignored, vocabulary)
        ctx.save_for_backward(*found)
        return found.loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = Softmax(*ctx.saved_tensors)
        return softmax_gradient(found, found.probabilities.dtype).mul_(gradient), None, None, None
