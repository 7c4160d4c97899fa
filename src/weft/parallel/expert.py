"""Expert parallelism: all-to-all dispatch of tokens to the ranks of their experts, and combine (Lepikhin et al., GShard, 2020).

Each of the `ep` ranks of a group holds num_experts / ep complete experts, in order, and routes its own tokens:

    counts      all-to-all of int64     number of copies for each expert of the receiver
    dispatch    all-to-all of rows      one row for each (token, expert) copy
                forward of the experts module on the local experts, each row with one expert, without router weights
    combine     all-to-all of rows      inverse of dispatch, then the sum over the copies of a token, with router weights

Router weights stay on the rank of their token: experts multiply their outputs by them, which the rank of the token can do as
well, and no message carries them or their gradients.

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

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.backends.hierarchical import TwoLevelGroup
from weft.comm.collectives import Wait, exchange, start_all_to_all
from weft.comm.compression.rows import RowFormat
from weft.comm.lanes import Lanes
from weft.compute.experts import unpermute
from weft.errors import PlanError
from weft.parallel.checks import divisors, one_of

# Arguments of the experts modules of Transformers 5.17 to 5.23; the second names are those of GPT-OSS.
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


def _no_op() -> None: ...


class Channel(NamedTuple):
    """Expert-parallel group, and what a layer does while it waits for a message of rows."""

    group: dist.ProcessGroup
    """Group with more than one rank."""
    lanes: Lanes | None = None
    """Lanes of joint forwards and backwards, which hand over before each wait for rows."""
    counts_group: dist.ProcessGroup | None = None
    """Group of the same ranks for counts, which must not wait for the rows of the other lane; None: `group`."""
    row_format: RowFormat | None = None
    """Format of the rows that are sent to experts; None: their dtype."""

    def start_dispatch(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Wait:
        """Start the all-to-all of rows to the ranks of their experts."""
        before_wait = self.lanes.hand_over if self.lanes else _no_op
        return start_all_to_all(rows, self.group, output_splits, input_splits, before_wait, self.row_format, None)

    def start_combine(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Wait:
        """Start the all-to-all of rows to the ranks of their tokens, whose backward sends gradients to the experts."""
        before_wait = self.lanes.hand_over if self.lanes else _no_op
        return start_all_to_all(rows, self.group, output_splits, input_splits, before_wait, None, self.row_format)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """All-to-all of counts, [ranks, *] int64."""
        return exchange(counts, self.counts_group or self.group)


class Route(NamedTuple):
    """Routing of one micro-batch through one layer: the row order and split sizes that `combine` inverts."""

    channel: Channel
    order: Tensor
    """[T K] int64: index (token * K + k) of the copy in each row; rows after those that are sent have the other copies."""
    top_k: int
    """Number of copies of a token."""
    input_splits: list[int]
    """Rows sent to each rank in dispatch."""
    output_splits: list[int]
    """Rows received from each rank in dispatch; the sum is R."""


def dispatch(
    hidden: Tensor,
    index: Tensor,
    num_experts: int,
    channel: Channel,
    overlapped: Callable[[], object] = _no_op,
) -> tuple[Tensor, Tensor, Route]:
    """Send each copy of each token to the rank of its expert. Differentiable in hidden.

    Args:
        hidden: [T, H] float; T may differ between ranks and be 0.
        index: [T, K] integer: global expert indices of each token. A copy for expert `num_experts` is not sent and
            contributes zero, as in the experts of Transformers.
        num_experts: number of experts of the group, a multiple of its size.
        channel: its group has more than one rank. Expert e is on rank e // (num_experts / ep).
        overlapped: function to call while the all-to-all is in flight.

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
    wait = channel.start_dispatch(hidden[order[: sum(input_splits)] // top_k], output_splits, input_splits)
    overlapped()
    received = wait()
    local = torch.arange(num_experts // ranks, device=index.device).repeat(ranks)
    local_index = local.repeat_interleave(receive_counts.flatten(), output_size=sum(output_splits))[:, None]
    return received, local_index, Route(channel, order, top_k, input_splits, output_splits)


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


def run_experts(forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, index: Tensor) -> Tensor:
    """Forward of an experts module on rows with one expert each, without router weights.

    Without rows it runs too, on a row of zeros: its backward exchanges gradients, and the parameters need zero gradients.

    Args:
        forward: forward of the module.
        rows: [R, H].
        index: [R, 1] int64.

    Returns:
        [R, H].
    """
    num_rows = len(rows)
    if num_rows == 0:
        rows, index = (torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])]) for tensor in (rows, index))
    return forward(rows, index, rows.new_ones(len(rows), 1))[:num_rows]


