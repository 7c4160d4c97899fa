"""Exhaustive search for the fastest layout that fits, over all degrees, schedules and memory options, by formula.

Branch and bound keeps the search fast: a lower bound of the step time is the time of the layers plus the bubble, and the layer
time is shared by all layouts with the same tp, cp, ep and micro-batch. Candidates are visited in the order of that bound, and
the list of the best is complete when the next bound exceeds its last entry. A second pass finds the best layout with each
neighbouring value of each setting, to explain why that value was not chosen.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.layout import Schedule, TrainingLayout, split_layers
from weft.planner.costmodel.peak_memory import LayerActivations, MemoryEstimate, peak_memory, rank_states
from weft.planner.costmodel.shape import Recompute, Shape
from weft.planner.costmodel.step_time import LayerTime, StepTime, fillers, head_time, layer_time, step_time

MARGIN = 0.92  # share of a device's memory that a plan may fill; the rest is for fragmentation and model error
LARGEST_MICRO_BATCH = 64
SHARD_GROUP_HOSTS = (1, 16, 128)  # HSDP shard group sizes in hosts, in addition to sharding over all data ranks
FEW_LAYERS = 4  # layers in flight on a rank: so few that the one or two layers being offloaded or recomputed matter
INTERLEAVED = (2, 3, 4, 5, 6, 8)  # stages per rank
EQUAL = 0.03  # relative difference below which two predicted step times count as equal (`benchmarks/published`)


Value = int | tuple[str, int]
Setting = tuple[str, Value]
"""Name and value of a setting; the value of a schedule is its name and the stages per rank."""


class Degrees(NamedTuple):
    """A layout without its memory options."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    zero: int
    shard: int
    micro_batch: int
    schedule: Schedule
    vpp: int

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Settings that `sensitivity` varies."""
        order: Value = (self.schedule, self.vpp)
        return (
            ("tp", self.tp),
            ("cp", self.cp),
            ("pp", self.pp),
            ("ep", self.ep),
            ("zero", self.zero),
            ("micro_batch", self.micro_batch),
            ("schedule", order),
            ("shard", self.shard),
        )


class MemoryOptions(NamedTuple):
    """Memory-saving options of a layout."""

    recompute: Recompute
    interval: int
    """Recompute interval: every n-th layer is recomputed."""
    offload: bool
    optimizer_on_host: bool

    def dominates(self, other: "MemoryOptions") -> bool:
        """True if these options are certainly at least as fast as `other`, because `other` includes all of them.

        With offload, the recompute options must be the same: recomputed activations need not be offloaded.
        """
        if self.offload:
            less = (self.recompute, self.interval) == (other.recompute, other.interval) and other.offload
        else:
            less = RECOMPUTED_PARTS[self.recompute] <= RECOMPUTED_PARTS[other.recompute]
            less = less and (self.recompute == "none" or self.interval >= other.interval)
        return less and self.optimizer_on_host <= other.optimizer_on_host


RECOMPUTED_PARTS: dict[str, set[str]] = {  # recomputed parts of a layer
    "none": set(),
    "light": {"light"},
    "attention": {"light", "attention"},
    "mlp": {"mlp"},
    "full": {"light", "attention", "mlp"},
}
RECOMPUTE_OPTIONS: tuple[tuple[Recompute, int], ...] = (
    ("none", 1),
    ("light", 1),
    ("full", 4),
    ("full", 3),
    ("attention", 1),
    ("full", 2),
    ("mlp", 1),
    ("full", 1),
)
# With offload, only the recompute options none, light and full are searched.
MEMORY_OPTIONS = [
    MemoryOptions(recompute, interval, offload, on_host)
    for on_host in (False, True)
    for offload in (False, True)
    for recompute, interval in (RECOMPUTE_OPTIONS[:2] + RECOMPUTE_OPTIONS[-1:] if offload else RECOMPUTE_OPTIONS)
]


class Choice(NamedTuple):
    """A layout with its predicted step time and memory."""

    layout: TrainingLayout
    time: StepTime
    memory: MemoryEstimate


class Alternative(NamedTuple):
    """Alternative value of one setting, and the best layout with it; None if no such layout fits."""

    setting: str
    value: Value
    choice: Choice | None
    least_memory: float
    """Minimum bytes of the layouts with this value if none fits; 0: not computed, because the states alone are too large."""


@dataclass
class SearchResult:
    """Result of a search."""

    best: list[Choice]
    """Best layouts, the fastest first."""
    size: int
    """Number of layouts in the space."""
    timed: int
    """Number of candidates whose full step time was computed."""
    least_memory: float
    """Minimum bytes of the visited layouts if none fits."""


def _layer_key(layout: TrainingLayout) -> TrainingLayout:
    """Reduce a layout to the settings that the time of one layer depends on, as a cache key."""
    return TrainingLayout(
        layout.seq,
        layout.seq,
        layout.micro_batch,
        layout.tp,
        layout.sp,
        2 if layout.pp > 1 else 1,
        cp=layout.cp,
        ulysses=layout.ulysses,
        ep=layout.ep,
        expert_tp=layout.expert_tp,
        recompute=layout.recompute,
        recompute_share=layout.recompute_share,
        offload=layout.offload,
        dtype=layout.dtype,
    )


@dataclass
class Space:
    """Search space: all layouts of a model on a cluster."""

    shape: Shape
    seq: int
    global_batch: int
    """Sequences per step."""
    cluster: ClusterSpec
    stack: FrameworkModel
    margin: float = MARGIN
    dtype: str = "bf16"
    """Dtype of the matmuls of the layers, a key of `DeviceSpec.peak`."""
    traced: LayerActivations | None = None
    """Activation bytes counted by dry runs of a few layers; None: by formula."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """Axes over which the model cannot be parallelized, with the reason."""

    def __post_init__(self) -> None:
        self._layers: dict[TrainingLayout, LayerTime] = {}
        self._states: dict[tuple[int, ...], float] = {}
        self._ulysses: dict[TrainingLayout, int] = {}

    @property
    def budget(self) -> float:
        """Bytes per device that a layout may fill."""
        return self.margin * self.cluster.device.memory

    def all_degrees(self) -> Iterator[Degrees]:
        """All valid combinations of degrees, ZeRO stage, micro-batch and schedule."""
        shape, devices = self.shape, self.cluster.num_devices
        for pp in divisors(devices):
            if pp > (shape.layers if "pp" not in self.unsplit else 1):
                break
            for tp in divisors(devices // pp):
                if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
                    continue
                if tp > 1 and "tp" in self.unsplit:
                    break
                for cp in divisors(devices // pp // tp) if "cp" not in self.unsplit else (1,):
                    dp = devices // pp // tp // cp
                    if self.seq % (2 * cp * tp) or self.global_batch % dp:
                        continue
                    yield from self._combinations(tp, cp, pp, dp)

    def _combinations(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[Degrees]:
        rows = self.global_batch // dp
        groups = (self.cluster.per_host * hosts // (tp * cp) for hosts in SHARD_GROUP_HOSTS)
        shards = [0] + [group for group in groups if 1 < group < dp and dp % group == 0]
        states = [(zero, 0) for zero in ((0, 1, 2) if dp * cp > 1 else (0,))]
        states += [(3, shard) for shard in shards if dp * cp > 1]
        for micro in (size for size in divisors(rows) if size <= LARGEST_MICRO_BATCH):
            for schedule, vpp in self._schedules(pp, rows // micro):
                for zero, shard in states:
                    sharing = (shard or dp) * cp * tp
                    for ep in (
                        divisors(math.gcd(self.shape.experts or 1, sharing)) if "ep" not in self.unsplit else (1,)
                    ):
                        yield Degrees(tp, cp, pp, dp, ep, zero, shard, micro, schedule, vpp)

    def _schedules(self, pp: int, micro_batches: int) -> Iterator[tuple[Schedule, int]]:
        yield "1f1b", 1
        if pp == 1:
            return
        yield "zb-h1", 1
        if 2 * pp <= self.shape.layers:
            yield "zbv", 2
        for vpp in INTERLEAVED:
            if pp * vpp <= self.shape.layers and micro_batches >= pp:
                yield "interleaved", vpp

    def layout(self, degrees: Degrees, options: MemoryOptions) -> TrainingLayout:
        """Combine degrees and memory options to a layout."""
        tp, cp, pp, dp, ep, zero, shard, micro_batch, schedule, vpp = degrees
        layout = TrainingLayout(
            seq=self.seq,
            global_batch=self.global_batch,
            micro_batch=micro_batch,
            tp=tp,
            sp=tp > 1,
            pp=pp,
            vpp=vpp,
            cp=cp,
            ep=ep,
            dp=dp,
            zero=zero,
            shard=shard,
            expert_tp=1,
            recompute=options.recompute,
            recompute_share=1 / options.interval,
            offload=options.offload,
            schedule=schedule,
            optimizer_on_host=options.optimizer_on_host,
            dtype=self.dtype,
        )
        return self._with_ulysses(layout)

    def _with_ulysses(self, layout: TrainingLayout) -> TrainingLayout:
        """Set the Ulysses degree that minimizes the layer time; nothing else depends on it."""
        if layout.cp == 1 or self.shape.kv_lora:
            return layout
        key = _layer_key(layout)
        if key not in self._ulysses:
            heads = self.shape.heads // layout.tp
            sizes = [size for size in divisors(layout.cp) if heads % size == 0]
            self._ulysses[key] = min(sizes, key=lambda size: self.layer(replace(layout, ulysses=size)).total.sum)
        return replace(layout, ulysses=self._ulysses[key])

    def layer(self, layout: TrainingLayout) -> LayerTime:
        """Time of the mean layer, cached."""
        key = _layer_key(layout)
        if key not in self._layers:
            self._layers[key] = layer_time(self.shape, key, self.cluster, self.stack)
        return self._layers[key]

    def time(self, layout: TrainingLayout) -> StepTime:
        """Predicted step time."""
        return step_time(self.shape, layout, self.cluster, self.stack, self.layer(layout))

    def memory(self, layout: TrainingLayout) -> MemoryEstimate:
        """Predicted memory of the rank with the highest peak."""
        return peak_memory(self.shape, layout, self.stack, self.traced)

    @cached_property
    def bounds(self) -> list[tuple[float, Degrees]]:
        """Lower bound of the step time of each candidate, lowest first.

        The bound is the time of layers and head on the busiest rank plus the bubble, without gradients, ZeRO and update.
        """
        known: dict[tuple[int, ...], tuple[float, float, float]] = {}
        found = []
        for degrees in self.all_degrees():
            tp, cp, pp, dp, ep, _, _, micro, schedule, vpp = degrees
            key = tp, cp, ep, micro, min(pp, 2)
            if key not in known:
                layout = self.layout(degrees, MEMORY_OPTIONS[0])
                layer, head = self.layer(layout), head_time(self.shape, layout, self.cluster, self.stack)
                known[key] = layer.total.sum, head.sum, layer.weights
            layer_sum, head_sum, weights = known[key]
            counts = split_layers(self.shape.layers, pp, vpp)
            busiest = max(max(counts) * layer_sum, counts[-1] * layer_sum + head_sum)
            num_micro_batches = self.global_batch // (dp * micro)
            bubble = (self.shape.layers * layer_sum + head_sum - busiest) / vpp
            bubble -= fillers(schedule, pp, num_micro_batches) * weights * max(counts) / vpp
            found.append((num_micro_batches * busiest + max(0.0, bubble), degrees))
        return sorted(found)

    def least_states(self, degrees: Degrees) -> float:
        """Minimum bytes of model states on the first rank, with all memory options."""
        tp, cp, pp, dp, ep, zero, shard, *_, vpp = degrees
        key = tp, cp, pp, dp, ep, zero, shard, vpp
        if key not in self._states:
            self._states[key] = rank_states(self.shape, self.layout(degrees, MEMORY_OPTIONS[-1]), self.stack, 0)
        return self._states[key]

    def least_peak(self, degrees: Degrees) -> float:
        """Minimum peak bytes over the memory options.

        All options together give the minimum, except with few layers in flight: then, if they do not fit, the minimum over
        all combinations is computed.
        """
        num_micro_batches = self.global_batch // (degrees.dp * degrees.micro_batch)
        held = -(-self.shape.layers // degrees.pp) * min(num_micro_batches, degrees.pp)
        least = self.memory(self.layout(degrees, MEMORY_OPTIONS[-1])).total
        if held > FEW_LAYERS or least <= self.budget:
            return least
        offloading = [options for options in MEMORY_OPTIONS if options.optimizer_on_host]
        return min(self.memory(self.layout(degrees, options)).total for options in offloading)

    def fastest(self, degrees: Degrees, limit: float) -> tuple[Choice | None, float]:
        """Fastest memory options that fit.

        Args:
            degrees: degrees, ZeRO stage, micro-batch and schedule of the layout.
            limit: step time in seconds; slower layouts are discarded.

        Returns:
            The fastest layout, None if none fits or is fast enough; and the minimum peak bytes, 0 if not computed.
        """
        if self.least_states(degrees) + self.stack.framework > self.budget:
            return None, 0.0
        if math.isfinite(limit) and self.time(self.layout(degrees, MEMORY_OPTIONS[0])).seconds >= limit:
            return None, 0.0
        least_peak = self.least_peak(degrees)
        if least_peak > self.budget:
            return None, least_peak
        best = min(self.fitting(degrees), key=lambda choice: choice.time.seconds)
        return (best if best.time.seconds < limit else None), least_peak

    def fitting(self, degrees: Degrees) -> list[Choice]:
        """Layouts for all memory options that fit and are not dominated by other options that fit."""
        fitting: list[MemoryOptions] = []
        choices = []
        for options in MEMORY_OPTIONS:
            if any(other.dominates(options) for other in fitting):
                continue
            layout = self.layout(degrees, options)
            memory = self.memory(layout)
            if memory.total <= self.budget:
                fitting.append(options)
                choices.append(Choice(layout, self.time(layout), memory))
        return choices


def search(space: Space, count: int = 5) -> SearchResult:
    """Find the fastest layouts that fit.

    Args:
        space: search space.
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
    return SearchResult(best, len(space.bounds) * len(MEMORY_OPTIONS), timed, least if math.isfinite(least) else 0.0)


