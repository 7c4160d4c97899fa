"""Planning for `weft plan`: search the best layouts of a job on a cluster, confirm them by dry runs, and explain the choice."""

import math
from dataclasses import dataclass, replace

from weft.comm.compression.codecs import CODECS
from weft.errors import PlanError, raise_if_refused
from weft.job import Job
from weft.launch.log import log
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout, local_parameters
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.costmodel.roofline import stream
from weft.planner.costmodel.step_time import StepTime
from weft.planner.costmodel.timeline import head_cost, refined
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.dryrun.layer_activations import trace_layers
from weft.planner.dryrun.trace import Trace, trace_stages
from weft.planner.search.alternatives import EQUAL, Alternative, sensitivity
from weft.planner.search.search import fewest_devices, search, simplest, techniques
from weft.planner.search.space import MARGIN, Choice, Space
from weft.planner.search.space_of_job import reason_against_local_device, space_of, type_of
from weft.planner.search.strategy import RECOMPUTE, Cost, cluster_text, cost_of, plan_of

MOST_REFUSED = 8  # maximum number of layouts refused by dry runs; beyond it the formulas are not usable
MEMORY_SHARES = (0.75, 0.5, 0.25)  # shares of a device's memory


@dataclass(frozen=True)
class Proposal:
    """Result of planning."""

    job: Job
    space: Space
    scalar: float
    best: list[Choice]
    """The chosen layout, followed by alternatives, the fastest first. With pp, the bubble is that of the simulated schedule.

    The chosen layout is the one with the fewest techniques among those whose step time is equal to the fastest within the
    planner's uncertainty."""
    costs: list[Cost]
    """Cost of each layout in `best`."""
    traces: list[Trace]
    """Dry runs of the chosen layout; empty if it was not confirmed."""
    refused: list[tuple[Choice, str]]
    """Layouts that are faster by formula but were refused by a dry run or a rule of the runtime, with the reason."""
    alternatives: list[Alternative]
    """Best layouts with another value of one setting."""
    lower_memory: list[Choice]
    """Fastest layouts within 3/4, 1/2 and 1/4 of the device's memory."""
    compressed: dict[str, float]
    """Step time in seconds with compressed gradients, by codec. The effect on the loss is not predicted."""
    fewest: tuple[ClusterSpec, Choice] | None
    """Smallest cluster on which a layout fits, and the fastest layout there."""
    size: int
    """Number of layouts in the space."""
    by_operators: list[StepTime]
    """Step times of the layouts in `best` from timed operators; empty if operators were not timed."""

    @property
    def slower(self) -> list[float]:
        """Predicted step time of each layout in `best`, relative to the chosen one (0: equal)."""
        seconds = seconds_of(self.best, self.by_operators)
        return [time / seconds[0] - 1 for time in seconds]


