"""Distillation loss over a split vocabulary (Hinton et al., Distilling the Knowledge in a Neural Network, 2015).

The student learns the whole distribution of the teacher at each position, not only the token that came next.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.stopwatch import blocking


@dataclass(frozen=True)
class Teacher:
    """Teacher of a student model, and the factors of the loss."""

    model: Any
    """Parallelized model in evaluation mode, whose ranks have the rows, tokens and part of the vocabulary of the student's."""
    temperature: float
    """Divisor of the logits of both models."""
    weight: float
    """Share of the divergence in the loss; the rest is cross entropy."""


def divergence_sum(
    logits: Tensor, teacher: Tensor, counted: Tensor, temperature: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """temperature^2 times the sum over tokens of KL(teacher || student), in float32 (float64 for float64 logits).

    The square keeps the size of the gradients, as in the paper.

    Args:
        logits: of the student, [..., vocabulary], or [..., part of the vocabulary].
        teacher: of the teacher, of the same shape; gets no gradient.
        counted: [...], True for the tokens that count.
        temperature: divisor of all logits.
        group: ranks over which the vocabulary is split; all of them return the same sum. None if it is not split.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    student, teacher = (values.flatten(0, -2).to(wide) for values in (logits, teacher))
    group = None if group is None or group.size() == 1 else group
    return _Divergence.apply(student, teacher, counted.flatten(), temperature, group)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        # Rows that do not count may have logits of padding.
        student, teacher = (log_softmax(values / temperature, group) for values in (student, teacher))
        taught = teacher.exp()
        ctx.save_for_backward(student.exp() - taught, counted)
        ctx.temperature = temperature
        divergences = (taught * (teacher - student)).sum(-1)
        if group is not None:
            with blocking(group):
                dist.all_reduce(divergences, group=group)
        return divergences.where(counted, 0.0).sum() * temperature**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        difference, counted = ctx.saved_tensors
        return difference * counted[:, None] * (gradient * ctx.temperature), None, None, None, None


def log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Logarithms of the probabilities of a split vocabulary.

    Args:
        logits: [tokens, part of the vocabulary].
        group: ranks over which it is split; None if it is not split.
    """
    if group is None:
        return torch.log_softmax(logits, -1)
    largest = logits.amax(-1, keepdim=True)
    with blocking(group):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = logits - largest
    total = shifted.exp().sum(-1, keepdim=True)
    with blocking(group):
        dist.all_reduce(total, group=group)
    return shifted - total.log()