def techniques(layout: TrainingLayout | Degrees) -> int:
    """Number of techniques of a layout beyond data parallelism and ZeRO; for `Degrees`, without memory options."""
    axes = [getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep", "vpp")]
    used = sum(axes) + (layout.schedule != "1f1b") + (layout.shard > 0)
    if isinstance(layout, Degrees):
        return used
    return used + (layout.recompute != "none") + layout.offload + layout.optimizer_on_host


def simplest(space: Space, limit: float) -> Choice | None:
    """Find the layout with the fewest techniques that fits and is fast enough; among equals the fastest. None if there is none.

    Args:
        space: search space.
        limit: upper limit of the step time in seconds (exclusive).
    """
    best: Choice | None = None
    quick = space.bounds[: bisect.bisect_left(space.bounds, limit, key=lambda pair: pair[0])]
    for bound, degrees in sorted(quick, key=lambda pair: (techniques(pair[1]), pair[0])):
        if best and (techniques(degrees), bound) >= _complexity(best):
            break
        if not space.fastest(degrees, limit)[0]:
            continue
        choice = min((one for one in space.fitting(degrees) if one.time.seconds < limit), key=_complexity)
        if best is None or _complexity(choice) < _complexity(best):
            best = choice
    return best


def _complexity(choice: Choice) -> tuple[int, float]:
    return techniques(choice.layout), choice.time.seconds


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


def degrees_of(layout: TrainingLayout) -> Degrees:
    """Degrees of a layout."""
    return Degrees(
        layout.tp,
        layout.cp,
        layout.pp,
        layout.dp,
        layout.ep,
        layout.zero,
        layout.shard,
        layout.micro_batch,
        layout.schedule,
        layout.vpp,
    )


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


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return low + [number // factor for factor in reversed(low) if factor * factor != number]


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