def planned(job: Job, space: Space, layout: TrainingLayout) -> Job:
    """Job with the plan of a layout."""
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
    by_operators: float | None = None,
) -> Proposal:
    """Search, refine and confirm the best layouts of a job.

    Args:
        job: provides model, sequence length, batch size and dtypes; the layout of its plan is ignored.
        cluster: cluster to run on; all devices are used.
        scalar: measured / predicted step time of this machine.
        margin: share of a device's memory that a plan may fill.
        count: number of layouts to return.
        confirm: True to confirm the best layout by a dry run, and the next one if its memory does not fit.
        failure_hours: mean time between failures of one device; 0: no failures.
        by_operators: if not None, time the operators of the best layouts on the local device and order the layouts by the
            result; the value is measured / predicted step time for predictions from timed operators.

    Raises:
        DeviceError: operators cannot be timed here, because the cluster has devices of another type.
        PlanError: no layout fits; the error names the smallest cluster on which a layout fits.
    """
    job = job.model_copy(update={"plan": job.plan.with_dtypes(cluster.device.native_bf16)})
    space = space_of(job, cluster, margin)
    if by_operators is not None:
        raise_if_refused(reason_against_local_device(type_of(cluster), cluster_text(cluster)))
    if not space.bounds:
        raise nothing_fits(space, 0.0)
    if confirm:
        log("counting the activations of a layer by dry runs")
        space = space.with_memory(traced=trace_layers(job, type_of(cluster), with_tp="tp" not in space.unsplit))
    log("searching layouts")
    found = search(space, max(count, 3))
    if not found.best:
        raise nothing_fits(space, found.least_memory)
    log(f"{found.size:,} layouts, step time predicted for {found.timed:,} of them")
    size, shown = found.size, max(count, 3)
    best, times, refused = shortlist(job, space, found.best, by_operators)
    traces: list[Trace] = []
    if confirm:
        space, best, times, traces = _confirm(job, space, best, times, refused, shown, by_operators)
    if not best or (confirm and not traces):
        raise PlanError(
            f"none of the {len(refused)} best layouts passes its dry run: {refused[0][1]}",
            where="weft plan",
            fix="use more devices, or devices with more memory",
        )
    log("searching layouts with another value of each setting")
    alternatives = [
        alternative._replace(choice=refine(space, alternative.choice)) if alternative.choice else alternative
        for alternative in sensitivity(space, best[0])
    ]
    if not times:
        # The search ranks pipelines by a formula; in simulation, layouts with another value of a setting may be faster.
        nearby = [alternative.choice for alternative in alternatives if alternative.choice]
        best = best[:1] + nearest([*best[1:], *nearby], [choice for choice, _ in refused])
    best, times = best[:shown], times[:shown]
    return Proposal(
        job,
        space,
        scalar,
        best,
        [cost_of(space.shape, choice.layout, choice.time.seconds, cluster, failure_hours, scalar) for choice in best],
        traces,
        refused,
        alternatives=alternatives,
        lower_memory=lower_memory_layouts(space, best[0]),
        compressed=compressed_steps(space, best[0].layout),
        fewest=fewest_devices(space),
        size=size,
        by_operators=times,
    )


def _confirm(
    job: Job,
    space: Space,
    best: list[Choice],
    times: list[StepTime],
    refused: list[tuple[Choice, str]],
    count: int,
    by_operators: float | None,
) -> tuple[Space, list[Choice], list[StepTime], list[Trace]]:
    """Dry-run layouts, the first one first, until one passes.

    Args:
        job, by_operators: as for `propose`.
        space: search space.
        best: layouts in the order of `simplest_first`.
        times: their step times from timed operators; may be empty.
        refused: layouts that are refused, with the reason; it gets those that do not pass.
        count: number of layouts to search.

    Returns:
        The space, with less memory if the formulas underestimate it; the layouts that are left, and their times; and the traces
        of the first one, empty if none passes.
    """
    limit = space.budget
    while best and len(refused) < MOST_REFUSED:
        log(f"dry run of {describe(best[0])}")
        traces, why, peak = dry_run(job, space, best[0], limit)
        if not why:
            return space, best, times, traces
        first = best[0]
        refused.append((first, why))
        best, times = simplest_first(best[1:], times[1:])
        if peak:
            # The formulas underestimate similar layouts too: search again with the budget reduced by the same ratio.
            fixed = first.memory.framework
            budget = fixed + (limit - fixed) * (first.memory.total - fixed) / (peak - fixed)
            narrower = space.with_memory(margin=budget / space.cluster.device.memory)
            if lower_memory := search(narrower, count).best:
                space, (best, times, wrong) = narrower, shortlist(job, narrower, lower_memory, by_operators)
                refused += wrong
    return space, best, times, []


def nearest(choices: list[Choice], refused: list[Choice]) -> list[Choice]:
    """Remove duplicates and refused layouts; the fastest first."""
    without = {choice.layout for choice in refused}
    by_layout = {choice.layout: choice for choice in choices if choice.layout not in without}
    return sorted(by_layout.values(), key=lambda choice: choice.time.seconds)


