"""Expert parallelism: all-to-all dispatch of tokens to the ranks of their experts, and combine (Lepikhin et al., GShard, 2020).

Each of the `ep` ranks of a group holds num_experts / ep complete experts, in order, and routes its own tokens:

    counts      all-to-all of int64     number of copies for each expert of the receiver
    dispatch    all-to-all of rows      one row for each (token, expert) copy
                forward of the experts module on the local experts, each row with one expert, without router weights
    combine     all-to-all of rows      inverse of dispatch, then the sum over the copies of a token, with router weights

Router weights stay on the rank of their token: experts multiply their outputs by them, which the rank of the token can do as
well, and no message carries them or their gradients. Where backward recomputes the experts, that would need the rows of combine
a second time. There each row's weight is sent beside it, and the rank of the expert computes the gradient of the weight, from
the outputs that it has recomputed; combine is not repeated. The block is recomputed while the gradient of combine is in flight.

No copy is dropped or padded, whatever the router chooses (Gale et al., MegaBlocks, 2022). With balanced routing a rank sends
T K H (ep - 1) / ep elements in dispatch and the same number in combine, and again in backward.

If the group spans several hosts, dispatch and combine are hierarchical. A token is sent once to each host that holds any of its
experts, to the rank with the same index on that host, and from there to its experts. Their outputs are summed on that host and
sent back once (as in DeepEP of DeepSeek-AI, 2025). With balanced routing over h hosts a rank sends each host 1 - (1 - 1/h)^K
rows per token instead of K / h.

With a row format, all that is sent to experts is rounded to 8 bits: rows in dispatch, and in backward the gradients of combine.
All that experts send back, outputs and gradients of rows, keeps its dtype, because it is summed (DeepSeek-V3 Technical Report,
2024, section 3.3.3). A rank also rounds the rows of its own experts, so that results do not depend on where experts are.

Shapes: T tokens of this rank, K experts per token, H hidden size, R rows received by this rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import AsyncAllToAll, Wait, exchange, start_all_to_all
from weft.comm.compression.rows import RowFormat
from weft.comm.lanes import Lanes
from weft.compute.experts import inverse_permutation, permute, unpermute, unpermute_backward
from weft.parallel.experts.path import Exchange, Part, no_op


class Channel(NamedTuple):
    """Expert-parallel group, and what a layer does while it waits for a message of rows."""

    group: dist.ProcessGroup
    """Group with more than one rank."""
    lanes: Lanes | None = None
    """Lanes of joint forwards and backwards, which hand over before each wait for rows."""
    counts_group: dist.ProcessGroup | None = None
    """Group of the same ranks for counts, which must not wait for the rows of the other lane; None: `group`."""
    is_recomputed: bool = False
    """True if backward recomputes the layer, without combine; not with a row format."""
    row_format: RowFormat | None = None
    """Format of the rows that are sent to experts; None: their dtype."""

    def start(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Wait:
        """Start the all-to-all of rows to the ranks of their experts, in whose waits the lanes hand over."""
        return start_all_to_all(rows, self.group, output_splits, input_splits, self._begin(), self.row_format)

    def to_tokens(
        self, output_splits: list[int], input_splits: list[int], waits_in_backward: bool = True
    ) -> AsyncAllToAll:
        """All-to-all of rows to the ranks of their tokens, whose backward sends gradients to the experts."""
        return AsyncAllToAll(
            self.group,
            output_splits,
            input_splits,
            self._begin(),
            waits_in_backward,
            backward_format=self.row_format,
        )

    def _begin(self) -> Callable[[], Callable[[], object]]:
        return self.lanes.begin_message if self.lanes else lambda: no_op

    def start_weights(
        self, weights: Tensor, order: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Callable[[], Tensor | None]:
        """Start to send the router weights of rows, where the ranks of their experts need them; before the rows.

        Args:
            weights: [T, K] float.
            order: int64: index (token * K + k) of each row that is sent.
            output_splits, input_splits: rows from and to each rank.

        Returns:
            A function that waits for the weights of the rows of this rank, [R, 1], after the wait for the rows.
        """
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return lambda: None
        return start_all_to_all(weights.flatten()[order, None], self.group, output_splits, input_splits)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """All-to-all of counts, [ranks, *] int64."""
        return exchange(counts, self.counts_group or self.group)


class Route(NamedTuple):
    """Routing of one micro-batch through one layer: the row order and split sizes that `combine` inverts."""

    channel: Channel
    order: Tensor
    """[T K] int64: index (token * K + k) of the copy in each row; rows after those that are sent have the other copies."""
    position: Tensor
    """[T, K] int64: row of each copy."""
    end: Tensor
    """[1] int32: number of rows that are sent."""
    input_splits: list[int]
    """Rows sent to each rank in dispatch."""
    output_splits: list[int]
    """Rows received from each rank in dispatch; the sum is R."""
    weights: Tensor | None = None
    """[R, 1] router weights of the received rows; None if only the ranks of their tokens have them."""


class AllToAll:
    """Each copy of a token to the rank of its expert; see `Exchange`."""

    def __init__(self, num_experts: int, channel: Channel):
        """
        Args:
            num_experts: number of experts of the group, a multiple of its size.
            channel: its group has more than one rank. Expert e is on rank e // (num_experts / ep).
        """
        self.num_experts, self.channel = num_experts, channel

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        rows, local, route = dispatch(hidden, index, weights, self.num_experts, self.channel, meanwhile)
        return [Part(rows, local)], lambda outputs: combine(outputs[0], weights, route)


class OverHosts:
    """Each token once to each host of its experts, and from there by another exchange; see `Exchange`."""

    def __init__(self, num_experts: int, channel: Channel, inside: Exchange):
        """
        Args:
            num_experts: number of experts of all hosts, a multiple of the number of hosts.
            channel: its group has one rank per host. Expert e is on host e // (num_experts / hosts).
            inside: exchange of the ranks of this host, for the experts of this host.
        """
        self.num_experts, self.channel, self.inside = num_experts, channel, inside

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        rows, index, weights, route = dispatch_to_hosts(
            hidden, index, weights, self.num_experts, self.channel, meanwhile
        )
        parts, bring_back = self.inside(rows, index, weights, no_op)
        return parts, lambda outputs: combine(bring_back(outputs).to(rows.dtype), None, route)


def exchange_of(num_experts: int, channels: tuple[Channel, ...]) -> Exchange:
    """Exchange over the channel of a group, or over the channel between hosts and the one inside of a host (`groups.py`)."""
    channel, *inside = channels
    if not inside:
        return AllToAll(num_experts, channel)
    return OverHosts(num_experts, channel, exchange_of(num_experts // channel.group.size(), tuple(inside)))


def dispatch(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    channel: Channel,
    meanwhile: Callable[[], object] = no_op,
) -> tuple[Tensor, Tensor, Route]:
    """Send each copy of each token to the rank of its expert. Differentiable in hidden and weights.

    Args:
        hidden: [T, H] float; T may differ between ranks and be 0.
        index: [T, K] integer: global expert indices of each token. A copy for expert `num_experts` is not sent and
            contributes zero, as in the experts of Transformers.
        weights: [T, K] float, of any dtype; sent where the layer is recomputed.
        num_experts: number of experts of the group, a multiple of its size.
        channel: its group has more than one rank. Expert e is on rank e // (num_experts / ep).
        meanwhile: function to call while the all-to-all is in flight.

    Returns:
        received [R, H]; local_index [R, 1] int64 below num_experts / ep; and the route. Rows are sorted by source rank, then
        expert, then token. R may be 0.
    """
    ranks, top_k = channel.group.size(), index.shape[1]
    order, counts = sort_copies(index, num_experts)
    counts = counts.view(ranks, -1)
    receive_counts = channel.exchange_counts(counts)
    # The only device synchronisation of a layer.
    input_splits, output_splits = torch.stack([counts.sum(1), receive_counts.sum(1)]).tolist()
    places = place_copies(order, top_k, sum(input_splits))
    sent = order[: sum(input_splits)]
    wait_weights = channel.start_weights(weights, sent, output_splits, input_splits)
    wait = channel.start(permute(hidden, sent, *places), output_splits, input_splits)
    meanwhile()
    received, received_weights = wait(), wait_weights()
    local = torch.arange(num_experts // ranks, device=index.device).repeat(ranks)
    local_index = local.repeat_interleave(receive_counts.flatten(), output_size=sum(output_splits))[:, None]
    route = Route(channel, order, *places, input_splits, output_splits, received_weights)
    return received, local_index, route


def place_copies(order: Tensor, top_k: int, sent: int) -> tuple[Tensor, Tensor]:
    """Places of the copies of each token: `position` and `end` of `Route`, for the number of copies that are sent."""
    end = torch.full((1,), sent, dtype=torch.int32, device=order.device)
    return inverse_permutation(order).view(-1, top_k), end


def sort_copies(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the copies of tokens by expert.

    Args:
        index: [T, K] integer: experts of each token; `num_experts` for a copy that is not sent.
        num_experts: number of experts.

    Returns:
        order [T K] int64: index (token * K + k) of the copies, by expert, then token; counts [num_experts] int64.
    """
    experts, order = index.flatten().sort(stable=True)
    boundaries = torch.arange(num_experts + 1, dtype=index.dtype, device=index.device)
    # Unlike bincount, searchsorted does not synchronise with the device.
    return order, torch.searchsorted(experts, boundaries).diff()


