"""Compressed mean reductions over ranks.

    reduce-scatter   each rank encodes every part and sends it to the owner of the part (all-to-all); the owner decodes the
                     messages and adds them up in rank order
    all-reduce       the owner then encodes its part of the sum and sends it to all ranks (all-gather); all ranks decode the
                     same messages, so that their results are equal, bit for bit

An owner's own contribution to its part is not sent and has no compression error. Its slot in the worker's error tensor holds
the error of the sum that the owner encodes (Tang et al., 1-bit Adam, 2021, keep two tensors).

In a hierarchical group, the ranks of a host first reduce-scatter without compression, and only the sums of the hosts are
compressed:

    inner  reduce-scatter -> outer  compressed -> inner  all-gather (in an all-reduce)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import all_gather_single, reduce_scatter_single
from weft.comm.compression.codec import Codec, decode, encode
from weft.comm.compression.feedback import Feedback
from weft.comm.stopwatch import mark, wait
from weft.compat import DefaultAllocMixin
from weft.errors import CommunicationError


class Levels(NamedTuple):
    """Subgroups of a reduction: rank r has local rank r % inner.size() on host r // inner.size()."""

    inner: dist.ProcessGroup | None
    """Group with uncompressed messages, the ranks of this host; None if there is none."""
    outer: dist.ProcessGroup | None
    """Group with compressed messages; None if there is none."""

    @property
    def inner_size(self) -> int:
        return self.inner.size() if self.inner is not None else 1

    @property
    def outer_size(self) -> int:
        return self.outer.size() if self.outer is not None else 1


def levels_of(group: dist.ProcessGroup, compress_scope: str) -> Levels:
    """Split a group into an uncompressed inner and a compressed outer group.

    Args:
        group: data-parallel ranks; a hierarchical group has the attributes `inner` and `outer`, groups or None.
        compress_scope: value of `plan.comm.compress_scope`: "all" messages, or those between hosts ("inter_node").
    """
    if compress_scope == "inter_node":
        return Levels(getattr(group, "inner", None), getattr(group, "outer", None))
    return Levels(None, group if group.size() > 1 else None)


class PlainAllReduce:
    """Asynchronous uncompressed mean over ranks with the interface of `AllReduce`.

    Args:
        name: name of this reduction.
        flat: gradient of any float dtype, contiguous.
        group: group of the ranks.
        feedback: state that turns the gradient into a momentum; None to keep the gradient.
    """

    def __init__(self, name: str, flat: Tensor, group: dist.ProcessGroup, feedback: Feedback | None = None):
        self.name, self.flat, self.feedback, self.group = name, flat, feedback, group
        self.began = mark()
        self.work = dist.all_reduce(flat, dist.ReduceOp.AVG, group, async_op=True) if group.size() > 1 else None

    def advance(self) -> None:
        """No effect; an uncompressed reduction has a single step."""

    def wait(self) -> None:
        """Wait until the mean is in `flat`."""
        if self.work is not None:
            wait(self.work, self.group, self.began)
        if self.feedback is not None:
            self.feedback.add_up(self.name, self.flat)


class PendingMessages(NamedTuple):
    """Messages in flight. The tuple keeps their memory alive."""

    work: Any
    messages: Tensor

    def wait(self) -> None:
        """Wait until all messages are sent and received."""
        self.work.wait()


