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

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.errors import PlanError
from weft.parallel.experts.dispatch import Channel, combine, dispatch, dispatch_to_hosts
from weft.parallel.experts.homes import ExpertHomes
from weft.parallel.experts.late_gradients import prepare_experts
from weft.parallel.tensor.checks import divisors, one_of

# Arguments of the experts modules of Transformers 5.17 to 5.23; the second names are those of GPT-OSS.
SIGNATURES = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Forward of an experts module: of rows or tokens, expert indices and router weights."""


def _no_op() -> None: ...


def run_experts(forward: Forward, rows: Tensor, index: Tensor) -> Tensor:
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


def split_experts(
    experts: Any, channels: tuple[Channel, ...], is_late: bool = False, homes: ExpertHomes | None = None
) -> None:
    """Apply expert parallelism to an experts module, in place.

    The module keeps its class, its parameters and the implementation that Transformers chose; its `forward` is wrapped with
    dispatch and combine. Its `num_experts` becomes the number of local experts.

    The caller shards each parameter along dim 0. Gradients of the parameters are sums, not means, over the tokens of all ranks
    of the groups.

    Args:
        experts: module accepted by `check_experts`.
        channels: channel of the expert-parallel group, or the channel between hosts and the one inside of a host
            (`experts/groups.py`).
        is_late: True for experts of `weft.parallel.experts.late_gradients.find_late`.
        homes: homes of the experts, if they are relocated.
    """
    num_experts = experts.num_experts
    experts.num_experts = num_experts // math.prod(channel.group.size() for channel in channels)
    if len(channels) == 2 and hasattr(experts, "_is_expert_parallel"):
        experts._is_expert_parallel = True  # some copies are for experts of other hosts, which Transformers then masks
    prepare = local_forward_of(experts, is_late)

    # A function, because torch.compile would compile each block anew for a `partial`; it cannot compile messages.
    @torch.compiler.disable
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
        index = homes.slots(top_k_index) if homes else top_k_index
        return expert_parallel_forward(prepare, num_experts, channels, hidden_states, index, top_k_weights, **kwargs)

    experts.forward = forward


def local_forward_of(experts: Any, is_late: bool) -> Callable[[], Forward]:
    """Function that returns the forward of the local experts, while the rows of dispatch are in flight."""
    forward: Forward = experts.forward
    return partial(prepare_experts, experts, forward) if is_late else lambda: forward


def expert_parallel_forward(
    prepare: Callable[[], Forward],
    num_experts: int,
    channels: tuple[Channel, ...],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    overlapped: Callable[[], object] = _no_op,
) -> Tensor:
    """Forward of an expert-parallel module: dispatch, local forward, combine.

    Args:
        prepare: called while the all-to-all of dispatch is in flight. Returns the original forward of the module, which is
            called on rows with one local expert each.
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
        sums = expert_parallel_forward(prepare, per_host, tuple(inside), rows, index, weights)
        return combine(sums, None, route)
    prepared: list[Forward] = []

    def while_rows_travel() -> None:
        overlapped()
        prepared.append(prepare())

    rows, index, route = dispatch(hidden_states, top_k_index, top_k_weights, num_experts, channel, while_rows_travel)
    outputs = run_experts(prepared.pop(), rows, index)
    return combine(outputs, top_k_weights, route).to(hidden_states.dtype)


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