def dispatch_to_hosts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    channel: Channel,
    overlapped: Callable[[], object] = _no_op,
) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Send each token once to each host that holds any of its experts. Differentiable in hidden and weights.

    Args:
        hidden, index: as in `dispatch`.
        weights: [T, K] float, of any dtype.
        num_experts: number of experts of all hosts, a multiple of the number of hosts.
        channel: its group has one rank per host. Expert e is on host e // (num_experts / hosts).
        overlapped: function to call while the all-to-all is in flight.

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
    host, token = (ids[: sum(input_splits)] for ids in (host, token))
    local = torch.where(is_local, index[None] - per_host * host_ids[:, None, None], per_host)[host, token]
    received_index = exchange(local, channel.group, output_splits, input_splits)
    wait_weights = start_all_to_all(weights[token], channel.group, output_splits, input_splits)
    wait = channel.start_dispatch(hidden[token], output_splits, input_splits)
    overlapped()
    received, received_weights = wait(), wait_weights()
    return received, received_index, received_weights, Route(channel, order, hosts, input_splits, output_splits)


def combine(outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
    """Send rows back to the ranks of their tokens, and sum the weighted copies of each token. Differentiable.

    Copies are added in the order of K (in hierarchical dispatch, in the order of hosts).

    Args:
        outputs: [R, H], in the row order of dispatch.
        weights: [T, K] float: factors of the copies.
        route: route returned by dispatch.

    Returns:
        [T, H] in the wider dtype of outputs and weights.
    """
    num_sent, device = sum(route.input_splits), outputs.device
    rows = route.channel.start_combine(outputs, route.input_splits, route.output_splits)()
    if num_sent < len(route.order):
        rows = F.pad(rows, (0, 0, 0, len(route.order) - num_sent))
    position = torch.empty_like(route.order)
    position[route.order] = torch.arange(len(route.order), device=device)
    end = torch.full((1,), num_sent, dtype=torch.int32, device=device)
    return unpermute(rows, position.view(-1, route.top_k), weights, end)


def split_experts(
    experts: Any,
    group: dist.ProcessGroup,
    lanes: Lanes | None = None,
    counts_group: dist.ProcessGroup | None = None,
    row_format: RowFormat | None = None,
) -> None:
    """Apply expert parallelism to an experts module, in place.

    The module keeps its class, its parameters and the implementation that Transformers chose; its `forward` is wrapped with
    dispatch and combine. Its `num_experts` becomes the number of local experts.

    The caller shards each parameter along dim 0. Gradients of the parameters are sums, not means, over the tokens of all ranks
    of the group.

    Args:
        experts: module accepted by `check_experts`.
        group: expert-parallel group with more than one rank.
        lanes: see `Channel`.
        counts_group: see `Channel`; not for a group on several hosts.
        row_format: see `Channel`.
    """
    num_experts = experts.num_experts
    experts.num_experts = num_experts // group.size()
    levels = (group.outer, group.inner) if isinstance(group, TwoLevelGroup) else (group,)
    if len(levels) == 2 and hasattr(experts, "_is_expert_parallel"):
        experts._is_expert_parallel = True  # some copies are for experts of other hosts, which Transformers then masks
    channels = tuple(Channel(level, lanes, counts_group, row_format) for level in levels)
    local_forward = experts.forward

    # A function, because torch.compile would compile each block anew for a `partial`; it cannot compile messages.
    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return expert_parallel_forward(local_forward, num_experts, channels, *args, **kwargs)

    experts.forward = forward


def expert_parallel_forward(
    local_forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_experts: int,
    channels: tuple[Channel, ...],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    overlapped: Callable[[], object] = _no_op,
) -> Tensor:
    """Forward of an expert-parallel module: dispatch, local forward, combine.

    Args:
        local_forward: original forward of the module, called on rows with one local expert each.
        num_experts: number of experts of the channels.
        channels: channel of the group, or the channel between hosts and the one inside of a host.
        hidden_states, top_k_index, top_k_weights: [T, H], [T, K], [T, K], as in the original forward.
        overlapped: function to call while the all-to-all of dispatch is in flight.

    Returns:
        [T, H].
    """
    channel, *inside = channels
    if inside:
        rows, index, weights, route = dispatch_to_hosts(
            hidden_states, top_k_index, top_k_weights, num_experts, channel, overlapped
        )
        per_host = num_experts // channel.group.size()
        sums = expert_parallel_forward(local_forward, per_host, tuple(inside), rows, index, weights)
        return combine(sums, sums.new_ones(len(hidden_states), route.top_k), route)
    rows, index, route = dispatch(hidden_states, top_k_index, num_experts, channel, overlapped)
    return combine(run_experts(local_forward, rows, index), top_k_weights, route).to(hidden_states.dtype)


def mixture_of_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Reference in one process: sum over k of weights[t, k] experts[index[t, k]](hidden[t]) (Shazeer et al., 2017).

    Args:
        hidden, index, weights: [T, H], [T, K], [T, K].
        experts: functions of rows, [rows, H] -> [rows, H].

    Returns:
        [T, H].
    """
    total = torch.zeros_like(hidden)
    for expert_id, expert in enumerate(experts):
        token, slot = torch.where(index == expert_id)
        total = total.index_add(0, token, expert(hidden[token]) * weights[token, slot, None])
    return total


def load_imbalance(loads: Tensor) -> float:
    """Load of the busiest expert divided by the mean load: 1 if balanced or without tokens, num_experts if one gets all.

    Args:
        loads: [num_experts] int64, tokens of each expert of the group.
    """
    total = int(loads.sum())
    return int(loads.max()) * loads.numel() / total if total else 1.0


def check_experts(model: nn.Module, anatomy: Anatomy, ep: int) -> None:
    """Refuse expert parallelism if the experts of the model cannot be split.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        ep: expert-parallel degree; 1 is always accepted.

    Raises:
        PlanError: the model has no experts; an experts module has an unknown signature, no `num_experts`, or parameters that
            are not stacked by expert; or ep does not divide the number of experts.
    """
    names = [name for block in anatomy.blocks for name in block.experts]
    if ep > 1 and not names:
        raise PlanError(
            f"ep = {ep}, but no block of this {anatomy.family} has an experts module",
            where="plan.parallel.ep",
            rule="expert parallelism splits the experts of Mixture-of-Experts blocks over ranks",
            fix="leave plan.parallel.ep at 1",
        )
    for name in names if ep > 1 else ():
        _check_module(name, model.get_submodule(name), ep)
    counts = {name: int(model.get_submodule(name).num_experts) for name in names} if ep > 1 else {}  # type: ignore[arg-type]
    for name, num_experts in counts.items():
        if num_experts % ep:
            common = math.gcd(ep, *counts.values())  # divisors of ep still divide the number of ranks
            raise PlanError(
                f"ep = {ep} does not divide {num_experts} experts",
                where=f"plan.parallel.ep, {name}",
                rule="every rank holds the same number of complete experts",
                fix=f"set plan.parallel.ep to {one_of(divisors(common))}",
            )


def takes_indices(experts: nn.Module) -> bool:
    """True if the arguments of an experts module are tokens, expert indices and router weights."""
    return tuple(inspect.signature(experts.forward).parameters) in SIGNATURES


def _check_module(name: str, experts: Any, ep: int) -> None:
    signature = tuple(inspect.signature(experts.forward).parameters)
    num_experts = getattr(experts, "num_experts", 0)
    unstacked = [key for key, p in experts.named_parameters() if p.ndim < 2 or len(p) != num_experts]
    problem = ""
    if not takes_indices(experts):
        problem = f"is called with ({', '.join(signature)})"
    elif not num_experts:
        problem = "has no num_experts"
    elif unstacked:
        problem = f"has a parameter that is not stacked by expert: {unstacked[0]}"
    if problem:
        raise PlanError(
            f"ep = {ep}, but the experts of this model cannot be split: {type(experts).__name__} {problem}",
            where=f"plan.parallel.ep, {name}",
            rule=f"forward({', '.join(SIGNATURES[0])}), num_experts, and parameters [num_experts, ...]",
            fix="leave plan.parallel.ep at 1",
        )
