"""Homes of experts: the rank, and the slot on it, that holds each expert of an expert-parallel layer.

At first expert e is in slot e, and rank r has the slots r E / ep to (r + 1) E / ep. Where a skew lasts, experts of the fullest
rank are exchanged with experts of others, one pair after the other, until the load of ranks is nearly even. Every rank has as
many experts as before, and most experts stay where they are.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CLOSE = 1.02
"""Load of the fullest rank, relative to the mean, below which no further pair is exchanged."""
SMALLEST_GAIN = 0.05
"""Smallest reduction of the load of the fullest rank for which experts are moved."""
Integers = NDArray[np.int64]


class ExpertHomes:
    """Experts in the slots of one layer; the same on all ranks."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.table: Tensor | None = None
        """[num_experts + 1] int64: slot of each expert; the last entry is for copies that are not sent. None: slot = expert."""
        self.expert_of: list[int] = list(range(num_experts))
        """Expert in each slot."""

    def set(self, expert_of: list[int], device: torch.device) -> None:
        """Change the experts in the slots, a permutation; `device` is that of the router."""
        self.expert_of, self.table = expert_of, None
        if expert_of != sorted(expert_of):
            slots = torch.tensor([*expert_of, self.num_experts]).argsort()
            self.table = slots.to(device)

    def slots(self, index: Tensor) -> Tensor:
        """Slots of experts, of any shape; an index `num_experts` stays."""
        return index if self.table is None else self.table[index]

    def reorder(self, tensor: Tensor, by_slot: bool) -> Tensor:
        """Reorder the rows of a full weight from the order of experts to that of slots, or back."""
        order = torch.tensor(self.expert_of, device=tensor.device)
        return tensor[order if by_slot else order.argsort()]


def load_of_ranks(load: Integers, expert_of: Integers, ranks: int) -> Integers:
    """Load of each rank, from the load of each expert."""
    return load[expert_of].reshape(ranks, -1).sum(1)


def plan_homes(load: Integers, expert_of: Integers, ranks: int) -> Integers:
    """Experts in the slots that even out the load of ranks, the same on every rank.

    Args:
        load: [experts] copies of tokens for each expert.
        expert_of: [experts] expert in each slot; a permutation.
        ranks: ranks of the expert-parallel group, which divide the number of experts.

    Returns:
        New `expert_of`. An expert that stays on its rank keeps its slot. The same as before if the fullest rank would not have
        at least 5 % less load.
    """
    own = len(load) // ranks
    rank_of = np.empty_like(expert_of)
    rank_of[expert_of] = before = np.arange(len(load)) // own
    held = load_of_ranks(load, expert_of, ranks)
    first = held.max()
    while held.max() * ranks > CLOSE * load.sum():
        fullest = held.argmax()
        gives, takes = np.flatnonzero(rank_of == fullest), np.flatnonzero(rank_of != fullest)
        leaving = load[gives][:, None] - load[takes]
        larger = np.maximum(held[fullest] - leaving, held[rank_of[takes]] + leaving)
        give, take = divmod(int(larger.argmin()), len(takes))
        if larger[give, take] >= held[fullest]:
            break
        taker = rank_of[takes[take]]
        held[[fullest, taker]] += leaving[give, take] * np.array([-1, 1])
        rank_of[gives[give]], rank_of[takes[take]] = taker, fullest
    if held.max() > (1 - SMALLEST_GAIN) * first:
        return expert_of
    moves = rank_of[expert_of] != before  # by slot
    moving = np.sort(expert_of[moves])
    found = expert_of.copy()
    found[moves] = moving[rank_of[moving].argsort(kind="stable")]  # slots are in the order of ranks
    return found
