"""What `weft plan` finds for a job on a cluster: the best layouts, confirmed, with what was not chosen and why."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers

from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.comm.compression.codecs import CODECS
from weft.device.device import detect
from weft.errors import DeviceError, PlanError, WeftError
from weft.job import Job
from weft.parallel.parallelize import check_axes
from weft.plan import Parallel, Pipeline
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout, local_parameters
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.costmodel.roofline import stream
from weft.planner.costmodel.shape import Shape, from_config
from weft.planner.costmodel.step_time import StepTime
from weft.planner.costmodel.timeline import head_cost, refined
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.dryrun.layer_activations import trace_layers
from weft.planner.dryrun.trace import Trace, trace_stages
from weft.planner.search.search import (
    EQUAL,
    MARGIN,
    Choice,
    Direction,
    Space,
    fewest_devices,
    search,
    sensitivity,
    simplest,
    techniques,
)
from weft.planner.search.strategy import RECOMPUTE, Cost, cost_of, in_words, plan_of, stack_for

MOST_REFUSED = 8  # layouts: after so many the formulas have nothing to say
HEADROOMS = (0.75, 0.5, 0.25)  # of a device's memory


@dataclass(frozen=True)
class Proposal:
    """What was found."""

    job: Job
    space: Space
    scalar: float
    best: list[Choice]
    """The chosen layout, then others, the fastest first; with a pipeline, their bubble is of the schedule itself.

    The chosen one is the simplest of those that are equal to the fastest within the planner's uncertainty."""
    costs: list[Cost]
    traces: list[Trace]
    """Dry runs of the first of them, if it was confirmed."""
    refused: list[tuple[Choice, str]]
    """Faster ones by formula that a dry run, or a rule of the runtime, refused."""
    directions: list[Direction]
    leaner: list[Choice]
    """The fastest within less memory: 3/4, a half, a quarter of the device's."""
    compressed: dict[str, float]
    """By codec: seconds of the best step with its gradients compressed. What that costs in loss is not the planner's to say."""
    fewest: tuple[ClusterSpec, Choice] | None
    size: int
    """Layouts in the space."""
    by_operators: list[StepTime]
    """Seconds of the best ones, in their order, by operators that were timed; empty where none were."""

    @property
    def slower(self) -> list[float]:
        """Relative difference of the predicted time of each of the best to that of the chosen one."""
        seconds = seconds_of(self.best, self.by_operators)
        return [time / seconds[0] - 1 for time in seconds]


def planned(job: Job, space: Space, layout: TrainingLayout) -> Job:
    """The job with the plan of a layout."""
    train = job.train.model_copy(update={"micro_batch_size": layout.micro_batch})
    return job.model_copy(update={"plan": plan_of(layout, job.plan, head_cost(space, layout)), "train": train})


