"""Plan of expert replicas that even out the load of ranks, for one micro-batch of one layer.

Every rank knows the number of copies of tokens of each rank for each expert, and finds the same plan, in integers. The fullest
rank gives a part of its largest expert to the emptiest rank that has a free slot, until no rank has more than tau times the
mean; the smallest tau of a ladder is taken for which the slots are enough. Nothing is dropped. A taker computes its own tokens
first, which then do not travel at all.

From DeepSeek's EPLB (DeepSeek-AI, 2025), which plans from past loads, and shares each expert equally among its replicas.
"""

import heapq
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LADDER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, math.inf)
"""Largest loads that are tried, relative to the mean."""
Integers = NDArray[np.int64]


class Replica(NamedTuple):
    """Expert that a rank computes beside its own ones."""

    expert: int
    rank: int
    copies: int
    """Copies of tokens that the rank computes."""


class Segments(NamedTuple):
    """Runs of rows, in order."""

    expert: Integers
    rank: Integers
    """Rank that computes, or rank of the tokens."""
    rows: Integers


def plan_replicas(load: Integers, ranks: int, slots: int) -> list[Replica]:
    """Replicas that even out the load of ranks, the same on every rank.

    Args:
        load: [experts] copies of tokens for each expert; expert e is on rank e // (experts / ranks).
        ranks: ranks of the expert-parallel group.
        slots: most experts of others that a rank computes.

    Returns:
        Replicas in the order of experts, then ranks.
    """
    for tau in LADDER:
        found = _fill(
            load.tolist(), ranks, slots, max(math.ceil(load.sum() * tau / ranks), 1) if tau < math.inf else None
        )
        if found is not None:
            return sorted(Replica(expert, rank, copies) for (expert, rank), copies in found.items())
    raise AssertionError("a plan without replicas is always possible")


def _fill(left: list[int], ranks: int, slots: int, cap: int | None) -> dict[tuple[int, int], int] | None:
    """Copies by (expert, rank) of the replicas with which no rank has more than `cap` rows; None if slots are missing."""
    moved: dict[tuple[int, int], int] = defaultdict(int)
    if cap is None:
        return moved
    per_rank = len(left) // ranks
    held = [sum(left[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]
    free, holders = [slots] * ranks, defaultdict[int, list[int]](list)
    givers = [(-rows, rank) for rank, rows in enumerate(held) if rows > cap]
    takers = [(rows - cap, rank) for rank, rows in enumerate(held) if rows < cap and slots]
    heapq.heapify(givers)
    heapq.heapify(takers)
    while givers:
        giver = givers[0][1]
        excess = held[giver] - cap
        expert = max(range(giver * per_rank, (giver + 1) * per_rank), key=left.__getitem__)
        # A rank that has the expert already costs no slot.
        taker = max(
            (rank for rank in holders[expert] if held[rank] < cap), key=lambda rank: cap - held[rank], default=-1
        )
        if taker < 0 or cap - held[taker] < excess:
            while takers and (not free[takers[0][1]] or takers[0][0] != held[takers[0][1]] - cap):
                _, rank = heapq.heappop(takers)  # no slot, or an outdated entry
                if free[rank] and held[rank] < cap:
                    heapq.heappush(takers, (held[rank] - cap, rank))
            if takers:
                taker = takers[0][1]
        if taker < 0 or not left[expert]:
            return None
        if (expert, taker) not in moved:
            free[taker] -= 1
            holders[expert].append(taker)
        copies = min(excess, cap - held[taker], left[expert])
        moved[expert, taker] += copies
        left[expert] -= copies
        held[giver] -= copies
        held[taker] += copies
        if held[giver] > cap:
            heapq.heapreplace(givers, (-held[giver], giver))
        else:
            heapq.heappop(givers)
    return moved


def shares(counts: Integers, replicas: list[Replica]) -> dict[int, Integers]:
    """Copies of each rank's tokens that each rank computes, for the experts with replicas.

    Args:
        counts: [ranks, experts] copies of tokens of each rank for each expert.
        replicas: result of `plan_replicas`.

    Returns:
        By expert, [ranks of the tokens, ranks that compute]: a rank computes its own tokens first, then those of ranks in
        order.
    """
    ranks, experts = counts.shape
    computed: dict[int, Integers] = {}
    for replica in replicas:
        quota = computed.setdefault(replica.expert, np.zeros(ranks, np.int64))
        quota[replica.rank] += replica.copies
    found = {}
    for expert, quota in computed.items():
        quota[expert // (experts // ranks)] += counts[:, expert].sum() - quota.sum()
        own = np.minimum(quota, counts[:, expert])
        give, need = counts[:, expert] - own, quota - own
        # Tokens in the order of their ranks, computed in the order of ranks: the overlap of two divisions of one line.
        give_ends, need_ends = give.cumsum(), need.cumsum()
        begins = np.maximum((give_ends - give)[:, None], (need_ends - need)[None])
        found[expert] = np.maximum(np.minimum(give_ends[:, None], need_ends[None]) - begins, 0) + np.diag(own)
    return found


def rows_to_send(counts: Integers, shared: dict[int, Integers], rank: int) -> Segments:
    """Runs of the copies of tokens of a rank, in the order of experts: the ranks that compute them."""
    ranks, experts = counts.shape
    expert, computing = np.arange(experts), np.arange(experts) // (experts // ranks)
    rows = counts[rank].copy()
    rows[list(shared)] = 0
    extra = [(e, r, share[rank, r]) for e, share in shared.items() for r in np.flatnonzero(share[rank])]
    more = np.array(extra, np.int64).reshape(-1, 3)
    order = np.lexsort((np.concatenate([computing, more[:, 1]]), np.concatenate([expert, more[:, 0]])))
    parts = zip((expert, computing, rows), more.T, strict=True)
    return Segments(*(np.concatenate(part)[order] for part in parts))


def rows_to_receive(counts: Integers, shared: dict[int, Integers], rank: int) -> Segments:
    """Runs of the rows that a rank computes, in the order of the ranks of their tokens, then of experts."""
    ranks, experts = counts.shape
    per_rank = experts // ranks
    own = range(rank * per_rank, (rank + 1) * per_rank)
    columns = {expert: counts[:, expert] for expert in own if expert not in shared}
    columns |= {expert: share[:, rank] for expert, share in shared.items() if share[:, rank].any() or expert in own}
    chosen = sorted(columns)
    rows = np.stack([columns[expert] for expert in chosen], 1)  # [ranks, chosen experts]
    return Segments(np.tile(chosen, ranks), np.repeat(np.arange(ranks), len(chosen)), rows.flatten())
