"""Expert parallelism: tokens travel to the ranks that hold their experts, and back (Lepikhin et al., GShard, 2020).

Each of the `ep` ranks of a group holds num_experts / ep whole experts, in order, and routes its own tokens:

    counts      all-to-all of int64     how many copies come, for each of my experts
    dispatch    all-to-all of rows      one row for each (token, expert) copy, and its weight
                the module's own forward on its own experts, each row with one expert
    combine     all-to-all of rows      back, and summed over the copies of a token

No copy is dropped and none is padded, whatever the router does (Gale et al., MegaBlocks, 2022). With balanced routing a
rank sends T K H (ep - 1) / ep numbers in dispatch and as many in combine, and the same again in backward.

Where the group is on several hosts, a token goes once to each host that has experts of its, to the rank of the sender's place
there, and from there to its experts; what they make of it is added up there, and comes back once (as in DeepEP of DeepSeek-AI,
2025). With balanced routing over h hosts 1 - (1 - 1/h)^K of the tokens go to each host, in place of K / h copies of them.

Shapes: T tokens of this rank, K experts a token, H hidden size, R rows that come to this rank.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.backends.hierarchical import TwoLevelGroup
from weft.comm.collectives import all_to_all, exchange, start_all_to_all
from weft.errors import PlanError
from weft.parallel.checks import divisors, one_of

# What an experts module of Transformers (5.17 to 5.23) is called with: the second as GPT-OSS names it.
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


def _nothing() -> None: ...


class Route(NamedTuple):
    """The way of one micro-batch's copies through one layer, for their way back."""

    group: dist.ProcessGroup
    num_tokens: int
    top_k: int
    """Places that a token may have a copy at: its K experts, or all hosts."""
    order: Tensor
    """[copies sent] int64: which copy (token * K + k) each sent row is."""
    input_splits: list[int]
    """Rows to each rank in dispatch."""
    output_splits: list[int]
    """Rows from each rank in dispatch; their sum is R."""


def dispatch(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], object] = _nothing,
) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Send every copy of every token to the rank that holds its expert. Differentiable in hidden and weights.

    Args:
        hidden: [T, H] float; T may differ between ranks and be 0.
        index: [T, K] integer: experts of each token, numbered over the group. A copy for expert `num_experts` goes
            nowhere and counts as zero, as in the experts of Transformers.
        weights: [T, K] float, of any format.
        num_experts: of the whole group; its size divides it.
        group: of more than one rank. Expert e is on rank e // (num_experts / ep).
        meanwhile: is called while rows travel.

    Returns:
        received [R, H] in the format of hidden; local_index [R, 1] int64 below num_experts / ep; received_weights [R, 1]
        in the format of weights; and the route. Rows come by source rank, then expert, then token. R may be 0.
    """
    ranks, (num_tokens, top_k) = group.size(), index.shape
    experts, order = index.flatten().sort(stable=True)
    borders = torch.arange(num_experts + 1, dtype=index.dtype, device=index.device)
    counts = torch.searchsorted(experts, borders).diff().view(ranks, -1)  # no wait for the device, as bincount has
    coming = exchange(counts, group)
    input_splits, output_splits = torch.stack([counts.sum(1), coming.sum(1)]).tolist()  # the one wait of a layer
    order = order[: sum(input_splits)]
    wait = start_all_to_all(hidden[order // top_k], group, output_splits, input_splits)
    wait_weights = start_all_to_all(weights.flatten()[order, None], group, output_splits, input_splits)
    meanwhile()
    received, received_weights = wait(), wait_weights()
    local = torch.arange(num_experts // ranks, device=index.device).repeat(ranks)
    local_index = local.repeat_interleave(coming.flatten(), output_size=sum(output_splits))[:, None]
    route = Route(group, num_tokens, top_k, order, input_splits, output_splits)
    return received, local_index, received_weights, route


def dispatch_to_hosts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    outer: dist.ProcessGroup,
    meanwhile: Callable[[], object] = _nothing,
) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Send every token once to each host that holds experts of its. Differentiable in hidden and weights.

    Args:
        hidden, index, weights: as for `dispatch`.
        num_experts: of all hosts; their number divides it.
        outer: one rank of each host. Expert e is on host e // (num_experts / hosts).
        meanwhile: is called while rows travel.

    Returns:
        received [R, H], by source and token; local_index [R, K] int64, where experts of other hosts are num_experts / hosts, as
        those that are nowhere; received_weights [R, K]; and the route for `combine`. R may be 0.
    """
    hosts, num_tokens = outer.size(), len(index)
    per_host = num_experts // hosts
    numbers = torch.arange(hosts, device=index.device)
    here = index[None] // per_host == numbers[:, None, None]  # [hosts, T, K]
    goes = here.any(2)
    counts = goes.sum(1)
    coming = exchange(counts, outer)
    input_splits, output_splits = torch.stack([counts, coming]).tolist()  # waits for the device
    host, token = torch.nonzero_static(goes, size=sum(input_splits)).unbind(1)
    local = torch.where(here, index[None] - per_host * numbers[:, None, None], per_host)[host, token]
    received_index = exchange(local, outer, output_splits, input_splits)
    wait = start_all_to_all(hidden[token], outer, output_splits, input_splits)
    wait_weights = start_all_to_all(weights[token], outer, output_splits, input_splits)
    meanwhile()
    received, received_weights = wait(), wait_weights()
    route = Route(outer, num_tokens, hosts, token * hosts + host, input_splits, output_splits)
    return received, received_index, received_weights, route


