"""Distillation loss over a split vocabulary (Hinton et al., Distilling the Knowledge in a Neural Network, 2015).

The student learns the whole distribution of the teacher at each position, not only the token that came next; and, if asked, the
hidden states from which the teacher computes it (TinyBERT: Jiao et al., 2020).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.collectives import reduce
from weft.comm.stopwatch import blocking
from weft.parallel.loss.cross_entropy import gather_vocabulary
from weft.parallel.sequence.forward_pass import ForwardSlot
from weft.parallel.weights import part_bounds

ABSENT = -1e9
"""Logit of a token that counts for neither model: its probability is zero, and its logarithm finite."""


@dataclass(frozen=True)
class Teacher:
    """Teacher of a student model, and the factors of the loss."""

    model: Any
    """Parallelized model in evaluation mode, whose ranks have the rows and tokens of the student's."""
    temperature: float
    """Divisor of the logits of both models."""
    weight: float
    """Share of the divergence in the loss; the rest is cross entropy."""
    hidden_weight: float = 0.0
    """Factor of the error of the hidden states, which is added to the loss."""
    tables: tuple[int, int] | None = None
    """Tokens of the student's and of the teacher's vocabulary, where one is padded to another size; None: the same."""


class Taught(NamedTuple):
    """Outputs of the teacher for a micro-batch."""

    logits: Tensor
    """[rows, tokens of this rank, part of the vocabulary]."""
    hidden: Tensor | None
    """[rows, tokens of this rank, channels]; None if the loss does not use them."""


def keep_hidden(head: nn.Module, slot: ForwardSlot) -> None:
    """Let each forward of a model keep its last hidden states: the input of its head, as later hooks leave it.

    Args:
        head: head of the model.
        slot: slot of the runtime of the model.
    """

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if slot.current is not None:
            slot.current.hidden = args[0]

    head.register_forward_pre_hook(keep)


def divergence_sum(
    logits: Tensor,
    teacher: Tensor,
    counted: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    tables: tuple[int, int] | None = None,
) -> Tensor:
    """temperature^2 times the sum over tokens of KL(teacher || student), in float32 (float64 for float64 logits).

    The square keeps the size of the gradients, as in the paper.

    Args:
        logits: of the student, [..., vocabulary], or [..., part of the vocabulary].
        teacher: of the teacher, of the same shape unless there are `tables`; gets no gradient.
        counted: [...], True for the tokens that count.
        temperature: divisor of all logits.
        group: ranks over which the vocabulary is split; all of them return the same sum. None if it is not split.
        tables: sizes of both vocabularies, of which one is padded: tokens that both have count. None: the same size.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    student, teacher = (values.flatten(0, -2).to(wide) for values in (logits, teacher))
    group = None if group is None or group.size() == 1 else group
    if tables is not None:
        student, teacher = _common_tokens(student, teacher, tables, group)
    return _Divergence.apply(student, teacher, counted.flatten(), temperature, group)


def _common_tokens(
    student: Tensor, teacher: Tensor, tables: tuple[int, int], group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Logits of both models over the tokens that both have, split over ranks as those of the student. Collective."""
    common = min(tables)
    if group is None:
        return student[:, :common], teacher[:, :common]
    full = gather_vocabulary(teacher, tables[1], group)
    begin, length = part_bounds(tables[0], group.size(), group.rank())
    kept = min(max(common - begin, 0), length)
    absent = (0, length - kept)
    return (
        F.pad(student[:, :kept], absent, value=ABSENT),
        F.pad(full[:, begin : begin + kept], absent, value=ABSENT),
    )


def hidden_error_sum(
    hidden: Tensor, teacher: Tensor, counted: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sum over tokens of |student - teacher|^2 / |teacher|^2, in float32 (float64 for float64 hidden states).

    Args:
        hidden: of the student, [..., channels].
        teacher: of the teacher, of the same shape; gets no gradient.
        counted: [...], True for the tokens that count.
        group: ranks that have the same hidden states, whose gradients are added up: each computes the error of some channels.
            All of them return the same sum. None if one rank has them.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    sizes = teacher.to(wide).square().sum(-1).clamp(min=torch.finfo(wide).tiny)
    if group is not None and group.size() > 1:
        hidden, teacher = (values.tensor_split(group.size(), -1)[group.rank()] for values in (hidden, teacher))
    errors = (hidden.to(wide) - teacher.to(wide)).square().sum(-1)
    if group is not None and group.size() > 1:
        errors = reduce(errors, group)
    return (errors / sizes).where(counted, 0.0).sum()


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
