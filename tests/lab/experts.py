"""Experts modules with one technique applied alone, and the reference of a Mixture-of-Experts layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.parallel.experts.dispatch import Channel, exchange_of
from weft.parallel.experts.homes import ExpertHomes
from weft.parallel.experts.late_gradients import late_linear
from weft.parallel.experts.path import ExpertPath
from weft.parallel.experts.replicas import OverReplicas


def split_experts(
    experts: Any,
    channels: tuple[Channel, ...],
    is_late: bool = False,
    homes: ExpertHomes | None = None,
    limit: Any = None,
) -> ExpertPath:
    """Apply expert parallelism to an experts module, whose parameters the caller has split, in place."""
    path = ExpertPath(experts, limit=limit, homes=homes, exchange=exchange_of(experts.num_experts, channels))
    path.linear = late_linear if is_late else None
    path.attach()
    return path


def balance_experts(
    experts: Any, channel: Channel, slots: int, homes: ExpertHomes | None = None, limit: Any = None
) -> ExpertPath:
    """The same with replicas of hot experts, at most `slots` on each rank."""
    path = ExpertPath(experts, limit=limit, homes=homes, exchange=OverReplicas(experts, channel, slots))
    path.attach()
    return path


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
