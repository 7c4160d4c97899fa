"""Pairs of hosts with slow links, from the rates that a run has measured (`weft.comm.link_probe`)."""

from collections.abc import Collection, Sequence
from statistics import median

import numpy as np

from weft.comm.link_probe import Rates
from weft.observe.rank_timeline import Phase, Timeline
from weft.topology.topology import format_rate

SLOW = 0.5  # rate of a slow link over its rate before, or over that of the other links
Pair = tuple[int, int]


def slow_pairs(timeline: Timeline, phase: Phase) -> dict[Pair, str]:
    """Pairs of hosts whose links have a fraction of their rate before a phase, with the evidence.

    Pairs that lost little beside the one that lost most are left out: the machine may be busier than before.
    """
    start = timeline.steps[phase.start]
    end = timeline.steps[phase.end] if phase.end < len(timeline.steps) else timeline.last + 1
    before = [pair_rates(line.rates) for line in timeline.links if line.after < start]
    inside = [pair_rates(line.rates) for line in timeline.links if start <= line.after < end]
    if not before or not inside:
        return {}
    # A measurement is disturbed downwards, when a rank is descheduled: before, the upper quartile counts, now the best.
    old = {pair: float(np.percentile([rates[pair] for rates in before], 75)) for pair in before[0]}
    new = {pair: max(rates[pair] for rates in inside) for pair in old}
    lowest, found = min(new[pair] / old[pair] for pair in new), {}
    for pair, rate in new.items():
        loss = rate / old[pair]
        if loss < SLOW and loss**2 < lowest:  # on a scale of factors nearer to the slowest pair than to no loss
            text = f"{format_rate(rate)} measured since step {start}, {format_rate(old[pair])} before"
            found[pair] = f"link host {pair[0]} - host {pair[1]}: {text}"
    return found


def pairs_below_others(measured: Sequence[dict[Pair, float]]) -> dict[Pair, str]:
    """Pairs of hosts whose links never reached a fraction of the lowest rate of the usual pair, with the evidence."""
    rates = {pair: max(one[pair] for one in measured) for pair in measured[0]}
    usual = median(min(one[pair] for one in measured) for pair in measured[0])
    return {
        (a, b): f"link host {a} - host {b}: {format_rate(rate)}, others {format_rate(usual)}"
        for (a, b), rate in rates.items()
        if rate < SLOW * usual
    }


def pair_rates(rates: Rates) -> dict[Pair, float]:
    """Rate of the slower direction of each measured pair, in bytes/s."""
    pairs = {}
    for a in range(len(rates)):
        for b in range(a):
            one, other = rates[a][b], rates[b][a]
            if one is not None and other is not None:
                pairs[b, a] = min(one, other)
    return pairs


def ends_of(pairs: Collection[Pair]) -> tuple[int, ...]:
    """The one host that several slow pairs share; else all hosts of the pairs."""
    shared = set.intersection(*(set(pair) for pair in pairs))
    return tuple(sorted(shared if len(pairs) > 1 and shared else {host for pair in pairs for host in pair}))
