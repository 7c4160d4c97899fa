"""Capacity of experts: copies of tokens beyond it are dropped (Lepikhin et al., GShard, 2020; MindSpore).

An expert computes at most capacity x T K / experts copies of the T tokens that a rank has in a micro-batch, K for each token. A
dropped copy contributes nothing to its token, and gets no gradient. Loads are bounded, but results depend on the layout, and
the loss is that of another model: Weft does not drop by default.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.errors import Refusal
from weft.parallel.experts.checks import takes_indices

if TYPE_CHECKING:
    from weft.parallel.build import Build


def capacity_limit(
    num_experts: int, capacity: float, drop: str, is_split: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Function that drops the copies beyond the capacity of each expert, for `ExpertPath.limit`.

    Args:
        num_experts: number of experts of all ranks.
        capacity: copies of an expert relative to an even load, 1 or more.
        drop: "probs" drops the copies with the smallest router weights, "position" the last tokens.
        is_split: True if expert parallelism follows, which does not send dropped copies.

    Returns:
        Function of the experts and router weights of tokens, [T, K] each, that returns both without the dropped copies.
    """

    @torch.compiler.disable
    def limit(index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        kept = kept_copies(index, weights.detach(), num_experts, capacity, drop)
        return torch.where(kept, index, num_experts) if is_split else index, weights * kept

    return limit


def reason_against_capacity(model: nn.Module, anatomy: Anatomy, capacity: float) -> Refusal | None:
    """Reason against a capacity: there are no experts, or they take other arguments than tokens and their choices."""
    names = [name for block in anatomy.blocks for name in block.experts]
    unknown = next((name for name in names if not takes_indices(model.get_submodule(name))), None)
    if not capacity or (names and not unknown):
        return None
    return Refusal(
        f"expert_capacity = {capacity} for {anatomy.family}",
        where=f"plan.parallel.expert_capacity{f', {unknown}' if unknown else ''}",
        rule="a capacity limits experts that are called with tokens, expert indices and router weights",
        fix="leave plan.parallel.expert_capacity at 0",
    )


def kept_copies(index: Tensor, weights: Tensor, num_experts: int, capacity: float, drop: str) -> Tensor:
    """Copies within the capacity of their expert.

    Args:
        index, weights: [T, K], experts and router weights of each token.
        num_experts: number of experts.
        capacity, drop: see `capacity_limit`.

    Returns:
        [T, K] bool.
    """
    most = math.ceil(capacity * index.numel() / num_experts)
    copies = torch.arange(index.numel(), device=index.device)
    if drop == "probs":
        copies = weights.flatten().argsort(descending=True, stable=True)
    experts, order = index.flatten()[copies].sort(stable=True)
    first = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=experts.dtype, device=index.device))
    place = torch.arange(len(experts), device=index.device) - first[experts.clamp(max=num_experts)]
    kept = torch.empty(index.numel(), dtype=torch.bool, device=index.device)
    kept[copies[order]] = place < most
    return kept.view(index.shape)


def limit_experts(build: "Build") -> None:
    """Step of `parallelize`: drop copies of tokens beyond the capacity of experts."""
    build.begin("limit_experts", "replace_operators")
    p = build.plan.parallel
    for path in build.runtime.experts.values() if p.expert_capacity else ():
        path.limit = capacity_limit(path.experts.num_experts, p.expert_capacity, p.expert_drop, p.ep > 1)
