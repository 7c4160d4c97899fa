"""Plans of models without formulas: encoders, encoder-decoders, models of images and text or of diffusion, and distillations.

The formulas of the search (`space.py`) are those of causal language models that train alone. Here every candidate is dry-run:
memory, messages and operators are counted exactly, and priced by the rooflines and links of the cluster. Candidates are all
products of tp, pp and recompute of blocks; each has the lowest ZeRO stage that fits, which sends the fewest bytes. What cannot
fit, because it does not with recompute of blocks, is not dry-run. The micro-batch is that of the job.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch

from weft.adapters.model import build_model
from weft.anatomy.transformers import read_any_anatomy
from weft.data import RowSplit
from weft.errors import JobError, WeftError
from weft.job import DISTILLATION, Job, ResolvedJob, with_plan
from weft.launch.log import log
from weft.plan import Plan, Prediction, ResolvedPlan, resolve_plan
from weft.planner.costmodel import network
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.operator_roofline import roofline_seconds
from weft.planner.costmodel.operator_timing import measured_step
from weft.planner.costmodel.shape import model_state_bytes_of
from weft.planner.costmodel.step_time import StepTime
from weft.planner.dryrun.assumed import assumed_row
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.dryrun.trace import Trace, trace_stages
from weft.planner.search.space_of_job import type_of
from weft.planner.search.strategy import cluster_text, stack_for

STAGES = (1, 2, 4)
"""Numbers of pipeline stages that are tried."""


@dataclass(frozen=True)
class Candidate:
    """Plan with its dry runs."""

    plan: ResolvedPlan
    traces: list[Trace]
    time: StepTime
    memory: float
    """Bytes that the fullest rank reserves."""


@dataclass(frozen=True)
class DryRunProposal:
    """Result of the search."""

    job: Job
    cluster: ClusterSpec
    parameters: int
    targets: int
    """Targets of a step."""
    best: list[Candidate]
    """Fastest first."""
    refused: dict[str, str]
    """Reason by candidate, in words."""


def why_no_formulas(job: Job) -> str:
    """Setting of a job whose plans are searched by dry runs; "" for one that has formulas."""
    if job.task.kind != "causal":
        return f"task.kind = {job.task.kind!r}"
    return f"train.loss = {job.train.loss!r}" if job.train.loss == DISTILLATION else ""


def propose_by_dry_run(job: Job, cluster: ClusterSpec, scalar: float, margin: float, count: int) -> DryRunProposal:
    """Search the plan with the shortest step.

    Args:
        job: job without formulas, see `why_no_formulas`; its plan gives all settings that are not searched.
        cluster: devices and links.
        scalar: ratio of measured to predicted step times of this cluster.
        margin: share of the device memory that a plan may use.
        count: number of plans to return.

    Raises:
        JobError: no candidate fits in memory.
    """
    model = build_model(job, torch.float32)
    parameters = read_any_anatomy(model, needs_roles=False).parameters
    row = assumed_row(job, model)
    targets = job.data.seq_len if row is None else row.targets.numel()
    stack = stack_for(job.plan.precision, job.plan.compute, type_of(cluster))
    budget = margin * cluster.device.memory
    found: list[Candidate] = []
    too_large: list[ResolvedPlan] = []
    impossible: set[tuple[int, int]] = set()
    refused: dict[str, str] = {}
    for candidate in candidates(job, cluster):
        name = describe(candidate)
        p = candidate.parallel
        if (p.tp, p.pp) in impossible:
            continue
        if any(same_but(candidate, other.plan, "zero", "dp_shard") for other in found):
            continue  # with a lower ZeRO stage, it sends fewer bytes
        alike = [one for one in found if same_but(candidate, one.plan, "zero", "dp_shard", "tp")]
        seconds = {one.plan.parallel.tp: one.time.seconds for one in alike}
        if len(seconds) > 1 and seconds[max(seconds)] > seconds[min(seconds)]:
            refused[name] = f"tp {max(seconds)} is slower than tp {min(seconds)}"
            continue
        least = model_state_bytes_of(parameters / (p.tp * p.pp), p.zero, p.data_ranks, 4, 4, 8)
        if least > 1.5 * budget:  # weights outside of blocks are not split evenly, so that this is no lower bound
            refused[name] = f"model states alone take {least / GIB:.0f} GiB on each device"
            continue
        if any(candidate == without_recompute(plan) for plan in too_large):
            refused[name] = "does not fit with recompute of blocks either"
            continue
        log(f"dry run of {name}")
        try:
            one = dry_run(with_plan(job, candidate), cluster, stack.reserve, stack.overlap_slowdown)
        except WeftError as error:
            refused[name] = error.what
            if (error.where or "").startswith(("plan.parallel.tp", "plan.parallel.pp")):
                impossible.add((p.tp, p.pp))  # under every ZeRO stage, with and without recompute
            continue
        if one.memory > budget:
            refused[name] = f"a rank needs {one.memory / GIB:.1f} GiB of {budget / GIB:.1f} GiB"
            too_large.append(candidate)
            continue
        log(f"{name}: {one.time.seconds * scalar:.3g} s, {one.memory / GIB:.1f} GiB")
        found.append(replace(one, time=StepTime(*(scalar * value for value in vars(one.time).values()))))
    if not found:
        raise JobError(
            f"no plan of a model of {parameters / 1e9:.3g} billion parameters fits on {cluster_text(cluster)}",
            where="weft plan",
            rule="; ".join(f"{name}: {why}" for name, why in list(refused.items())[:3]),
            fix="use more devices, devices with more memory, or a smaller train.micro_batch_size",
        )
    best = sorted(found, key=lambda one: one.time.seconds)[:count]
    return DryRunProposal(job, cluster, parameters, job.train.global_batch_size * targets, best, refused)


def candidates(job: Job, cluster: ClusterSpec) -> list[ResolvedPlan]:
    """Plans to try: of each combination of degrees those with recompute first, and the lowest ZeRO stage first."""
    devices, rows = cluster.num_devices, job.train.global_batch_size
    degrees = [2**power for power in range(cluster.per_host.bit_length()) if cluster.per_host % 2**power == 0]
    plans = []
    for tp, pp, blocks, zero in product(degrees, STAGES, (("block",), ()), (0, 1, 2, 3)):
        if devices % (tp * pp) or devices // (tp * pp) > rows:
            continue
        update = {"tp": tp, "sp": False, "pp": pp, "zero": zero, "cp": 1, "cp_ulysses": 1, "dp_shard": -1}
        parallel = job.plan.parallel.model_copy(update={**update, "dp_replicate": 1})
        memory = job.plan.memory.model_copy(update={"recompute": blocks})
        given = job.plan.model_copy(update={"parallel": parallel, "memory": memory})
        plan = resolve_plan(given, devices, native_bf16=cluster.device.native_bf16)
        if zero == 0 or plan.parallel.data_ranks > 1:
            plans.append(plan)
    return plans


def without_recompute(plan: ResolvedPlan) -> ResolvedPlan:
    """The plan with all activations saved."""
    return plan.model_copy(update={"memory": plan.memory.model_copy(update={"recompute": ()})})


def same_but(plan: ResolvedPlan, other: Plan, *axes: str) -> bool:
    """True if two plans differ in some keys of plan.parallel alone."""
    update = {axis: getattr(plan.parallel, axis) for axis in axes}
    return plan == other.model_copy(update={"parallel": other.parallel.model_copy(update=update)})


def dry_run(job: ResolvedJob, cluster: ClusterSpec, reserve: float, slowdown: float) -> Candidate:
    """Count and price a step of a plan.

    Args:
        cluster: devices and links.
        reserve: ratio of reserved to allocated bytes.
        slowdown: of computation that gathers and reductions of gradients overlap with.

    Raises:
        WeftError: the plan does not fit the model.
    """
    device, devices, kind = cluster.device, cluster.num_devices, type_of(cluster)
    is_pipeline = job.plan.parallel.pp > 1
    traces = trace_stages(job, devices, kind) if is_pipeline else trace_in_brief(job, devices, kind)
    operations = {operation._replace(phase="") for trace in traces for operation in trace.count.operations}
    seconds = {operation: roofline_seconds(operation, device) for operation in operations}
    time = measured_step(traces, seconds, cluster, RowSplit.of_job(job).num_micro_batches)
    if not device.cores:  # an accelerator sends while it computes
        time = replace(time, gradients=network.exposed(time.gradients, time.compute, slowdown))
    return Candidate(job.plan, traces, time, reserve * max(trace.count.peak for trace in traces))


def plan_with_prediction(found: DryRunProposal, one: Candidate) -> Plan:
    """Plan of a candidate with its prediction."""
    prediction = Prediction(
        cluster=cluster_text(found.cluster),
        micro_batch=found.job.train.micro_batch_size,
        step_seconds=one.time.seconds,
        terms={name: value for name, value in vars(one.time).items() if value},
        tokens_per_second=found.targets / one.time.seconds,
        memory_bytes=int(max(trace.count.peak for trace in one.traces)),
        memory=dict(one.traces[0].count.peak_bytes),
        sent_bytes=one.traces[0].count.sent_bytes(),
    )
    return one.plan.model_copy(update={"prediction": prediction})


def describe(plan: ResolvedPlan) -> str:
    """Plan as one line of text."""
    p = plan.parallel
    parts = [f"{name} {getattr(p, name)}" for name in ("tp", "pp") if getattr(p, name) > 1]
    parts += [f"dp {p.data_ranks}", f"zero {p.zero}"]
    return ", ".join(parts + ["recompute block"] * bool(plan.memory.recompute))
