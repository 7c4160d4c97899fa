"""Means over ranks whose messages are compressed.

    reduce-scatter   each rank encodes the parts of the others and sends them their own (all-to-all); the owner of a part
                     decodes them and adds them up, in the order of ranks
    all-reduce       the owner then encodes its part of the sum, and sends it to all (all-gather); every rank decodes the
                     same messages, so that all end with the same bits

What an owner has itself of its part is not sent, and nothing of it is left out: in the tensor of a worker's errors, that place
holds what is left out of the sum when the owner encodes it (Tang et al., 1-bit Adam, 2021, keep two tensors).

With two levels, ranks of one host first add up in full what they have, so that each has a part of it, and only the hosts'
sums are compressed:

    inner  reduce-scatter -> outer  compressed -> inner  all-gather (of an all-reduce)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import all_gather_single, reduce_scatter_single
from weft.comm.compression.codec import Codec, decode, encode
from weft.comm.compression.feedback import Feedback
from weft.errors import CommunicationError


class Levels(NamedTuple):
    """The ranks of a group: rank r is the (r % inner.size())-th of a host, and on the (r // inner.size())-th host."""

    inner: dist.ProcessGroup | None
    """Ranks of this host, whose messages are not compressed; None where each is alone."""
    outer: dist.ProcessGroup | None
    """Ranks whose messages are; None where there is nothing to compress."""

    @property
    def inner_size(self) -> int:
        return self.inner.size() if self.inner is not None else 1

    @property
    def outer_size(self) -> int:
        return self.outer.size() if self.outer is not None else 1


def levels_of(group: dist.ProcessGroup, compress_scope: str) -> Levels:
    """How a group is reduced.

    Args:
        group: ranks with gradients to be averaged; one of two levels has `inner` and `outer`, groups or None.
        compress_scope: "all" messages are compressed, or only the "slow" ones, between hosts.
    """
    if compress_scope == "inter_node":
        return Levels(getattr(group, "inner", None), getattr(group, "outer", None))
    return Levels(None, group if group.size() > 1 else None)


class PlainAllReduce:
    """The same as `AllReduce`, of what is not compressed.

    Args:
        name: of this reduction.
        flat: of any float format, contiguous.
        group: its ranks.
        feedback: of what makes momenta of gradients here; None where nothing does.
    """

    def __init__(self, name: str, flat: Tensor, group: dist.ProcessGroup, feedback: Feedback | None = None):
        self.name, self.flat, self.feedback = name, flat, feedback
        self.work = dist.all_reduce(flat, dist.ReduceOp.AVG, group, async_op=True) if group.size() > 1 else None

    def advance(self) -> None:
        """There is one message only."""

    def wait(self) -> None:
        """End it: the mean is in `flat`."""
        if self.work is not None:
            self.work.wait()
        if self.feedback is not None:
            self.feedback.add_up(self.name, self.flat)


class Sending(NamedTuple):
    """Messages on their way, which must stay until they have left."""

    work: Any
    messages: Tensor

    def wait(self) -> None:
        """Until all have come and gone."""
        self.work.wait()


class AllReduce:
    """A mean over ranks under way, in place; it begins when it is made. All ranks make the same ones, in the same order.

    Args:
        name: of this reduction, under which its state is kept.
        flat: [length], of any float format, contiguous; it is not read after the beginning.
        levels: its ranks; there is something to compress.
        feedback: the state of all reductions of this rank.
        momentum: whether momenta are made of gradients here.
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
        self.left = feedback.add_to(name, gradient, momentum=momentum)
        self.received, self.work = _send_parts(self.left, [self.length], feedback, self.group)
        self.gathered: Tensor | None = None

    def advance(self) -> None:
        """Wait for the messages of the other ranks, and begin to send their sum. `wait` does it, if nobody has."""
        if self.gathered is not None:
            return
        total = _add_up_parts(self.left, [self.length], self.received, self.work, self.feedback, self.group)
        codec = self.feedback.owner_codec
        message = encode(codec, total[None])
        if self.feedback.keeps_errors:
            torch.sub(total, decode(codec, message, self.length)[0], out=self.left[self.own])
        self.gathered = message.new_empty(self.levels.outer_size, message.shape[1])
        work = all_gather_single(self.gathered, message, group=self.group, async_op=True)
        self.work = Sending(work, message)

    def wait(self) -> None:
        """End it: the mean is in `flat`, with the same bits on all ranks."""
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


class ReduceScatter:
    """What FSDP2 calls, by `set_custom_reduce_scatter`, in place of a reduce-scatter of torch.distributed.

    Args:
        name: of the unit of communication.
        levels: its ranks; there is something to compress.
        feedback: the state of all reductions of this rank.
        segments: as of `reduce_scatter`.
    """

    def __init__(self, name: str, levels: Levels, feedback: Feedback, segments: Sequence[int]):
        self.name, self.levels, self.feedback, self.segments = name, levels, feedback, segments

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """The mean over the group's ranks."""
        assert op == dist.ReduceOp.AVG
        if self.feedback.is_on:
            reduce_scatter(self.name, output_tensor, input_tensor, self.levels, self.feedback, self.segments)
        else:
            reduce_scatter_single(output_tensor, input_tensor, op, group=group)


def reduce_scatter(
    name: str, output: Tensor, input: Tensor, levels: Levels, feedback: Feedback, segments: Sequence[int] = ()
) -> None:
    """The mean over ranks of this rank's part; where momenta are wanted, they are made of gradients here. Arguments are those
    of `AllReduce`, and

    Args:
        output: [length], of any float format.
        input: [ranks * length], in the order of ranks of the whole group.
        segments: numbers of each stretch of a part that no block of the codec goes beyond; empty: one stretch.

    Raises:
        CommunicationError: the segments are not those of a part.
    """
    assert levels.outer is not None
    if segments and sum(segments) != len(output):
        raise CommunicationError(
            f"{len(output)} numbers of {name} have a gradient in this backward, not {sum(segments)}",
            where="plan.comm.compression",
            rule="what messages leave out is kept for every number: the same parameters have gradients in every backward",
            fix='freeze the parameters that are not always used, or set plan.comm.compression = "none"',
        )
    gradient = input.view(levels.outer_size, levels.inner_size, len(output))
    if levels.inner is not None and levels.inner.size() > 1:
        host = gradient.transpose(0, 1).reshape(-1)  # in the order of the ranks of a host
        gradient = host.new_empty(levels.outer_size, len(output))
        reduce_scatter_single(gradient.view(-1), host, dist.ReduceOp.AVG, group=levels.inner)
    gradient = gradient.reshape(levels.outer_size, len(output))
    left = feedback.add_to(name, gradient, momentum=True)
    segments = segments or [len(output)]
    received, work = _send_parts(left, segments, feedback, levels.outer)
    total = _add_up_parts(left, segments, received, work, feedback, levels.outer)
    left[levels.outer.rank()] = 0
    mean = feedback.add_change(name, total.div_(levels.outer_size), momentum=True)
    output.copy_(mean.mul_(feedback.loss_scale))


def _send_parts(
    left: Tensor, segments: Sequence[int], feedback: Feedback, group: dist.ProcessGroup
) -> tuple[Tensor, Sending]:
    """Begin to send all parts but one's own; what their messages leave out stays in `left`.

    Returns:
        The messages that come, and what waits for them.
    """
    codec, own = feedback.codec, group.rank()
    messages = left.new_zeros(len(left), sum(map(codec.bytes, segments)), dtype=torch.uint8)
    for others in (slice(0, own), slice(own + 1, None)):
        if len(left[others]):
            columns = left[others].split(segments, 1)
            messages[others] = torch.cat([encode(codec, column) for column in columns], 1)
            if feedback.keeps_errors:
                left[others] -= _decode_segments(codec, messages[others], segments)
    received = torch.empty_like(messages)
    work = dist.all_to_all_single(received, messages, group=group, async_op=True)
    return received, Sending(work, messages)


def _add_up_parts(
    left: Tensor,
    segments: Sequence[int],
    received: Tensor,
    work: Sending,
    feedback: Feedback,
    group: dist.ProcessGroup,
) -> Tensor:
    """The sum of this rank's part over ranks, float32, when the messages of the others are there."""
    work.wait()
    total = torch.zeros_like(left[0])
    for rank in range(group.size()):
        own, message = rank == group.rank(), received[rank : rank + 1]
        total += left[rank] if own else _decode_segments(feedback.codec, message, segments)[0]
    return total


def _decode_segments(codec: Codec, messages: Tensor, segments: Sequence[int]) -> Tensor:
    parts = messages.split([codec.bytes(length) for length in segments], 1)
    return torch.cat([decode(codec, part, length) for part, length in zip(parts, segments, strict=True)], 1)
