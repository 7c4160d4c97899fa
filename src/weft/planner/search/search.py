"""The search for the fastest layout that fits: every combination of degrees, schedules and ways to hold less, by formula.

Exhaustive, and quick because most of the space is never looked at: a layout cannot be faster than its layers and a bubble
alone, and layers are known for all layouts of one tp, cp, ep and micro-batch at once. Candidates are visited in the order of
that bound, and a list of the best is complete when the next bound is above its last (branch and bound). A second pass finds
the best layout with each value near a chosen one, so that what was not chosen has its reason.
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
from weft.planner.costmodel.peak_memory import MemoryEstimate, Traced, peak_memory, rank_states
from weft.planner.costmodel.shape import Recompute, Shape
from weft.planner.costmodel.step_time import LayerTime, StepTime, fillers, head_time, layer_time, step_time

MARGIN = 0.92  # of a device's memory that a plan may fill: fragments and what formulas do not know have the rest
LARGEST_MICRO_BATCH = 64
SHARING_HOSTS = (1, 16, 128)  # whose data ranks share states among themselves under ZeRO 3, beside all of them
FEW = 4  # layers in flight on a rank: what is offloaded, or computed again, is one or two of them at any moment
INTERLEAVED = (2, 3, 4, 5, 6, 8)  # stages of a rank
EQUAL = 0.03  # relative difference of two predicted step times below which neither is known to be less (`benchmarks/published`)


Value = int | tuple[str, int]
Setting = tuple[str, Value]
"""A name and a value; of schedules also the stages of a rank."""


class Degrees(NamedTuple):
    """A layout without its ways to hold less."""

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
        """What is compared with other values."""
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
    """Ways to hold less."""

    recompute: Recompute
    every: int
    """One in so many layers computes again."""
    offload: bool
    optimizer_on_host: bool

    def dominates(self, other: "MemoryOptions") -> bool:
        """Whether it is surely as fast: `other` does all that it does, and more. What is recomputed need not be offloaded."""
        if self.offload:
            less = (self.recompute, self.every) == (other.recompute, other.every) and other.offload
        else:
            less = AGAIN[self.recompute] <= AGAIN[other.recompute]
            less = less and (self.recompute == "none" or self.every >= other.every)
        return less and self.optimizer_on_host <= other.optimizer_on_host


AGAIN: dict[str, set[str]] = {  # parts of a layer
    "none": set(),
    "light": {"light"},
    "attention": {"light", "attention"},
    "mlp": {"mlp"},
    "full": {"light", "attention", "mlp"},
}
WAYS: tuple[tuple[Recompute, int], ...] = (
    ("none", 1),
    ("light", 1),
    ("full", 4),
    ("full", 3),
    ("attention", 1),
    ("full", 2),
    ("mlp", 1),
    ("full", 1),
)
LEAN = [
    MemoryOptions(recompute, every, offload, on_host)
    for on_host in (False, True)
    for offload in (False, True)
    for recompute, every in (WAYS[:2] + WAYS[-1:] if offload else WAYS)  # beside offload: none, light and full
]


class Choice(NamedTuple):
    """A layout with its predicted cost."""

    layout: TrainingLayout
    time: StepTime
    memory: MemoryEstimate


class Direction(NamedTuple):
    """One other value of one setting, and the best layout with it; without one where nothing fits."""

    setting: str
    value: Value
    choice: Choice | None
    least_memory: float
    """Bytes that the leanest layout with it needs, where nothing fits; 0: not even looked at, as states alone are too large."""


@dataclass
class SearchResult:
    """What a search comes to."""

    best: list[Choice]
    """The fastest first."""
    size: int
    """Layouts in the space."""
    timed: int
    """Of which the time was worked out in full."""
    least_memory: float
    """Bytes of the leanest layout that was looked at, where nothing fits."""


def _as_a_layer_sees(layout: TrainingLayout) -> TrainingLayout:
    """What one micro-batch of one layer depends on."""
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
        number=layout.number,
    )


@dataclass
class Space:
    """All layouts of a model on a cluster, and what they share."""

    shape: Shape
    seq: int
    global_batch: int
    """Sequences."""
    cluster: ClusterSpec
    stack: FrameworkModel
    margin: float = MARGIN
    number: str = "bf16"
    """Format of the products of layers, as a device's peak names it."""
    traced: Traced | None = None
    """What dry runs of a few layers have counted."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """Axes over which the model cannot be split, and why."""

    def __post_init__(self) -> None:
        self._layers: dict[TrainingLayout, LayerTime] = {}
        self._states: dict[tuple[int, ...], float] = {}
        self._grids: dict[TrainingLayout, int] = {}

    @property
    def budget(self) -> float:
        """Bytes of a device that a layout may fill."""
        return self.margin * self.cluster.device.memory

    def skeletons(self) -> Iterator[Degrees]:
        """Every one that divides what it splits."""
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
                    yield from self._of_degrees(tp, cp, pp, dp)

    def _of_degrees(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[Degrees]:
        rows = self.global_batch // dp
        groups = (self.cluster.per_host * hosts // (tp * cp) for hosts in SHARING_HOSTS)
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

    def layout(self, skeleton: Degrees, lean: MemoryOptions) -> TrainingLayout:
        """The whole of it."""
        tp, cp, pp, dp, ep, zero, shard, micro_batch, schedule, vpp = skeleton
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
            recompute=lean.recompute,
            recompute_share=1 / lean.every,
            offload=lean.offload,
            schedule=schedule,
            optimizer_on_host=lean.optimizer_on_host,
            number=self.number,
        )
        return self._with_grid(layout)

    def _with_grid(self, layout: TrainingLayout) -> TrainingLayout:
        """The layout with as many ranks of cp that share heads as are best for its layers: nothing else depends on it."""
        if layout.cp == 1 or self.shape.kv_lora:
            return layout
        alike = _as_a_layer_sees(layout)
        if alike not in self._grids:
            heads = self.shape.heads // layout.tp
            sizes = [size for size in divisors(layout.cp) if heads % size == 0]
            self._grids[alike] = min(sizes, key=lambda size: self.layer(replace(layout, ulysses=size)).whole.sum)
        return replace(layout, ulysses=self._grids[alike])

    def layer(self, layout: TrainingLayout) -> LayerTime:
        """Seconds of its mean layer: one for all layouts that differ in nothing that a layer sees."""
        alike = _as_a_layer_sees(layout)
        if alike not in self._layers:
            self._layers[alike] = layer_time(self.shape, alike, self.cluster, self.stack)
        return self._layers[alike]

    def time(self, layout: TrainingLayout) -> StepTime:
        """Predicted seconds of a step."""
        return step_time(self.shape, layout, self.cluster, self.stack, self.layer(layout))

    def memory(self, layout: TrainingLayout) -> MemoryEstimate:
        """Predicted bytes of the fullest rank."""
        return peak_memory(self.shape, layout, self.stack, self.traced)

    @cached_property
    def bounds(self) -> list[tuple[float, Degrees]]:
        """Seconds that a step of each skeleton takes at least, the lowest first: all but gradients, ZeRO and the update.

        Seconds of its mean layer and of the head, put on its busiest rank, with the bubble that they leave.
        """
        known: dict[tuple[int, ...], tuple[float, float, float]] = {}
        found = []
        for skeleton in self.skeletons():
            tp, cp, pp, dp, ep, _, _, micro, schedule, vpp = skeleton
            key = tp, cp, ep, micro, min(pp, 2)
            if key not in known:
                layout = self.layout(skeleton, LEAN[0])
                layer, head = self.layer(layout), head_time(self.shape, layout, self.cluster, self.stack)
                known[key] = layer.whole.sum, head.sum, layer.weights
            whole_sum, head_sum, weights = known[key]
            counts = split_layers(self.shape.layers, pp, vpp)
            busiest = max(max(counts) * whole_sum, counts[-1] * whole_sum + head_sum)
            num_micro_batches = self.global_batch // (dp * micro)
            bubble = (self.shape.layers * whole_sum + head_sum - busiest) / vpp
            bubble -= fillers(schedule, pp, num_micro_batches) * weights * max(counts) / vpp
            found.append((num_micro_batches * busiest + max(0.0, bubble), skeleton))
        return sorted(found)

    def least_states(self, skeleton: Degrees) -> float:
        """Bytes of states of the first rank at least, however lean it is."""
        tp, cp, pp, dp, ep, zero, shard, *_, vpp = skeleton
        key = tp, cp, pp, dp, ep, zero, shard, vpp
        if key not in self._states:
            self._states[key] = rank_states(self.shape, self.layout(skeleton, LEAN[-1]), self.stack, 0)
        return self._states[key]

    def leanest(self, skeleton: Degrees) -> float:
        """Bytes of the fullest rank with all ways to hold less; with few layers in flight, if these do not fit, of the best."""
        num_micro_batches = self.global_batch // (skeleton.dp * skeleton.micro_batch)
        held = -(-self.shape.layers // skeleton.pp) * min(num_micro_batches, skeleton.pp)
        least = self.memory(self.layout(skeleton, LEAN[-1])).total
        if held > FEW or least <= self.budget:
            return least
        ways = [lean for lean in LEAN if lean.optimizer_on_host]
        return min(self.memory(self.layout(skeleton, lean)).total for lean in ways)

    def fastest(self, skeleton: Degrees, limit: float) -> tuple[Choice | None, float]:
        """The fastest way to hold as little as there is room for.

        Args:
            skeleton: the rest of the layout.
            limit: seconds; a slower layout is of no interest.

        Returns:
            None where nothing fits or is fast enough; and the bytes of the leanest, 0 where they were not counted.
        """
        if self.least_states(skeleton) + self.stack.framework > self.budget:
            return None, 0.0
        if math.isfinite(limit) and self.time(self.layout(skeleton, LEAN[0])).seconds >= limit:
            return None, 0.0
        leanest = self.leanest(skeleton)
        if leanest > self.budget:
            return None, leanest
        best = min(self.fitting(skeleton), key=lambda choice: choice.time.seconds)
        return (best if best.time.seconds < limit else None), leanest

    def fitting(self, skeleton: Degrees) -> list[Choice]:
        """The ways to hold as little as there is room for, without those that do more than another one that fits."""
        fitting: list[MemoryOptions] = []
        choices = []
        for lean in LEAN:
            if any(other.dominates(lean) for other in fitting):
                continue
            layout = self.layout(skeleton, lean)
            memory = self.memory(layout)
            if memory.total <= self.budget:
                fitting.append(lean)
                choices.append(Choice(layout, self.time(layout), memory))
        return choices


def search(space: Space, count: int = 5) -> SearchResult:
    """The fastest layouts that fit.

    Args:
        space: where to look.
        count: layouts to find.
    """
    best: list[Choice] = []
    timed, least = 0, math.inf
    for bound, skeleton in space.bounds:
        if len(best) == count and bound >= best[-1].time.seconds:
            break
        choice, leanest = space.fastest(skeleton, best[-1].time.seconds if len(best) == count else math.inf)
        least, timed = min(least, leanest or math.inf), timed + (choice is not None)
        if choice is not None:
            best = sorted([*best, choice], key=lambda found: found.time.seconds)[:count]
    return SearchResult(best, len(space.bounds) * len(LEAN), timed, least if math.isfinite(least) else 0.0)


def techniques(layout: TrainingLayout | Degrees) -> int:
    """Number of techniques that a layout uses beside data parallelism and ZeRO; of a skeleton, those of its degrees."""
    axes = [getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep", "vpp")]
    used = sum(axes) + (layout.schedule != "1f1b") + (layout.shard > 0)
    if isinstance(layout, Degrees):
        return used
    return used + (layout.recompute != "none") + layout.offload + layout.optimizer_on_host


def simplest(space: Space, limit: float) -> Choice | None:
    """The layout that fits with the fewest techniques, and the fastest of these; None where none is fast enough.

    Args:
        space: where to look.
        limit: seconds that a step must stay below.
    """
    best: Choice | None = None
    quick = space.bounds[: bisect.bisect_left(space.bounds, limit, key=lambda pair: pair[0])]
    for bound, skeleton in sorted(quick, key=lambda pair: (techniques(pair[1]), pair[0])):
        if best and (techniques(skeleton), bound) >= _simplicity(best):
            break
        if not space.fastest(skeleton, limit)[0]:
            continue
        choice = min((one for one in space.fitting(skeleton) if one.time.seconds < limit), key=_simplicity)
        if best is None or _simplicity(choice) < _simplicity(best):
            best = choice
    return best


def _simplicity(choice: Choice) -> tuple[int, float]:
    return techniques(choice.layout), choice.time.seconds


def sensitivity(space: Space, best: Choice) -> list[Direction]:
    """The best layouts with other values of each setting: the two below and the two above the chosen one's."""
    chosen = dict(skeleton_of(best.layout).settings)
    values: dict[str, set[Value]] = defaultdict(set)
    for _, skeleton in space.bounds:
        for name, value in skeleton.settings:
            values[name].add(value)
    found: dict[Setting, Choice | None] = {
        (name, value): None for name in chosen for value in _near(values[name], chosen[name])
    }
    needs: dict[Setting, float] = {}
    for bound, skeleton in space.bounds:
        settings = [setting for setting in skeleton.settings if setting in found]
        limits = {
            setting: math.inf if (known := found[setting]) is None else known.time.seconds for setting in settings
        }
        if not limits or bound >= max(limits.values()):
            continue
        choice, leanest = space.fastest(skeleton, max(limits.values()))
        for setting, limit in limits.items():
            if choice is None and leanest:
                needs[setting] = min(needs.get(setting, math.inf), leanest)
            elif choice is not None and choice.time.seconds < limit:
                found[setting] = choice
    return [
        Direction(name, value, choice, 0.0 if choice else needs.get((name, value), 0.0))
        for (name, value), choice in found.items()
    ]