def combine(outputs: Tensor, route: Route) -> Tensor:
    """Bring the rows of a dispatch back and add up the copies of each token, in the order of K (of hosts). Differentiable.

    Args:
        outputs: [R, H], weighted, in the order in which dispatch brought the rows.
        route: of that dispatch.

    Returns:
        [T, H].
    """
    rows = all_to_all(outputs, route.group, route.input_splits, route.output_splits)
    copies = rows.new_zeros(route.num_tokens * route.top_k, rows.shape[1])
    copies = copies.index_put((route.order,), rows)  # keeps no rows for backward, as index_copy does
    return copies.unflatten(0, (route.num_tokens, route.top_k)).sum(1)  # in one order, as atomic additions are not


def split_experts(experts: Any, group: dist.ProcessGroup) -> None:
    """Let an experts module compute its own share of the experts, for the tokens of all ranks of a group, in place.

    The module keeps its class, its parameters and its computation, whichever implementation Transformers chose; only this
    instance's `forward` gets a dispatch before and a combine after. Its `num_experts` becomes the local number.

    The caller leaves this rank its part of each parameter along dim 0. Gradients of the parameters are then sums over what
    all ranks do with their outputs, where replicated data parallelism would make a mean of them.

    Args:
        experts: a module that `check_experts` accepts.
        group: of more than one rank.
    """
    num_experts = experts.num_experts
    experts.num_experts = num_experts // group.size()
    experts.forward = partial(expert_parallel_forward, experts.forward, num_experts, group)


def expert_parallel_forward(
    local_forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_experts: int,
    group: dist.ProcessGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    meanwhile: Callable[[], object] = _nothing,
) -> Tensor:
    """What a split experts module does: dispatch, its own forward, combine.

    Args:
        local_forward: the module's own forward, on rows with one local expert each.
        num_experts: of the whole group.
        group: its ranks.
        hidden_states, top_k_index, top_k_weights: [T, H], [T, K], [T, K], as the model calls it.
        meanwhile: is called while tokens travel.

    Returns:
        [T, H].
    """
    if isinstance(group, TwoLevelGroup):
        rows, index, weights, visit = dispatch_to_hosts(
            hidden_states, top_k_index, top_k_weights, num_experts, group.outer, meanwhile
        )
        sums = expert_parallel_forward(
            local_forward, num_experts // group.outer.size(), group.inner, rows, index, weights
        )
        return combine(sums, visit)
    rows, index, weights, route = dispatch(hidden_states, top_k_index, top_k_weights, num_experts, group, meanwhile)
    num_rows = len(rows)
    if num_rows == 0:  # backward must still pass here, to exchange gradients and to give the parameters zeros
        rows, index, weights = (
            torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])]) for tensor in (rows, index, weights)
        )
    return combine(local_forward(rows, index, weights)[:num_rows], route)


def compute_shared_experts_meanwhile(model: nn.Module, anatomy: Anatomy) -> None:
    """Let shared experts compute while tokens travel to the others, in place, where a model calls them behind those.

    Backward follows: that of the shared experts runs while the gradients of tokens travel back.

    Args:
        model: with split experts; nothing that comes later changes what its MoE modules are called with.
        anatomy: its roles.
    """
    for block in anatomy.blocks:
        for name in block.shared_experts:
            layer = next((mlp for mlp in block.mlp if name.startswith(f"{mlp}.")), None)
            experts = [model.get_submodule(other) for other in block.experts if layer and other.startswith(f"{layer}.")]
            shared: Any = model.get_submodule(name)
            takes_tokens_alone = len(inspect.signature(type(shared).forward).parameters) == 2  # self, tokens
            if layer is not None and len(experts) == 1 and takes_tokens_alone:
                ahead = SharedExperts(shared.forward)
                shared.forward = ahead
                mixture: Any = model.get_submodule(layer)
                mixture.forward = partial(ahead.call_layer, mixture.forward)  # recompute calls it too, but no hook
                whole: Any = experts[0]
                whole.forward = partial(whole.forward, meanwhile=ahead.compute)