class AllReduce:
    """Asynchronous compressed mean over ranks, in place; the constructor starts it. All ranks use the same order.

    Args:
        name: name of this reduction and its state.
        flat: [length], of any float dtype, contiguous; read by the constructor alone.
        levels: groups of the reduction; `outer` is not None.
        feedback: state of all reductions of this rank.
        momentum: True to turn gradients into momenta.
    """

    def __init__(self, name: str, flat: Tensor, levels: Levels, feedback: Feedback, *, momentum: bool = False):
        assert levels.outer is not None
        self.name, self.momentum = name, momentum
        self.flat, self.levels, self.feedback = flat, levels, feedback
        self.group, self.own = levels.outer, levels.outer.rank()
        parts = levels.inner_size * levels.outer_size
        self.length = -(-len(flat) // parts)
        gradient = flat
        if parts * self.length != len(flat):
            gradient = torch.nn.functional.pad(flat, (0, parts * self.length - len(flat)))
        if levels.inner is not None and levels.inner.size() > 1:
            host, gradient = gradient, gradient.new_empty(len(gradient) // levels.inner.size())
            reduce_scatter_single(gradient, host, dist.ReduceOp.AVG, group=levels.inner)
        gradient = gradient.view(levels.outer_size, self.length)
        self.errors = feedback.add_to(name, gradient, momentum=momentum)
        self.received, self.work = _send_parts(self.errors, [self.length], feedback, self.group)
        self.gathered: Tensor | None = None

    def advance(self) -> None:
        """Wait for the messages of the other ranks and start to send their sum; called by `wait` if not called before."""
        if self.gathered is not None:
            return
        total = _sum_parts(self.errors, [self.length], self.received, self.work, self.feedback, self.group)
        codec = self.feedback.owner_codec
        message = encode(codec, total[None])
        if self.feedback.keeps_errors:
            torch.sub(total, decode(codec, message, self.length)[0], out=self.errors[self.own])
        self.gathered = message.new_empty(self.levels.outer_size, message.shape[1])
        work = all_gather_single(self.gathered, message, group=self.group, async_op=True)
        self.work = PendingMessages(work, message)

    def wait(self) -> None:
        """Wait until the mean is in `flat`, with the same bits on all ranks."""
        self.advance()
        assert self.gathered is not None
        self.work.wait()
        mean = decode(self.feedback.owner_codec, self.gathered, self.length).flatten()
        mean = self.feedback.add_change(self.name, mean.div_(self.levels.outer_size), momentum=self.momentum)
        mean.mul_(self.feedback.loss_scale)
        if self.levels.inner is not None and self.levels.inner.size() > 1:
            host, mean = mean, mean.new_empty(self.levels.inner_size * len(mean))
            all_gather_single(mean, host, group=self.levels.inner)
        self.flat.copy_(mean[: len(self.flat)])


class ReduceScatter(DefaultAllocMixin):
    """Compressed reduce-scatter of FSDP2, for `set_custom_reduce_scatter`.

    Args:
        name: name of the FSDP unit.
        levels: groups of the reduction; `outer` is not None.
        feedback: state of all reductions of this rank.
        segments: as for `reduce_scatter`.
    """

    def __init__(self, name: str, levels: Levels, feedback: Feedback, segments: Sequence[int]):
        self.name, self.levels, self.feedback, self.segments = name, levels, feedback, segments

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce-scatter the mean over the ranks of the group."""
        assert op == dist.ReduceOp.AVG
        if self.feedback.is_on:
            reduce_scatter(self.name, output_tensor, input_tensor, self.levels, self.feedback, self.segments)
        else:
            reduce_scatter_single(output_tensor, input_tensor, op, group=group)


def reduce_scatter(
    name: str, output: Tensor, input: Tensor, levels: Levels, feedback: Feedback, segments: Sequence[int] = ()
) -> None:
    """Compressed mean reduce-scatter. Turns gradients into momenta if `feedback.decay` is set.

    Args:
        name: name of this reduction and its state.
        output: [length], of any float dtype.
        input: [ranks * length], in rank order of the full group.
        levels: groups of the reduction; `outer` is not None.
        feedback: state of all reductions of this rank.
        segments: lengths of the segments of a part that are encoded separately; empty: one segment.

    Raises:
        CommunicationError: the lengths of the segments do not sum to the length of a part.
    """
    assert levels.outer is not None
    if segments and sum(segments) != len(output):
        raise CommunicationError(
            f"{len(output)} elements of {name} have a gradient in this backward, not {sum(segments)}",
            where="plan.comm.compression",
            rule="error feedback is kept per element: the same parameters have gradients in every backward",
            fix='freeze the parameters that are not always used, or set plan.comm.compression = "none"',
        )
    gradient = input.view(levels.outer_size, levels.inner_size, len(output))
    if levels.inner is not None and levels.inner.size() > 1:
        host = gradient.transpose(0, 1).reshape(-1)  # in local rank order
        gradient = host.new_empty(levels.outer_size, len(output))
        reduce_scatter_single(gradient.view(-1), host, dist.ReduceOp.AVG, group=levels.inner)
    gradient = gradient.reshape(levels.outer_size, len(output))
    errors = feedback.add_to(name, gradient, momentum=True)
    segments = segments or [len(output)]
    received, work = _send_parts(errors, segments, feedback, levels.outer)
    total = _sum_parts(errors, segments, received, work, feedback, levels.outer)
    errors[levels.outer.rank()] = 0
    mean = feedback.add_change(name, total.div_(levels.outer_size), momentum=True)
    output.copy_(mean.mul_(feedback.loss_scale))


def _send_parts(
    errors: Tensor, segments: Sequence[int], feedback: Feedback, group: dist.ProcessGroup
) -> tuple[Tensor, PendingMessages]:
    """Start to send all parts except this rank's own; their compression errors remain in `errors`.

    Returns:
        The buffer of the received messages, and the messages in flight.
    """
    codec, own = feedback.codec, group.rank()
    messages = errors.new_zeros(len(errors), sum(map(codec.bytes, segments)), dtype=torch.uint8)
    for others in (slice(0, own), slice(own + 1, None)):
        if len(errors[others]):
            columns = errors[others].split(segments, 1)
            messages[others] = torch.cat([encode(codec, column) for column in columns], 1)
            if feedback.keeps_errors:
                errors[others] -= _decode_segments(codec, messages[others], segments)
    received = torch.empty_like(messages)
    work = dist.all_to_all_single(received, messages, group=group, async_op=True)
    return received, PendingMessages(work, messages)


def _sum_parts(
    errors: Tensor,
    segments: Sequence[int],
    received: Tensor,
    work: PendingMessages,
    feedback: Feedback,
    group: dist.ProcessGroup,
) -> Tensor:
    """Wait for the messages of the other ranks and sum this rank's part over ranks, in float32."""
    work.wait()
    total = torch.zeros_like(errors[0])
    for rank in range(group.size()):
        own, message = rank == group.rank(), received[rank : rank + 1]
        total += errors[rank] if own else _decode_segments(feedback.codec, message, segments)[0]
    return total


def _decode_segments(codec: Codec, messages: Tensor, segments: Sequence[int]) -> Tensor:
    parts = messages.split([codec.bytes(length) for length in segments], 1)
    return torch.cat([decode(codec, part, length) for part, length in zip(parts, segments, strict=True)], 1)
