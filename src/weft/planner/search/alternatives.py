"""Alternatives to a layout: the best with another value of one setting, and the reason why it was not chosen."""

import math
from collections import defaultdict
from typing import NamedTuple

from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.search.options import Setting, Value
from weft.planner.search.space import Choice, Space, degrees_of

EQUAL = 0.03  # relative difference below which two predicted step times count as equal (`benchmarks/published`)


class Alternative(NamedTuple):
    """Alternative value of one setting, and the best layout with it; None if no such layout fits."""

    setting: str
    value: Value
    choice: Choice | None
    least_memory: float
    """Minimum bytes of the layouts with this value if none fits; 0: not computed, because the states alone are too large."""


def sensitivity(space: Space, best: Choice) -> list[Alternative]:
    """Best layouts with other values of each setting: the two below and the two above the value of `best`."""
    chosen = dict(degrees_of(best.layout).settings)
    values: dict[str, set[Value]] = defaultdict(set)
    for _, degrees in space.bounds:
        for name, value in degrees.settings:
            values[name].add(value)
    found: dict[Setting, Choice | None] = {
        (name, value): None for name in chosen for value in _neighbours(values[name], chosen[name])
    }
    needs: dict[Setting, float] = {}
    for bound, degrees in space.bounds:
        settings = [setting for setting in degrees.settings if setting in found]
        limits = {
            setting: math.inf if (known := found[setting]) is None else known.time.seconds for setting in settings
        }
        if not limits or bound >= max(limits.values()):
            continue
        choice, least_peak = space.fastest(degrees, max(limits.values()))
        for setting, limit in limits.items():
            if choice is None and least_peak:
                needs[setting] = min(needs.get(setting, math.inf), least_peak)
            elif choice is not None and choice.time.seconds < limit:
                found[setting] = choice
    return [
        Alternative(name, value, choice, 0.0 if choice else needs.get((name, value), 0.0))
        for (name, value), choice in found.items()
    ]


def _neighbours(values: set[Value], chosen: Value) -> list[Value]:
    """Two values below and two above the chosen one; for schedules all others."""
    ordered = sorted(values, key=str if isinstance(chosen, tuple) else None)
    index = ordered.index(chosen)
    if isinstance(chosen, tuple):
        return ordered[:index] + ordered[index + 1 :]
    return ordered[max(0, index - 2) : index] + ordered[index + 1 : index + 3]


def reason(alternative: Alternative, best: Choice, cluster: ClusterSpec) -> str:
    """Explain in one line why another value was not chosen: equal, slower (by how much and in which term), or does not fit."""
    name = setting_in_words(alternative.setting, alternative.value)
    if alternative.choice is None:
        if alternative.least_memory:
            have = cluster.device.memory / GIB
            return f"{name}: does not fit, needs at least {alternative.least_memory / GIB:,.0f} GiB of {have:,.0f} GiB"
        return f"{name}: does not fit, model states alone are too large"
    other, mine = alternative.choice.time, best.time
    slower = other.seconds / mine.seconds - 1
    if abs(slower) < EQUAL:
        return f"{name}: equal ({slower:+.1%})"
    terms = {term: getattr(other, term) - getattr(mine, term) for term in vars(mine)}
    worst = max(terms, key=lambda term: terms[term])
    if terms[worst] <= 0:
        return f"{name}: {slower:+.1%}"
    crossing = _host_crossing(worst, alternative.choice.layout, cluster)
    return f"{name}: {slower:+.1%}, {TERMS[worst]} {terms[worst]:+.3g} s{crossing}"


def setting_in_words(setting: str, value: Value) -> str:
    """Setting and value as text for the user."""
    if isinstance(value, tuple):
        return f"schedule {value[0]}" + (f", {value[1]} stages per rank" if value[1] > 1 else "")
    if setting == "shard":
        return f"states sharded over {value} ranks" if value else "states sharded over all data ranks"
    return f"{setting} {value}"


TERMS = {
    "compute": "computation",
    "tp": "tp communication",
    "cp": "cp communication",
    "ep": "ep communication",
    "zero": "ZeRO 3 communication",
    "pipeline": "bubble and pp communication",
    "gradients": "gradient reduction",
    "optimizer": "optimizer update",
}


def _host_crossing(term: str, layout: TrainingLayout, cluster: ClusterSpec) -> str:
    """Note for a term whose process groups cross hosts; empty otherwise."""
    reach = {"tp": layout.tp, "cp": layout.tp * layout.cp, "ep": layout.ep}.get(term, 0)
    return f", crosses hosts of {cluster.per_host} devices" if reach > cluster.per_host else ""