class SharedExperts:
    """The forward of shared experts, that may be asked for before the model calls it."""

    def __init__(self, forward: Callable[[Tensor], Tensor]):
        self.forward = forward
        self.hidden: Tensor | None = None
        self.out: Tensor | None = None
        self.is_known = True
        """What the model calls shared experts with, as far as has been seen."""

    def call_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward of the layer; notes what its shared experts will be given, if they are given all of its input."""
        self.hidden, self.out = (args or tuple(kwargs.values()))[0], None
        return forward(*args, **kwargs)

    def compute(self) -> None:
        """Compute it now, unless they have been called already."""
        if self.hidden is not None and self.is_known:
            self.out = self.forward(self.hidden)

    def __call__(self, hidden: Tensor) -> Tensor:
        self.is_known, out = hidden is self.hidden, self.out
        self.hidden = self.out = None
        return out if self.is_known and out is not None else self.forward(hidden)


def mixture_of_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """The plain reference: sum over k of weights[t, k] experts[index[t, k]](hidden[t]) (Shazeer et al., 2017), one process.

    Args:
        hidden, index, weights: [T, H], [T, K], [T, K].
        experts: functions of rows, [rows, H] -> [rows, H].

    Returns:
        [T, H].
    """
    total = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token, slot = torch.where(index == number)
        total = total.index_add(0, token, expert(hidden[token]) * weights[token, slot, None])
    return total


def load_imbalance(loads: Tensor) -> float:
    """Tokens of the busiest expert over the mean: 1 is balanced, num_experts is all to one; 1 where no token came.

    Args:
        loads: [num_experts] int64, tokens for each expert of the whole group.
    """
    total = int(loads.sum())
    return int(loads.max()) * loads.numel() / total if total else 1.0


def check_experts(model: nn.Module, anatomy: Anatomy, ep: int) -> None:
    """Refuse expert parallelism where the model's experts cannot be split.

    Args:
        model: whole; the meta device is enough.
        anatomy: its roles.
        ep: ranks that share the experts of a layer; 1 is always fine.

    Raises:
        PlanError: the model has no experts; a module of experts is called in another way, counts its experts in another
            way, or has parameters that are not stacked by expert; or ep does not divide the number of experts.
    """
    names = [name for block in anatomy.blocks for name in block.experts]
    if ep > 1 and not names:
        raise PlanError(
            f"ep = {ep}, but no block of this {anatomy.family} has a module of experts",
            where="plan.parallel.ep",
            rule="expert parallelism shares the experts of Mixture-of-Experts blocks",
            fix="leave plan.parallel.ep at 1",
        )
    for name in names if ep > 1 else ():
        _check_module(name, model.get_submodule(name), ep)
    counts = {name: int(model.get_submodule(name).num_experts) for name in names} if ep > 1 else {}  # type: ignore[arg-type]
    for name, num_experts in counts.items():
        if num_experts % ep:
            common = math.gcd(ep, *counts.values())  # its divisors divide what ep divides, such as the ranks
            raise PlanError(
                f"ep = {ep} does not divide {num_experts} experts",
                where=f"plan.parallel.ep, {name}",
                rule="every rank holds the same number of whole experts",
                fix=f"set plan.parallel.ep to {one_of(divisors(common))}",
            )


def takes_indices(experts: nn.Module) -> bool:
    """Whether a module of experts is called with tokens, the experts of each, and their weights."""
    return tuple(inspect.signature(experts.forward).parameters) in SIGNATURES


def _check_module(name: str, experts: Any, ep: int) -> None:
    signature = tuple(inspect.signature(experts.forward).parameters)
    num_experts = getattr(experts, "num_experts", 0)
    others = [key for key, p in experts.named_parameters() if p.ndim < 2 or len(p) != num_experts]
    problem = ""
    if not takes_indices(experts):
        problem = f"is called with ({', '.join(signature)})"
    elif not num_experts:
        problem = "has no num_experts"
    elif others:
        problem = f"has a parameter that is not stacked by expert: {others[0]}"
    if problem:
        raise PlanError(
            f"ep = {ep}, but the experts of this model cannot be split: {type(experts).__name__} {problem}",
            where=f"plan.parallel.ep, {name}",
            rule=f"forward({', '.join(SIGNATURES[0])}), num_experts, and parameters [num_experts, ...]",
            fix="leave plan.parallel.ep at 1",
        )