def propose(
    job: Job,
    cluster: ClusterSpec,
    scalar: float = 1.0,
    margin: float = MARGIN,
    count: int = 5,
    confirm: bool = True,
    failure_hours: float = 0.0,
    say: Callable[[str], None] = print,
    by_operators: float | None = None,
) -> Proposal:
    """Search, refine and confirm.

    Args:
        job: its model, length, batch and formats are taken; its plan's layout is not.
        cluster: to run on; all of it is used.
        scalar: measured over predicted step time of this machine.
        margin: of a device's memory that a plan may fill.
        count: layouts to show.
        confirm: whether the best is run dry, and the next where memory is not enough.
        failure_hours: mean time between failures of one device; 0: nothing fails.
        say: takes lines of progress.
        by_operators: time the operators of the best layouts on the device at hand, and order them by that; measured over
            predicted step time by that account.

    Raises:
        DeviceError: operators are to be timed for devices of another kind than are here.
        PlanError: nothing fits, however lean; says the smallest cluster on which something does.
    """
    job = job.model_copy(update={"plan": job.plan.resolve_precision(cluster.device.native_bf16)})
    space = space_of(job, cluster, margin)
    if by_operators is not None:
        check_here(type_of(cluster), in_words(cluster))
    if not space.bounds:
        raise nothing_fits(space, 0.0)
    if confirm:
        space = replace(space, traced=trace_layers(job, type_of(cluster), with_tp="tp" not in space.unsplit))
    found = search(space, max(count, 3))
    if not found.best:
        raise nothing_fits(space, found.least_memory)
    say(f"{found.size:,} layouts, {found.timed:,} of them timed")
    limit, size = space.budget, found.size
    best, times, refused = shortlist(job, space, found.best, by_operators, say)
    traces: list[Trace] = []
    while confirm and best and len(refused) < MOST_REFUSED:
        say(f"dry run of {describe(best[0])}")
        traces, why, peak = dry_run(job, space, best[0], limit)
        if not why:
            break
        first = best[0]
        refused.append((first, why))
        best, times = simple_first(best[1:], times[1:])
        if peak:  # what formulas miss of it they miss of its like: look again, for what holds as much less
            fixed = first.memory.framework
            room = fixed + (limit - fixed) * (first.memory.total - fixed) / (peak - fixed)
            narrower = replace(space, margin=room / cluster.device.memory)
            if leaner := search(narrower, max(count, 3)).best:
                space, (best, times, wrong) = narrower, shortlist(job, narrower, leaner, by_operators, say)
                refused += wrong
    if not best or (confirm and not traces):
        raise PlanError(
            f"none of the {len(refused)} best layouts stands its dry run: {refused[0][1]}",
            where="weft plan",
            fix="take more devices, or devices with more memory",
        )
    directions = [
        there._replace(choice=exact(space, there.choice)) if there.choice else there
        for there in sensitivity(space, best[0])
    ]
    if not times:
        # The search ranks pipelines by a formula; by their own schedules, layouts with another value may be nearer.
        nearby = [there.choice for there in directions if there.choice]
        best = best[:1] + nearest([*best[1:], *nearby], [choice for choice, _ in refused])
    best, times = best[: max(count, 3)], times[: max(count, 3)]
    return Proposal(
        job,
        space,
        scalar,
        best,
        [cost_of(space.shape, choice.layout, choice.time.seconds, cluster, failure_hours, scalar) for choice in best],
        traces,
        refused,
        directions=directions,
        leaner=leaner_than(space, best[0]),
        compressed=compressed_steps(space, best[0].layout),
        fewest=fewest_devices(space),
        size=size,
        by_operators=times,
    )


def nearest(choices: list[Choice], refused: list[Choice]) -> list[Choice]:
    """Each layout once, the fastest first, without those that were refused."""
    without = {choice.layout for choice in refused}
    by_layout = {choice.layout: choice for choice in choices if choice.layout not in without}
    return sorted(by_layout.values(), key=lambda choice: choice.time.seconds)


def shortlist(
    job: Job, space: Space, found: list[Choice], by_operators: float | None, say: Callable[[str], None]
) -> tuple[list[Choice], list[StepTime], list[tuple[Choice, str]]]:
    """Layouts of a search and the simplest that is as fast, in the order of `simple_first`; arguments as of `propose`.

    Returns:
        The layouts, their bubble that of the schedule itself; their seconds by operators, if these were timed; and those
        that were refused then.
    """
    best = [exact(space, choice) for choice in found]
    simple = simplest(space, min(choice.time.seconds for choice in best) * (1 + EQUAL))
    if simple and all(choice.layout != simple.layout for choice in best):
        best.append(exact(space, simple))
    if by_operators is None:
        return *simple_first(best, []), []
    best, times, refused = time_operators(job, space, best, by_operators, say)
    return *simple_first(best, times), refused


