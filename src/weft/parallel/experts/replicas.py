"""Expert parallelism in which ranks compute replicas of the hot experts of others, so that all ranks compute equally much.

    counts      all-gather of int64     copies of each rank's tokens for each expert; every rank makes the same plan from them
    weights     all-to-all              weights of the replicated experts, from their home to the ranks that compute them
    dispatch    all-to-all of rows      as in `expert.py`, to the rank that the plan names
    combine     all-to-all of rows

In backward the gradients of replicas return to the home of their expert and are added to its gradient there: parameters,
optimizer and checkpoints know nothing of replicas. A replica lives as long as its micro-batch. The products of an expert do not
depend on where they are computed; the sum of the gradients of its weights is rounded in another order.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import gather_dim, start_all_to_all
from weft.parallel.experts.balance import Replica, plan_replicas, rows_to_receive, rows_to_send, shares
from weft.parallel.experts.dispatch import Channel, Route, combine, sort_copies
from weft.parallel.experts.expert import Forward, local_forward_of, run_experts
from weft.parallel.experts.homes import ExpertHomes


def split_and_balance_experts(
    experts: Any,
    channel: Channel,
    slots: int,
    compute: Callable[..., Tensor] | None = None,
    is_late: bool = False,
    homes: ExpertHomes | None = None,
) -> None:
    """Apply expert parallelism with replicas to an experts module, in place; otherwise like `split_experts`.

    Args:
        experts: module accepted by `check_experts`, whose forward is that of its class.
        channel: channel of the expert-parallel group.
        slots: most experts of other ranks that a rank computes in a layer.
        compute: forward of replicas, called with a module and its arguments; None for that of the class.
        is_late: as for `split_experts`; gradients of replicas are not late, because they are sent first.
        homes: homes of the experts, if they are relocated.
    """
    num_experts = experts.num_experts
    experts.num_experts = num_experts // channel.group.size()
    prepare, of_replicas, replicas = local_forward_of(experts, is_late), compute or type(experts).forward, copy(experts)

    @torch.compiler.disable
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
        arguments = hidden_states, homes.slots(top_k_index) if homes else top_k_index, top_k_weights
        return balanced_forward(
            experts, prepare, of_replicas, replicas, num_experts, slots, channel, *arguments, **kwargs
        )

    experts.forward = forward


def balanced_forward(
    experts: Any,
    prepare: Callable[[], Forward],
    of_replicas: Callable[..., Tensor],
    replica_module: Any,
    num_experts: int,
    slots: int,
    channel: Channel,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    overlapped: Callable[[], object] = lambda: None,
) -> Tensor:
    """Forward of an expert-parallel module with replicas.

    Args:
        experts: the module.
        of_replicas: forward of replicas, called with a module and its arguments.
        replica_module: copy of the module, whose weights are those of the replicas while it runs.
        slots: most replicas of a rank.
        prepare, num_experts, hidden_states, top_k_index, top_k_weights, overlapped: as for `expert_parallel_forward`.
        channel: channel of the group.

    Returns:
        [T, H].
    """
    ranks, rank, device = channel.group.size(), channel.group.rank(), hidden_states.device
    own, top_k = num_experts // ranks, top_k_index.shape[1]
    order, counts = sort_copies(top_k_index, num_experts)
    # The only device synchronisation of a layer.
    all_counts = gather_dim(counts, channel.counts_group or channel.group, 0).view(ranks, -1).cpu().numpy()
    replicas = plan_replicas(all_counts.sum(0), ranks, slots)
    wait_for_weights = start_weights(experts, replicas, num_experts, channel) if replicas else None
    shared = shares(all_counts, replicas)
    sent, received = rows_to_send(all_counts, shared, rank), rows_to_receive(all_counts, shared, rank)
    input_splits = torch.zeros(ranks, dtype=torch.int64).index_add(0, *map(torch.from_numpy, (sent.rank, sent.rows)))
    num_sent = int(input_splits.sum())
    computing = _repeat(sent.rank, sent.rows, device)
    order = torch.cat([order[:num_sent][computing.argsort(stable=True)], order[num_sent:]])
    output_splits = received.rows.reshape(ranks, -1).sum(1).tolist()
    splits = output_splits, input_splits.tolist()
    wait_for_router = channel.start_weights(top_k_weights, order[:num_sent], *splits)
    wait = channel.start(hidden_states[order[:num_sent] // top_k], *splits)
    overlapped()
    local_forward = prepare()
    rows, router_weights = wait(), wait_for_router()
    mine = [replica.expert for replica in replicas if replica.rank == rank]
    is_home = received.expert // own == rank
    local = np.where(is_home, received.expert - own * rank, own + np.searchsorted(mine, received.expert))
    local_index = _repeat(local, received.rows, device)[:, None]
    num_home = int(received.rows[is_home].sum())
    has_replica_rows = num_home < len(rows)
    by_home = (local_index[:, 0] >= own).argsort(stable=True) if has_replica_rows else None
    if by_home is not None:
        rows, local_index = rows[by_home], local_index[by_home]
    outputs = []
    # Replicas run before the own experts, so that in backward their gradients are sent last.
    if wait_for_weights is not None:
        replica_forward = _with_weights(of_replicas, replica_module, experts, wait_for_weights(), slots)
        outputs.append(run_experts(replica_forward, rows[num_home:], local_index[num_home:] - own))
        vars(replica_module)["_parameters"] = {}  # autograd keeps what backward needs
    results = torch.cat([run_experts(local_forward, rows[:num_home], local_index[:num_home]), *outputs])
    if by_home is not None:
        back = torch.empty_like(by_home)
        back[by_home] = torch.arange(len(by_home), device=device)
        results = results[back]
    route = Route(channel, order, top_k, input_splits.tolist(), output_splits, router_weights)
    return combine(results, top_k_weights, route).to(hidden_states.dtype)


def start_weights(
    experts: Any, replicas: list[Replica], num_experts: int, channel: Channel
) -> Callable[[], dict[str, Tensor]]:
    """Start to send the weights of replicated experts; returns a function that waits for those of this rank's replicas.

    Lanes do not hand over in this wait: other expert-parallel groups may have no replicas in this layer.
    """
    ranks, rank = channel.group.size(), channel.group.rank()
    own = num_experts // ranks
    outgoing = sorted((replica.rank, replica.expert) for replica in replicas if replica.expert // own == rank)
    incoming = [replica.expert // own for replica in replicas if replica.rank == rank]
    parameters = {name: parameter for name, parameter in experts._parameters.items() if parameter is not None}
    first = next(iter(parameters.values()))
    chosen = torch.tensor([expert - own * rank for _, expert in outgoing], dtype=torch.int64, device=first.device)
    rows = torch.cat([parameter.index_select(0, chosen).flatten(1) for parameter in parameters.values()], 1)
    input_splits = [sum(to == other for to, _ in outgoing) for other in range(ranks)]
    output_splits = [incoming.count(other) for other in range(ranks)]
    wait = start_all_to_all(rows, channel.group, output_splits, input_splits)

    def finish() -> dict[str, Tensor]:
        parts = wait().split([parameter[0].numel() for parameter in parameters.values()], 1)
        return {
            name: part.view(-1, *parameter.shape[1:]).to(parameter.dtype)
            for part, (name, parameter) in zip(parts, parameters.items(), strict=True)
        }

    return finish


def _with_weights(
    forward: Callable[..., Tensor], replicas: Any, experts: Any, weights: dict[str, Tensor], slots: int
) -> Forward:
    """Forward of an experts module with other experts; slots without a replica have weights of zero."""
    padded = {
        name: F.pad(weight, (0, 0) * (weight.ndim - 1) + (0, slots - len(weight))) for name, weight in weights.items()
    }
    vars(replicas).update({**vars(experts), "_parameters": padded, "num_experts": slots})
    return lambda *args: forward(replicas, *args)


def _repeat(values: Any, counts: Any, device: torch.device) -> Tensor:
    """Values, each repeated by its count, on the device, without a wait."""
    size = int(counts.sum())
    on_device = (torch.from_numpy(array).to(device, non_blocking=True) for array in (values, counts))
    return torch.repeat_interleave(*on_device, output_size=size)