def dispatch_to_hosts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    channel: Channel,
    meanwhile: Callable[[], object] = no_op,
) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Send each token once to each host that holds any of its experts. Differentiable in hidden and weights.

    Args:
        hidden, index: as in `dispatch`.
        weights: [T, K] float, of any dtype.
        num_experts: number of experts of all hosts, a multiple of the number of hosts.
        channel: its group has one rank per host. Expert e is on host e // (num_experts / hosts).
        meanwhile: function to call while the all-to-all is in flight.

    Returns:
        received [R, H], sorted by source rank, then token; local_index [R, K] int64, with num_experts / hosts for experts of
        other hosts and for copies that are not sent; received_weights [R, K]; and the route for `combine`. R may be 0.
    """
    hosts = channel.group.size()
    per_host = num_experts // hosts
    host_ids = torch.arange(hosts, device=index.device)
    is_local = index[None] // per_host == host_ids[:, None, None]  # [hosts, T, K]
    is_sent = is_local.any(2)
    counts = is_sent.sum(1)
    receive_counts = channel.exchange_counts(counts)
    input_splits, output_splits = torch.stack([counts, receive_counts]).tolist()  # synchronises with the device
    # Rows by host, then token; then the copies that are not sent.
    by_host = torch.argsort((~is_sent).flatten(), stable=True)
    host, token = by_host // len(index), by_host % len(index)
    order = token * hosts + host
    places = place_copies(order, hosts, sum(input_splits))
    host, token = (ids[: sum(input_splits)] for ids in (host, token))
    local = torch.where(is_local, index[None] - per_host * host_ids[:, None, None], per_host)[host, token]
    received_index = exchange(local, channel.group, output_splits, input_splits)
    wait_weights = start_all_to_all(weights[token], channel.group, output_splits, input_splits)
    wait = channel.start(permute(hidden, order[: len(token)], *places), output_splits, input_splits)
    meanwhile()
    received, received_weights = wait(), wait_weights()
    route = Route(channel, order, *places, input_splits, output_splits)
    return received, received_index, received_weights, route


def combine(outputs: Tensor, weights: Tensor | None, route: Route) -> Tensor:
    """Send rows back to the ranks of their tokens, and sum the weighted copies of each token. Differentiable.

    Copies are added in the order of K (in hierarchical dispatch, in the order of hosts).

    Args:
        outputs: [R, H], in the row order of dispatch.
        weights: [T, K] float: factors of the copies; None for ones.
        route: route returned by dispatch.

    Returns:
        [T, H] in the wider dtype of outputs and weights.
    """
    collective = route.channel.to_tokens(route.input_splits, route.output_splits, route.weights is None)
    if route.weights is not None:
        outputs = _WeightGradients.apply(outputs, route.weights, collective)
    rows = collective.send(outputs)()
    if weights is None or route.weights is not None:
        return _SumOfCopies.apply(rows, weights, route)
    return _sum_of_copies(rows, weights, route)


def _sum_of_copies(rows: Tensor, weights: Tensor | None, route: Route) -> Tensor:
    """Sum of the copies of each token, [T, H]."""
    rows = F.pad(rows, (0, 0, 0, len(route.order) - len(rows))) if len(rows) < len(route.order) else rows
    return unpermute(rows, route.position, weights, route.end)


class _SumOfCopies(torch.autograd.Function):
    """Sum of the copies of each token. Backward copies the gradient of a token, without its weights; needs no saved tensors."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, route: Route) -> Tensor:
        ctx.tokens, ctx.dtype = route.order[: len(rows)] // route.position.shape[1], rows.dtype
        return _sum_of_copies(rows, weights, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype).index_select(0, ctx.tokens), None, None


class _WeightGradients(torch.autograd.Function):
    """Identity on the rank of the experts. Backward multiplies gradients by weights, and computes the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, collective: AsyncAllToAll) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.collective = collective
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        outputs, weights = ctx.saved_tensors  # runs the recompute, while the gradient is in flight
        ctx.collective.wait()
        rows = torch.arange(len(outputs), device=outputs.device)[:, None]
        end = torch.full((1,), len(outputs), dtype=torch.int32, device=outputs.device)
        return *unpermute_backward(gradient, outputs, rows, weights, end), None