def simple_first(best: list[Choice], times: list[StepTime]) -> tuple[list[Choice], list[StepTime]]:
    """Layouts in the order of their time, but with the simplest of those that are equal to the fastest before all others.

    Args:
        best: layouts.
        times: their seconds by operators, in the same order, or nothing.
    """
    if not best:
        return best, times
    seconds = seconds_of(best, times)
    order = sorted(range(len(best)), key=seconds.__getitem__)
    equal = [place for place in order if seconds[place] < seconds[order[0]] * (1 + EQUAL)]
    chosen = min(equal, key=lambda place: (techniques(best[place].layout), seconds[place]))
    order.remove(chosen)
    order.insert(0, chosen)
    return [best[place] for place in order], [times[place] for place in order] if times else []


def seconds_of(best: list[Choice], times: list[StepTime]) -> list[float]:
    """Seconds of a step of each layout: by operators where these were timed, else by formula."""
    return [time.seconds for time in times or (choice.time for choice in best)]


def exact(space: Space, choice: Choice) -> Choice:
    """A layout whose bubble is that of its schedule, not of the formula."""
    return choice._replace(time=refined(space, choice.layout, choice.time))


def leaner_than(space: Space, best: Choice) -> list[Choice]:
    """The fastest layouts within shares of a device's memory, each leaner than the one before it."""
    found: list[Choice] = []
    for share in HEADROOMS:
        room = share * space.cluster.device.memory
        if room >= (found or [best])[-1].memory.total:
            continue  # which fits there too
        found += [exact(space, choice) for choice in search(replace(space, margin=share), 1).best]
    return found


def compressed_steps(space: Space, layout: TrainingLayout) -> dict[str, float]:
    """By codec, seconds of a step whose gradients it compresses; none where there are no data ranks.

    The codec reads and writes each number of the rank's gradient as float32, three times with error feedback.
    """
    if layout.dp * layout.cp == 1:
        return {}
    coding = stream(space.cluster.device, 6 * 4 * sum(local_parameters(space.shape, layout, 0)))
    found = {}
    for name, codec in CODECS.items():
        if name != "1-bit":  # which is an optimizer too
            other = replace(space, stack=replace(space.stack, reduce=codec.bytes_per_number))
            found[name] = coding + refined(other, layout, other.time(layout)).seconds
    return found


def time_operators(
    job: Job, space: Space, best: list[Choice], scalar: float, say: Callable[[str], None]
) -> tuple[list[Choice], list[StepTime], list[tuple[Choice, str]]]:
    """Layouts in the order of their seconds by operators that are timed here, these seconds, and layouts that were refused."""
    timed: list[tuple[Choice, StepTime]] = []
    refused: list[tuple[Choice, str]] = []
    for choice in best:
        say(f"operators of {describe(choice)}")
        run = planned(job, space, choice.layout)
        try:
            traces = trace_stages(run, choice.layout.num_devices, type_of(space.cluster))
        except PlanError as error:
            refused.append((choice, error.what))
            continue
        time = time_step(run, traces, space.cluster, choice.time, say)
        timed.append((choice, StepTime(**{name: value * scalar for name, value in vars(time).items()})))
    timed.sort(key=lambda pair: pair[1].seconds)
    return [choice for choice, _ in timed], [time for _, time in timed], refused


def check_here(device_type: str, cluster: str) -> None:
    """Refuse to time operators for devices of another kind than this machine has.

    Raises:
        DeviceError: it has.
    """
    here = detect().type
    if here != device_type:
        raise DeviceError(
            f"operators cannot be timed for {cluster}",
            where="weft plan --measure",
            rule=f"they are timed on the device at hand, and this machine computes on {here}",
            fix="run it where one such device is, or leave --measure out",
        )