def shortlist(
    job: Job, space: Space, found: list[Choice], by_operators: float | None
) -> tuple[list[Choice], list[StepTime], list[tuple[Choice, str]]]:
    """Refine the layouts of a search: simulate schedules, add the simplest equal layout, time operators, and sort.

    Args:
        job: as for `propose`.
        found: layouts of the search.
        by_operators: as for `propose`.

    Returns:
        The layouts in the order of `simplest_first`, with simulated bubbles; their step times from timed operators, if any; and
        the layouts that were refused, with the reason.
    """
    best = with_simplest(space, found)
    if by_operators is None:
        return *simplest_first(best, []), []
    best, times, refused = time_operators(job, space, best, by_operators)
    return *simplest_first(best, times), refused


def with_simplest(space: Space, found: list[Choice]) -> list[Choice]:
    """Layouts of a search with simulated bubbles, and the simplest layout that is equal to the fastest of them."""
    best = [refine(space, choice) for choice in found]
    simple = simplest(space, min(choice.time.seconds for choice in best) * (1 + EQUAL))
    if simple and all(choice.layout != simple.layout for choice in best):
        best.append(refine(space, simple))
    return best


def simplest_first(best: list[Choice], times: list[StepTime]) -> tuple[list[Choice], list[StepTime]]:
    """Sort layouts by step time, then move the one with the fewest techniques among those equal to the fastest to the front.

    Args:
        best: layouts.
        times: step times from timed operators in the same order; may be empty.
    """
    if not best:
        return best, times
    seconds = seconds_of(best, times)
    order = sorted(range(len(best)), key=seconds.__getitem__)
    equal = [index for index in order if seconds[index] < seconds[order[0]] * (1 + EQUAL)]
    chosen = min(equal, key=lambda index: (techniques(best[index].layout), seconds[index]))
    order.remove(chosen)
    order.insert(0, chosen)
    return [best[index] for index in order], [times[index] for index in order] if times else []


def seconds_of(best: list[Choice], times: list[StepTime]) -> list[float]:
    """Step time of each layout: from timed operators if there are any, otherwise by formula."""
    return [time.seconds for time in times or (choice.time for choice in best)]


def refine(space: Space, choice: Choice) -> Choice:
    """Layout with the bubble of the simulated schedule instead of the formula's."""
    return choice._replace(time=refined(space, choice.layout, choice.time))


def lower_memory_layouts(space: Space, best: Choice) -> list[Choice]:
    """Fastest layouts within smaller shares of a device's memory, in descending order of memory."""
    found: list[Choice] = []
    for share in MEMORY_SHARES:
        budget = share * space.cluster.device.memory
        if budget >= (found or [best])[-1].memory.total:
            continue  # the previous layout fits here too
        found += [refine(space, choice) for choice in search(space.with_memory(margin=share), 1).best]
    return found


def compressed_steps(space: Space, layout: TrainingLayout) -> dict[str, float]:
    """Step time in seconds with compressed gradients, by codec; empty without data parallelism.

    The codec reads and writes each gradient element of the rank in float32, three times with error feedback.
    """
    if layout.dp * layout.cp == 1:
        return {}
    coding = stream(space.cluster.device, 6 * 4 * sum(local_parameters(space.shape, layout, 0)))
    found = {}
    for name, codec in CODECS.items():
        if name != "1-bit":  # requires its own optimizer
            other = replace(space, stack=replace(space.stack, reduce_bytes=codec.bytes_per_element))
            found[name] = coding + refined(other, layout, other.time(layout)).seconds
    return found


