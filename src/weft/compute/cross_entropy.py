"""Cross entropy of a vocabulary that may be split over ranks, from logits, or chunk by chunk from hidden states and the head.

The logits of a micro-batch are the largest tensor of a training step: tokens x vocabulary, in the dtype of the model, in
float32 and once more as probabilities. `linear_cross_entropy_sum` computes the loss and its gradients in forward, for a chunk
of tokens at a time, and keeps the gradients of the hidden states and of the head only (Hsu et al., Liger Kernel, 2024). The
matmuls are those of ordinary backward; nothing is computed twice.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.stopwatch import blocking
from weft.compute import cross_entropy_kernels as kernels


class ChunkLimits(NamedTuple):
    """Limits of a chunk of tokens."""

    largest_bytes: int
    """Maximum size of its float32 logits."""
    fewest_tokens: int
    """Minimum, because the matmuls of few tokens are slow, and each chunk reads and writes the gradient of the head once."""


CHUNKS = {"cpu": ChunkLimits(2**26, 256)}
"""Limits by device type."""
ACCELERATOR_CHUNKS = ChunkLimits(2**30, 1024)
FEWEST_CHUNKS = 4
"""Chunks of a micro-batch that is not small, so that logits take at most this part of their full size."""


Chunks = Callable[[int, int, str], Iterable[tuple[int, int]]]
"""Function with the arguments of `chunk_bounds` that iterates over ranges of tokens."""


class LogitTransform(NamedTuple):
    """Logits of a model from the outputs of its head: cap(scale * head(hidden)), with cap(x) = softcap * tanh(x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform float32 logits in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class Vocabulary(NamedTuple):
    """Part of the vocabulary whose logits this rank computes."""

    start: int = 0
    group: dist.ProcessGroup | None = None
    """Ranks over which the vocabulary is split; None if it is not split."""


class Softmax(NamedTuple):
    """Softmax of the logits of tokens, and the place of their targets."""

    loss: Tensor
    """Sum of the cross entropies over the targets that count, a scalar."""
    probabilities: Tensor
    """[tokens, part of the vocabulary]"""
    counted: Tensor
    """[tokens] 1.0 for targets that count, else 0.0."""
    local: Tensor
    """[tokens] index of the target in the part of this rank; any index where it is not there."""
    inside: Tensor
    """[tokens] 1.0 where the target counts and is in the part of this rank, else 0.0."""


def softmax_losses(logits: Tensor, targets: Tensor, ignored: int, vocabulary: Vocabulary) -> Softmax:
    """Cross entropies of tokens.

    Args:
        logits: [tokens, part of the vocabulary], float32 or float64; overwritten if the vocabulary is split.
        targets: [tokens] indices in the full vocabulary, or `ignored`.
        ignored: index of targets that do not count.
        vocabulary: the part of this rank.
    """
    local, counted = targets - vocabulary.start, (targets != ignored).to(logits.dtype)
    inside = ((local >= 0) & (local < logits.shape[-1])).to(logits.dtype) * counted
    local = local.clamp(0, logits.shape[-1] - 1)
    if vocabulary.group is None:
        log_probabilities = torch.log_softmax(logits, -1)
        loss = F.nll_loss(log_probabilities, targets, ignore_index=ignored, reduction="sum")
        return Softmax(loss, log_probabilities.exp_(), counted, local, inside)
    largest = logits.amax(-1)
    with blocking(vocabulary.group):
        dist.all_reduce(largest, dist.ReduceOp.MAX, vocabulary.group)
    of_target = (logits.gather(-1, local[:, None])[:, 0] - largest).where(inside > 0, 0.0)
    exponentials = logits.sub_(largest[:, None]).exp_()
    # One all-reduce for the sum of exponentials and for the logit of the target, which one rank holds.
    sums = torch.stack([exponentials.sum(-1), of_target])
    with blocking(vocabulary.group):
        dist.all_reduce(sums, group=vocabulary.group)
    loss = (sums[0].log() - sums[1]).where(counted > 0, 0.0).sum()
    return Softmax(loss, exponentials.div_(sums[0][:, None]), counted, local, inside)


def softmax_gradient(found: Softmax, dtype: torch.dtype, slope: Tensor | float = 1.0) -> Tensor:
    """Gradient of the sum of the losses: slope * (probability - 1 for the target), 0 for targets that do not count.

    Args:
        found: result of `softmax_losses`; its probabilities are overwritten if there is a slope.
        dtype: dtype of the result.
        slope: derivative of the logits, [tokens, part of the vocabulary] or a number.

    Returns:
        [tokens, part of the vocabulary].
    """
    index, of_target = found.local[:, None], found.inside[:, None]
    scaled = found.probabilities
    if isinstance(slope, Tensor) or slope != 1.0:
        scaled = scaled.mul_(slope)
        of_target = of_target * (slope.gather(-1, index) if isinstance(slope, Tensor) else slope)
    of_target = scaled.gather(-1, index) * found.counted[:, None] - of_target
    gradient = torch.mul(scaled, found.counted[:, None], out=torch.empty_like(scaled, dtype=dtype))
    return gradient.scatter_(-1, index, of_target.to(dtype))


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignored: int,
    transform: LogitTransform,
    vocabulary: Vocabulary,
    chunks: Chunks | None = None,
) -> Tensor:
    """Sum of cross entropies of the logits of a head, without keeping the logits. Differentiable once.

    Logits are rounded to the dtype of the head's matmul, as in the model's own forward; everything after it is in float32, or
    in float64 for float64 hidden states. The gradients of the head are accumulated over the chunks in that dtype too.

    Args:
        hidden: [..., width], input of the head.
        weight: [vocabulary, width], or the part of this rank.
        bias: [vocabulary] or None.
        targets: [...] token indices in the full vocabulary, or `ignored`.
        ignored: index of targets that do not count.
        transform: what the model does with the outputs of the head.
        vocabulary: the part of this rank. The gradient of `hidden` is then that of this part alone.
        chunks: ranges of tokens to compute; a dry run leaves out most. None: all, see `chunk_bounds`.

    Returns:
        Scalar, the same on all ranks of the group.
    """
    chunks = chunks or chunk_bounds
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, ignored, transform, vocabulary, chunks)


def loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    ignored: int,
    transform: LogitTransform,
    vocabulary: Vocabulary,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of the outputs of a head, and its gradient, in operations of torch.

    Args:
        logits: [tokens, part of the vocabulary], outputs of the head before the transform.
        targets: [tokens] indices in the full vocabulary, or `ignored`.
        ignored: index of targets that do not count.
        transform: what the model does with the outputs of its head.
        vocabulary: the part of this rank.
        needs_gradient: False to leave the gradient out.

    Returns:
        Scalar in float32 or float64, and the gradient of `logits` in their dtype; without `needs_gradient` anything.
    """
    wide = transform.apply_(logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True))
    slope: Tensor | float = transform.scale
    if transform.softcap is not None and needs_gradient:
        slope = (wide / transform.softcap).square_().neg_().add_(1).mul_(transform.scale)
    found = softmax_losses(wide, targets, ignored, vocabulary)
    return found.loss, softmax_gradient(found, logits.dtype, slope) if needs_gradient else logits


def fused_loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    ignored: int,
    transform: LogitTransform,
    vocabulary: Vocabulary,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` by two Triton kernels; the gradient overwrites the logits."""
    scale, softcap = transform.scale, transform.softcap or 0.0
    largest, sums, of_target = kernels.softmax_statistics(logits, targets, vocabulary.start, scale, softcap)
    if vocabulary.group is not None:
        own = largest.clone()
        with blocking(vocabulary.group):
            dist.all_reduce(largest, dist.ReduceOp.MAX, vocabulary.group)
        both = torch.stack([sums * torch.exp(own - largest), of_target])
        with blocking(vocabulary.group):
            dist.all_reduce(both, group=vocabulary.group)
        sums, of_target = both
    lse = largest + sums.log()
    if needs_gradient:
        kernels.softmax_gradient(logits, targets, lse, ignored, vocabulary.start, scale, softcap)
    return ((lse - of_target) * (targets != ignored)).sum(), logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignored: int,
        transform: LogitTransform,
        vocabulary: Vocabulary,
        chunks: Chunks,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows, targets = hidden.flatten(0, -2), targets.flatten()
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(rows) if of_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and of_bias else None
        needs_gradient = any((of_hidden, of_weight, of_bias))
        for begin, end in chunks(len(rows), weight.shape[0], hidden.device.type):
            part, logits = rows[begin:end], F.linear(rows[begin:end], weight, bias)
            compute = fused_loss_and_gradient if kernels.can_launch(logits) else loss_and_gradient
            loss, gradient = compute(logits, targets[begin:end], ignored, transform, vocabulary, needs_gradient)
            total += loss
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[begin:end])
            if of_weight:
                grad_weight = _add_matmul(grad_weight, gradient, part, wide)
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes, ctx.shape = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype), hidden.shape
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Tensor | None] = [None, None, None]
        for index, kept in enumerate(ctx.saved_tensors):
            if kept is not None:  # one pass, which rounds once
                found[index] = torch.mul(kept, gradient, out=torch.empty_like(kept, dtype=ctx.dtypes[index]))
        if found[0] is not None:
            found[0] = found[0].view(ctx.shape)
        return (*found, None, None, None, None, None)


def chunk_bounds(tokens: int, vocabulary: int, device_type: str) -> list[tuple[int, int]]:
    """Ranges of nearly equal numbers of tokens within the limits of a device type."""
    limits = CHUNKS.get(device_type, ACCELERATOR_CHUNKS)
    most = max(limits.largest_bytes // (4 * vocabulary), 1)
    count = max(-(-tokens // most), min(FEWEST_CHUNKS, tokens // limits.fewest_tokens), 1)
    size = max(-(-tokens // count), 1)
    return [(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def _add_matmul(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left.T @ right in a wider dtype, in place."""
    if total is None:
        total = torch.zeros(left.shape[1], right.shape[1], dtype=dtype, device=left.device)
    if left.dtype == dtype:
        return torch.addmm(total, left.T, right, out=total)
    add_matmul(total, left, right)
    return total


@torch.library.custom_op("weft::add_matmul", mutates_args=("total",))
def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right for a float32 sum of matmuls in 16 bits; on CUDA the product is not rounded to 16 bits.

    A custom operator, because torch 2.11 knows no shapes of the matmul with `out_dtype` for fake tensors.

    Args:
        total: float32 [n, m].
        left: [k, n] in bf16 or fp16.
        right: [k, m] in the dtype of left.
    """
    if total.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left.T @ right)


@add_matmul.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None
