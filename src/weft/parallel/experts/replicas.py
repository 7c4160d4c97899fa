"""Expert parallelism in which ranks compute replicas of the hot experts of others, so that all ranks compute equally much.

    counts      all-gather of int64     copies of each rank's tokens for each expert; every rank makes the same plan from them
    weights     all-to-all              weights of the replicated experts, from their home to the ranks that compute them
    dispatch    all-to-all of rows      as in `dispatch.py`, to the rank that the plan names
    combine     all-to-all of rows

In backward the gradients of replicas return to the home of their expert and are added to its gradient there: parameters,
optimizer and checkpoints know nothing of replicas. A replica lives as long as its micro-batch. The products of an expert do not
depend on where they are computed; the sum of the gradients of its weights is rounded in another order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import gather_dim, start_all_to_all
from weft.compute.experts import permute
from weft.parallel.experts.balance import Replica, plan_replicas, rows_to_receive, rows_to_send, shares
from weft.parallel.experts.dispatch import Channel, Route, combine, place_copies, sort_copies
from weft.parallel.experts.path import Part


class OverReplicas:
    """Each copy of a token to the rank that a plan names, and weights of hot experts to their replicas; see `Exchange`."""

    def __init__(self, experts: Any, channel: Channel, slots: int):
        """
        Args:
            experts: experts module, with the parameters of this rank.
            channel: channel of the expert-parallel group.
            slots: most experts of other ranks that a rank computes in a layer.
        """
        self.experts, self.num_experts, self.channel, self.slots = experts, experts.num_experts, channel, slots

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        channel, num_experts = self.channel, self.num_experts
        ranks, rank, device = channel.group.size(), channel.group.rank(), hidden.device
        own = num_experts // ranks
        order, counts = sort_copies(index, num_experts)
        # The only device synchronisation of a layer.
        all_counts = gather_dim(counts, channel.counts_group or channel.group, 0).view(ranks, -1).cpu().numpy()
        replicas = plan_replicas(all_counts.sum(0), ranks, self.slots)
        wait_for_weights = start_weights(self.experts, replicas, num_experts, channel) if replicas else None
        shared = shares(all_counts, replicas)
        sent, received = rows_to_send(all_counts, shared, rank), rows_to_receive(all_counts, shared, rank)
        input_splits = torch.zeros(ranks, dtype=torch.int64).index_add(
            0, *map(torch.from_numpy, (sent.rank, sent.rows))
        )
        num_sent = int(input_splits.sum())
        computing = _repeat(sent.rank, sent.rows, device)
        order = torch.cat([order[:num_sent][computing.argsort(stable=True)], order[num_sent:]])
        output_splits = received.rows.reshape(ranks, -1).sum(1).tolist()
        splits = output_splits, input_splits.tolist()
        wait_for_router = channel.start_weights(weights, order[:num_sent], *splits)
        places = place_copies(order, index.shape[1], num_sent)
        wait = channel.start(permute(hidden, order[:num_sent], *places), *splits)
        meanwhile()
        rows, router_weights = wait(), wait_for_router()
        route = Route(channel, order, *places, splits[1], output_splits, router_weights)
        mine = [replica.expert for replica in replicas if replica.rank == rank]
        is_home = received.expert // own == rank
        local = np.where(is_home, received.expert - own * rank, own + np.searchsorted(mine, received.expert))
        local_index = _repeat(local, received.rows, device)[:, None]
        num_home = int(received.rows[is_home].sum())
        by_home = (local_index[:, 0] >= own).argsort(stable=True) if num_home < len(rows) else None
        if by_home is not None:
            rows, local_index = rows[by_home], local_index[by_home]
        parts = [Part(rows[:num_home], local_index[:num_home])]
        if wait_for_weights is not None:
            # Replicas run before the own experts, so that in backward their gradients are sent last.
            of_replicas = {name: _pad(weight, self.slots) for name, weight in wait_for_weights().items()}
            parts.insert(0, Part(rows[num_home:], local_index[num_home:] - own, of_replicas))

        def bring_back(outputs: list[Tensor]) -> Tensor:
            results = torch.cat(outputs[::-1])
            if by_home is not None:
                back = torch.empty_like(by_home)
                back[by_home] = torch.arange(len(by_home), device=device)
                results = results[back]
            return combine(results, weights, route)

        return parts, bring_back


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


def _pad(weight: Tensor, slots: int) -> Tensor:
    """Weights of replicas, [slots, ...]; slots without a replica have weights of zero."""
    return F.pad(weight, (0, 0) * (weight.ndim - 1) + (0, slots - len(weight)))


def _repeat(values: Any, counts: Any, device: torch.device) -> Tensor:
    """Values, each repeated by its count, on the device, without a wait."""
    size = int(counts.sum())
    on_device = (torch.from_numpy(array).to(device, non_blocking=True) for array in (values, counts))
    return torch.repeat_interleave(*on_device, output_size=size)