def time_operators(
    job: Job, space: Space, best: list[Choice], scalar: float
) -> tuple[list[Choice], list[StepTime], list[tuple[Choice, str]]]:
    """Time the operators of layouts on the local device.

    Returns:
        The layouts sorted by the resulting step time, these step times, and the refused layouts with the reason.
    """
    timed: list[tuple[Choice, StepTime]] = []
    refused: list[tuple[Choice, str]] = []
    for choice in best:
        log(f"timing the operators of {describe(choice)}")
        run = planned(job, space, choice.layout)
        try:
            traces = trace_stages(run, choice.layout.num_devices, type_of(space.cluster))
        except PlanError as error:
            refused.append((choice, error.what))
            continue
        time = time_step(run, traces, space.cluster, choice.time, log)
        timed.append((choice, StepTime(**{name: value * scalar for name, value in vars(time).items()})))
    timed.sort(key=lambda pair: pair[1].seconds)
    return [choice for choice, _ in timed], [time for _, time in timed], refused


def dry_run(job: Job, space: Space, choice: Choice, limit: float) -> tuple[list[Trace], str, float]:
    """Dry-run the first, the last and the fullest pipeline stage of a layout.

    Returns:
        The traces; the reason why the layout is refused, or ""; and its peak bytes if they exceed `limit`, otherwise 0.
    """
    run = planned(job, space, choice.layout)
    try:
        traces = trace_in_brief(run, choice.layout.num_devices, type_of(space.cluster), choice.memory.stage)
    except PlanError as error:
        return [], error.what, 0.0
    peak = max(found.count.peak for found in traces) * space.stack.reserve + choice.memory.framework
    if peak > limit:
        return [], f"the dry run needs {peak / GIB:,.1f} GiB of {limit / GIB:,.1f} GiB", peak
    return traces, "", 0.0


def nothing_fits(space: Space, least: float) -> PlanError:
    """Error for a search without a result; names the smallest cluster on which a layout fits."""
    if not space.bounds:
        shape = space.shape
        return PlanError(
            f"no combination of degrees uses all devices of {cluster_text(space.cluster)}",
            where="weft plan",
            rule="the degrees divide the number of devices and the dimensions that they split: "
            f"a global batch of {space.global_batch} rows, {space.seq} tokens, {shape.heads} heads, {shape.layers} layers",
            fix="use another number of devices, or a global batch size with more divisors",
        )
    enough = fewest_devices(space)
    needs = f", the smallest layout needs {least / GIB:,.0f} GiB" if math.isfinite(least) and least else ""
    return PlanError(
        f"no layout fits on {cluster_text(space.cluster)}: {space.budget / GIB:,.0f} GiB per device are usable{needs}",
        where="weft plan",
        rule="states, activations and buffers of a rank fit into the memory of its device",
        fix=f"use {enough[0].num_devices} devices, with {describe(enough[1])}"
        if enough
        else "use devices with more memory, a larger global batch size, or a smaller model",
    )


def describe(choice: Choice) -> str:
    """Layout as one line of text."""
    layout = choice.layout
    parts = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep", "dp") if getattr(layout, name) > 1]
    if layout.ulysses > 1:
        parts.append(f"ulysses {layout.ulysses}")
    parts.append(f"zero {layout.zero}" + (f" over {layout.shard}" if layout.shard else ""))
    parts.append(f"micro-batch {layout.micro_batch}")
    if layout.pp > 1:
        parts.append(layout.schedule + (f" x {layout.vpp}" if layout.vpp > 1 else ""))
    parts += ["joint experts"] * (layout.joint_experts and layout.pp == 1)
    parts += [f"replicas in {layout.expert_slots} slots"] * (layout.expert_slots > 0)
    if recomputed := ", ".join(RECOMPUTE[layout.recompute]):
        interval = round(1 / layout.recompute_share)
        parts.append(f"recompute {recomputed}" + (f" every {interval} blocks" if interval > 1 else ""))
    parts += ["offload block"] * layout.offload + ["optimizer on host"] * layout.optimizer_on_host
    return ", ".join(parts)