def space_of(job: Job, cluster: ClusterSpec, margin: float = MARGIN) -> Space:
    """All layouts of a job on a cluster.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    precision = job.plan.precision.resolve(cluster.device.native_bf16)
    number = "bf16" if precision.param_dtype in ("bf16", "fp16") else "fp32"
    stack = stack_for(precision)
    return Space(
        shape_of(job),
        job.data.seq_len,
        job.train.global_batch_size,
        cluster,
        stack,
        margin,
        number=number,
        unsplit=unsplit(job),
    )


def unsplit(job: Job) -> dict[str, str]:
    """Axes over which the job's model cannot be split, not even over two ranks, and why."""
    model = build_on_meta(read_config(job.model), torch.bfloat16)
    anatomy, refused = read_anatomy(model), {}
    for axis in ("tp", "cp", "pp", "ep"):
        parallel = Parallel().model_copy(update={axis: 2})
        plan = job.plan.model_copy(update={"parallel": parallel, "pipeline": Pipeline()})
        try:
            check_axes(model, anatomy, plan.resolve(2))
        except WeftError as error:
            refused[axis] = error.what
    return refused


def shape_of(job: Job) -> Shape:
    """Of the job's model."""
    config: transformers.PretrainedConfig = read_config(job.model)
    return from_config(config.get_text_config().to_dict())


def type_of(cluster: ClusterSpec) -> str:
    """What torch calls its devices."""
    name = cluster.device.name
    return "cpu" if name == "CPU" else "npu" if name.startswith("Ascend") else "cuda"


def dry_run(job: Job, space: Space, choice: Choice, limit: float) -> tuple[list[Trace], str, float]:
    """Dry runs of the first, the last and the fullest stage; why the layout cannot be, if so; its bytes, if above the limit."""
    run = planned(job, space, choice.layout)
    try:
        traces = trace_in_brief(run, choice.layout.num_devices, type_of(space.cluster), choice.memory.stage)
    except PlanError as error:
        return [], error.what, 0.0
    peak = max(found.count.peak for found in traces) * space.stack.reserve + choice.memory.framework
    if peak > limit:
        return [], f"{peak / GIB:,.1f} GiB of {limit / GIB:,.1f}, as a dry run counts", peak
    return traces, "", 0.0


def nothing_fits(space: Space, least: float) -> PlanError:
    """The error that says what would do."""
    if not space.bounds:
        shape = space.shape
        return PlanError(
            f"no layout fills {in_words(space.cluster)}",
            where="weft plan",
            rule="degrees divide the devices, and what they split: "
            f"a batch of {space.global_batch} rows, {space.seq} tokens, {shape.heads} heads, {shape.layers} layers",
            fix="take another number of devices, or a global batch that has more divisors",
        )
    enough = fewest_devices(space)
    needs = f", the leanest layout needs {least / GIB:,.0f} GiB" if math.isfinite(least) and least else ""
    return PlanError(
        f"no layout fits on {in_words(space.cluster)}: {space.budget / GIB:,.0f} GiB a device can be filled{needs}",
        where="weft plan",
        rule="states, activations and buffers of a rank fit into its device",
        fix=f"take {enough[0].num_devices} devices, with {describe(enough[1])}"
        if enough
        else "take devices with more memory, a larger global batch, or a smaller model",
    )


def describe(choice: Choice) -> str:
    """A layout in one line."""
    layout = choice.layout
    parts = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep", "dp") if getattr(layout, name) > 1]
    if layout.ulysses > 1:
        parts.append(f"heads over {layout.ulysses} of cp")
    parts.append(f"zero {layout.zero}" + (f" over {layout.shard}" if layout.shard else ""))
    parts.append(f"micro-batch {layout.micro_batch}")
    if layout.pp > 1:
        parts.append(layout.schedule + (f" x {layout.vpp}" if layout.vpp > 1 else ""))
    if again := ", ".join(RECOMPUTE[layout.recompute]):
        every = round(1 / layout.recompute_share)
        parts.append(f"recompute {again}" + (f" of one in {every}" if every > 1 else ""))
    parts += ["offload block"] * layout.offload + ["optimizer on host"] * layout.optimizer_on_host
    return ", ".join(parts)
