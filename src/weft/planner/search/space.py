"""Search space: all layouts of a model on a cluster, with their step times and memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from weft.plan import JOINT_SCHEDULES
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import Schedule, TrainingLayout, split_layers
from weft.planner.costmodel.peak_memory import LayerActivations, MemoryEstimate, peak_memory, rank_states
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import (
    LayerTime,
    StepTime,
    fillers,
    head_time,
    joint_pairs,
    layer_time,
    step_time,
)
from weft.planner.search.options import MEMORY_OPTIONS, NO_EXPERT_OPTIONS, Degrees, ExpertOptions, MemoryOptions

MARGIN = 0.92  # share of a device's memory that a plan may fill; the rest is for fragmentation and model error
LARGEST_MICRO_BATCH = 64
SHARD_GROUP_HOSTS = (1, 16, 128)  # HSDP shard group sizes in hosts, in addition to sharding over all data ranks
FEW_LAYERS = 4
"""Most layers in flight for which the buffers of one or two offloaded or recomputed layers change the peak."""
INTERLEAVED = (2, 3, 4, 5, 6, 8)  # stages per rank
INTERLEAVED_JOINT = (2, 4)  # the same with joint slots; fewer, because the search time grows with each schedule


class Choice(NamedTuple):
    """A layout with its predicted step time and memory."""

    layout: TrainingLayout
    time: StepTime
    memory: MemoryEstimate


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
        joint_experts=layout.joint_experts,
        expert_slots=layout.expert_slots,
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
    micro_batch: int = 0
    """Rows per micro-batch; 0: all divisors of the rows of a data rank, up to `LARGEST_MICRO_BATCH`."""
    options: Sequence[MemoryOptions] = tuple(MEMORY_OPTIONS)
    """Memory options to search, in the order of `MEMORY_OPTIONS`."""
    expert_options: Sequence[ExpertOptions] = (ExpertOptions(),)
    """Options to search for layouts with ep."""
    accepts: Callable[[Degrees], bool] | None = None
    """Function that is false for combinations of degrees that are not searched; None: all are searched."""
    reserved: float = 0.0
    """Bytes per device that something else than training needs."""

    def __post_init__(self) -> None:
        self._layers: dict[TrainingLayout, LayerTime] = {}
        self._states: dict[tuple[int, ...], float] = {}
        self._ulysses: dict[TrainingLayout, int] = {}

    def with_memory(self, margin: float | None = None, traced: LayerActivations | None = None) -> "Space":
        """Copy with another memory budget, or other activation bytes. Times do not depend on them: known ones are shared.

        Args:
            margin: share of a device's memory that a plan may fill; None: the same.
            traced: activation bytes counted by dry runs; None: the same.
        """
        other = replace(self, margin=self.margin if margin is None else margin, traced=traced or self.traced)
        other._layers, other._states, other._ulysses = self._layers, self._states, self._ulysses
        vars(other)["bounds"] = self.bounds
        return other

    @property
    def budget(self) -> float:
        """Bytes per device that a layout may fill."""
        return self.margin * self.cluster.device.memory - self.reserved

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
                    found = self._combinations(tp, cp, pp, dp)
                    yield from filter(self.accepts, found) if self.accepts else found

    def _combinations(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[Degrees]:
        rows = self.global_batch // dp
        groups = (self.cluster.per_host * hosts // (tp * cp) for hosts in SHARD_GROUP_HOSTS)
        shards = [0] + [group for group in groups if 1 < group < dp and dp % group == 0]
        states = [(zero, 0) for zero in ((0, 1, 2) if dp * cp > 1 else (0,))]
        states += [(3, shard) for shard in shards if dp * cp > 1]
        sizes = [self.micro_batch] if self.micro_batch else divisors(rows)
        for micro in (size for size in sizes if size <= LARGEST_MICRO_BATCH or self.micro_batch):
            for schedule, vpp in self._schedules(pp, rows // micro):
                for zero, shard in states:
                    sharing = (shard or dp) * cp * tp
                    for ep in (
                        divisors(math.gcd(self.shape.experts or 1, sharing)) if "ep" not in self.unsplit else (1,)
                    ):
                        if ep > 1 or schedule not in JOINT_SCHEDULES:
                            yield Degrees(tp, cp, pp, dp, ep, zero, shard, micro, schedule, vpp)

    def _schedules(self, pp: int, micro_batches: int) -> Iterator[tuple[Schedule, int]]:
        yield "1f1b", 1
        if pp == 1:
            return
        yield "zb-h1", 1
        if 2 * pp <= self.shape.layers:
            yield "zbv", 2
        is_joint = self.shape.num_moe > 0 and any(option.joint for option in self.expert_options)
        if is_joint and 2 * pp <= self.shape.layers and micro_batches >= 2 * pp:
            yield "dualpipev", 2
        for vpp in INTERLEAVED:
            if pp * vpp <= self.shape.layers and micro_batches >= pp:
                yield "interleaved", vpp
                if is_joint and vpp in INTERLEAVED_JOINT:
                    yield "interleaved-overlap", vpp

    def expert_options_of(self, degrees: Degrees) -> Sequence[ExpertOptions]:
        """Expert options to search for degrees."""
        if degrees.ep == 1 or len(self.expert_options) == 1:
            return NO_EXPERT_OPTIONS
        if degrees.pp > 1:
            joint = degrees.schedule in JOINT_SCHEDULES
            return [option for option in self.expert_options if option.joint == joint]
        has_pairs = self.global_batch > degrees.dp * degrees.micro_batch
        return [option for option in self.expert_options if has_pairs or not option.joint]

    @property
    def size(self) -> int:
        """Number of layouts."""
        return len(self.options) * sum(len(self.expert_options_of(degrees)) for _, degrees in self.bounds)

    def layout(
        self, degrees: Degrees, options: MemoryOptions, experts: ExpertOptions = NO_EXPERT_OPTIONS[0]
    ) -> TrainingLayout:
        """Combine degrees, memory options and expert options to a layout."""
        layout = TrainingLayout(
            seq=self.seq,
            global_batch=self.global_batch,
            sp=degrees.tp > 1,
            expert_tp=1,
            recompute=options.recompute,
            recompute_share=1 / options.interval,
            offload=options.offload,
            joint_experts=experts.joint,
            expert_slots=experts.slots,
            optimizer_on_host=options.optimizer_on_host,
            dtype=self.dtype,
            fused_loss=self.stack.fused_loss,
            **degrees._asdict(),
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
        known: dict[tuple[int | str, ...], tuple[float, list[tuple[float, float, float]]]] = {}
        found = []
        for degrees in self.all_degrees():
            tp, cp, pp, dp, ep, _, _, micro, schedule, vpp = degrees
            num_micro_batches = self.global_batch // (dp * micro)
            key = tp, cp, ep, micro, schedule if pp > 1 else str(num_micro_batches > 1)
            pairs = joint_pairs(num_micro_batches, pp) / num_micro_batches
            if key not in known:
                layouts = [
                    self.layout(degrees, self.options[0], experts) for experts in self.expert_options_of(degrees)
                ]
                head = head_time(self.shape, layouts[0], self.cluster, self.stack)
                layers = [self.layer(layout) for layout in layouts]
                known[key] = head.sum, [(layer.total.sum, layer.hidden, layer.weights) for layer in layers]
            head_sum, sums = known[key]
            counts = split_layers(self.shape.layers, pp, vpp)
            num_fillers = fillers(schedule, pp, num_micro_batches)
            bounds = []
            for layer_sum, hidden, weights in sums:
                busiest = max(max(counts) * layer_sum, counts[-1] * layer_sum + head_sum)
                bubble = (self.shape.layers * layer_sum + head_sum - busiest) / vpp
                bubble -= num_fillers * weights * max(counts) / vpp
                bounds.append(num_micro_batches * (busiest - pairs * hidden * max(counts)) + max(0.0, bubble))
            found.append((min(bounds), degrees))
        return sorted(found)

    def least_states(self, degrees: Degrees) -> float:
        """Minimum bytes of model states on the first rank, with all memory options."""
        tp, cp, pp, dp, ep, zero, shard, *_, vpp = degrees
        key = tp, cp, pp, dp, ep, zero, shard, vpp
        if key not in self._states:
            self._states[key] = rank_states(self.shape, self.layout(degrees, self.options[-1]), self.stack, 0)
        return self._states[key]

    def least_peak(self, degrees: Degrees) -> float:
        """Minimum peak bytes over the memory options.

        All options together give the minimum, except with few layers in flight: then, if they do not fit, the minimum over
        all combinations is computed.
        """
        num_micro_batches = self.global_batch // (degrees.dp * degrees.micro_batch)
        held = -(-self.shape.layers // degrees.pp) * min(num_micro_batches, degrees.pp)
        least = self.memory(self.layout(degrees, self.options[-1])).total
        if held > FEW_LAYERS or least <= self.budget:
            return least
        least_on_device = [one for one in self.options if one.optimizer_on_host == self.options[-1].optimizer_on_host]
        return min(self.memory(self.layout(degrees, options)).total for options in least_on_device)

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
        expert_options = self.expert_options_of(degrees)
        quickest = (self.time(self.layout(degrees, self.options[0], experts)).seconds for experts in expert_options)
        if math.isfinite(limit) and all(seconds >= limit for seconds in quickest):
            return None, 0.0
        least_peak = self.least_peak(degrees)
        if least_peak > self.budget:
            return None, least_peak
        best: Choice | None = None
        for experts in expert_options:
            fitting = self.fitting(degrees, experts, limit)
            if fitting:
                best = min(fitting, key=lambda choice: choice.time.seconds)
                limit = best.time.seconds
        return best, least_peak

    def fitting(self, degrees: Degrees, experts: ExpertOptions, limit: float) -> list[Choice]:
        """Layouts for all memory options that fit and are not dominated by others that fit, with a step time below a limit."""
        closed: list[MemoryOptions] = []  # those that fit, and those that are too slow
        choices = []
        for options in self.options:
            if any(other.dominates(options) for other in closed):
                continue
            layout = self.layout(degrees, options, experts)
            time = self.time(layout)
            if time.seconds >= limit:
                closed.append(options)
                continue
            memory = self.memory(layout)
            if memory.total <= self.budget:
                closed.append(options)
                choices.append(Choice(layout, time, memory))
        return choices


def degrees_of(layout: TrainingLayout) -> Degrees:
    """Degrees of a layout."""
    return Degrees(*(getattr(layout, name) for name in Degrees._fields))


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return low + [number // factor for factor in reversed(low) if factor * factor != number]