def _near(values: set[Value], chosen: Value) -> list[Value]:
    """Numbers near the chosen one; of schedules all others."""
    ordered = sorted(values, key=str if isinstance(chosen, tuple) else None)
    place = ordered.index(chosen)
    if isinstance(chosen, tuple):
        return ordered[:place] + ordered[place + 1 :]
    return ordered[max(0, place - 2) : place] + ordered[place + 1 : place + 3]


def skeleton_of(layout: TrainingLayout) -> Degrees:
    """Of a layout."""
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
    """The smallest cluster of the same hosts, by halves and doubles, on which a layout fits, and its fastest layout there.

    None where 64 times the devices do not do.
    """
    size, found = space.cluster.num_devices, None
    spaces = (replace(space, cluster=space.cluster.sized(size << power)) for power in range(7))
    if fits_at_all(space):
        spaces = (replace(space, cluster=space.cluster.sized(size >> power)) for power in range(size.bit_length()))
        for smaller in spaces:
            if not fits_at_all(smaller):
                break
            found = smaller
    else:
        found = next((larger for larger in spaces if fits_at_all(larger)), None)
    return (found.cluster, search(found, 1).best[0]) if found else None


def fits_at_all(space: Space) -> bool:
    """Whether some layout fits, however slow."""
    # No schedule holds less than 1F1B.
    smallest = [s for s in space.skeletons() if s.micro_batch == 1 and s.schedule == "1f1b"]
    return any(
        space.least_states(skeleton) + space.stack.framework <= space.budget and space.leanest(skeleton) <= space.budget
        for skeleton in sorted(smallest, key=lambda s: -s.zero)
    )


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return low + [number // factor for factor in reversed(low) if factor * factor != number]


def reason(direction: Direction, best: Choice, cluster: ClusterSpec) -> str:
    """Why another value was not chosen, in one line: equal, how much slower and by what, or what does not fit."""
    name = setting_in_words(direction.setting, direction.value)
    if direction.choice is None:
        if direction.least_memory:
            have = cluster.device.memory / GIB
            return f"{name}: does not fit, needs {direction.least_memory / GIB:,.0f} GiB at least of {have:,.0f}"
        return f"{name}: does not fit, model states alone are too large"
    other, mine = direction.choice.time, best.time
    slower = other.seconds / mine.seconds - 1
    if abs(slower) < EQUAL:
        return f"{name}: equal ({slower:+.1%})"
    terms = {term: getattr(other, term) - getattr(mine, term) for term in vars(mine)}
    worst = max(terms, key=lambda term: terms[term])
    if terms[worst] <= 0:
        return f"{name}: {slower:+.1%}"
    return f"{name}: {slower:+.1%}, {TERMS[worst]} {terms[worst]:+.3g} s{_crossing(worst, direction.choice.layout, cluster)}"


def setting_in_words(setting: str, value: Value) -> str:
    """As a user knows it."""
    if isinstance(value, tuple):
        return f"schedule {value[0]}" + (f", {value[1]} stages a rank" if value[1] > 1 else "")
    if setting == "shard":
        return f"states shared by {value} ranks" if value else "states shared by all data ranks"
    return f"{setting} {value}"


TERMS = {
    "compute": "computation",
    "tp": "messages of tp",
    "cp": "messages of cp",
    "ep": "messages of ep",
    "zero": "gathered weights",
    "pipeline": "bubble and messages of pp",
    "gradients": "gradients",
    "optimizer": "update",
}


def _crossing(term: str, layout: TrainingLayout, cluster: ClusterSpec) -> str:
    """That the ranks of a term are on several hosts."""
    reach = {"tp": layout.tp, "cp": layout.tp * layout.cp, "ep": layout.ep}.get(term, 0)
    return f", as it crosses hosts of {cluster.per_host}" if reach > cluster.per_host else ""
