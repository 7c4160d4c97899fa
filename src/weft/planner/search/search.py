"""Exhaustive search for the fastest layout that fits, over all degrees, memory options and the schedules of `space.py`.

Branch and bound keeps the search fast: a lower bound of the step time is the time of the layers plus the bubble, and the layer
time is shared by all layouts with the same tp, cp, ep and micro-batch. Candidates are visited in the order of that bound, and
the list of the best is complete when the next bound exceeds its last entry. A second pass finds the best layout with each
neighbouring value of each setting, to explain why that value was not chosen.
"""

import bisect
import math
from dataclasses import dataclass, replace

from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.search.options import Degrees
from weft.planner.search.space import Choice, Space


@dataclass
class SearchResult:
    """Result of a search."""

    best: list[Choice]
    """Best layouts, the fastest first."""
    size: int
    """Number of layouts in the space."""
    timed: int
    """Number of candidates that fit and whose full step time was computed."""
    least_memory: float
    """Minimum bytes of the visited layouts if none fits."""


def search(space: Space, count: int = 5) -> SearchResult:
    """Find the fastest layouts that fit.

    Args:
        count: number of layouts to find.
    """
    best: list[Choice] = []
    timed, least = 0, math.inf
    for bound, degrees in space.bounds:
        if len(best) == count and bound >= best[-1].time.seconds:
            break
        choice, least_peak = space.fastest(degrees, best[-1].time.seconds if len(best) == count else math.inf)
        least, timed = min(least, least_peak or math.inf), timed + (choice is not None)
        if choice is not None:
            best = sorted([*best, choice], key=lambda found: found.time.seconds)[:count]
    return SearchResult(best, space.size, timed, least if math.isfinite(least) else 0.0)


def techniques(layout: TrainingLayout | Degrees) -> int:
    """Number of techniques of a layout beyond data parallelism and ZeRO; for `Degrees`, without memory options."""
    axes = [getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep", "vpp")]
    used = sum(axes) + (layout.schedule != "1f1b") + (layout.shard > 0)
    if isinstance(layout, Degrees):
        return used
    used += (layout.joint_experts and layout.pp == 1) + (layout.expert_slots > 0)
    return used + (layout.recompute != "none") + layout.offload + layout.optimizer_on_host


def simplest(space: Space, limit: float) -> Choice | None:
    """Find the layout with the fewest techniques that fits and is fast enough; among equals the fastest. None if there is none.

    Args:
        limit: upper limit of the step time in seconds (exclusive).
    """
    best: Choice | None = None
    quick = space.bounds[: bisect.bisect_left(space.bounds, limit, key=lambda pair: pair[0])]
    for bound, degrees in sorted(quick, key=lambda pair: (techniques(pair[1]), pair[0])):
        if best and (techniques(degrees), bound) >= _complexity(best):
            break
        if not space.fastest(degrees, limit)[0]:
            continue
        options = space.expert_options_of(degrees)
        choice = min((one for experts in options for one in space.fitting(degrees, experts, limit)), key=_complexity)
        if best is None or _complexity(choice) < _complexity(best):
            best = choice
    return best


def _complexity(choice: Choice) -> tuple[int, float]:
    return techniques(choice.layout), choice.time.seconds


def fewest_devices(space: Space) -> tuple[ClusterSpec, Choice] | None:
    """Smallest cluster of the same hosts on which a layout fits, and the fastest layout there; sizes by halving and doubling.

    None if even 64 times the devices are not enough.
    """
    size, found = space.cluster.num_devices, None
    spaces = (replace(space, cluster=space.cluster.sized(size << power)) for power in range(7))
    if any_layout_fits(space):
        spaces = (replace(space, cluster=space.cluster.sized(size >> power)) for power in range(size.bit_length()))
        for smaller in spaces:
            if not any_layout_fits(smaller):
                break
            found = smaller
    else:
        found = next((larger for larger in spaces if any_layout_fits(larger)), None)
    return (found.cluster, search(found, 1).best[0]) if found else None


def any_layout_fits(space: Space) -> bool:
    """True if any layout fits, however slow."""
    # No schedule has fewer micro-batches in flight than 1F1B.
    smallest = [s for s in space.all_degrees() if s.micro_batch == 1 and s.schedule == "1f1b"]
    return any(
        space.least_states(degrees) + space.stack.framework <= space.budget
        and space.least_peak(degrees) <= space.budget
        for degrees in sorted(smallest, key=lambda s: -s.zero)
    )
