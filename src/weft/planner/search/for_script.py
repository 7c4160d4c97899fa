"""Plan of a model that a script trains: the search of `weft plan`, within what the script means.

A script fixes its micro-batch, and its global batch by the number of processes. Layouts with one data rank per process come
first. Only if none of them fits in memory, ranks share rows: then the global batch becomes smaller. Memory is predicted by
formula; where it is scarce, activations are counted by dry runs. No dry run confirms the layout: therefore only full blocks are
recomputed, and pipelines run 1F1B, which takes any number of micro-batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.errors import ModelError, PlanError, Refusal, WeftError, raise_if_refused
from weft.job import Data, Job, Model
from weft.parallel.choices import check_axes
from weft.plan import BYTES, Compute, Kernels, Parallel, Plan, Precision, ResolvedPlan, resolve_plan
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.costmodel.shape import Shape, from_config, model_state_bytes_of
from weft.planner.costmodel.timeline import head_cost
from weft.planner.search.options import MEMORY_OPTIONS, Degrees, ExpertOptions, MemoryOptions
from weft.planner.search.propose import describe, simplest_first, with_simplest
from weft.planner.search.search import search
from weft.planner.search.space import MARGIN, Choice, Space, divisors
from weft.planner.search.space_of_job import refused_axes, type_of
from weft.planner.search.strategy import cluster_text, plan_of, stack_for

CANDIDATES = 5  # layouts of a search that are checked one by one
FORMULA_ERROR = 0.3  # of activations without recompute; within it, they are counted by dry runs
STATES_SHARE = 0.5  # share of a device's memory that states may fill where the size of activations is not known
TOLERANCE = 0.1  # relative difference between the parameters of a model and those of its shape
ROUNDING = 64  # the length of rows is rounded up to a multiple of 64 tokens, which usual tp and cp degrees divide


Count = Callable[[Job, str, bool], LayerActivations | None]
"""Function such as `count_activations`."""


WITH_LOGITS = Compute(kernels=Kernels(linear_cross_entropy="reference"))
"""Operators of a script, whose own code computes the loss."""


@dataclass(frozen=True)
class ScriptModel:
    """Model of a script, and how the script trains it."""

    model: Any
    """Model, with its weights; the base of a PEFT model."""
    parameters: int
    trained: int
    """Number of parameters that are trained."""
    precision: Precision
    """Dtypes, without "auto"."""
    micro_batch: int
    """Sequences per micro-batch of a data rank."""
    accumulation: int
    """Micro-batches per step."""
    tokens: int
    """Tokens per sequence."""
    check: Callable[[ResolvedPlan], None]
    """Raises a WeftError for a plan that the script cannot run under."""
    references: int = 0
    """Parameters of further models that are not trained."""
    reserved: int = 0
    """Bytes per device of a full copy of the model that generates."""
    recomputes: bool = False
    """True if the script itself recomputes blocks."""
    one_data_rank_each: bool = False
    """True if the script has read the number of data ranks already."""


@dataclass(frozen=True)
class ScriptPlan:
    """Plan for a script, and why it was chosen."""

    plan: Plan
    """Plan; its forward dtype is that of the script."""
    layout: str
    """Layout as text."""
    reason: str
    data_ranks: int


def plan_script(script: ScriptModel, cluster: ClusterSpec, count: Count) -> ScriptPlan:
    """Choose the plan of a script.

    Args:
        cluster: devices of the ranks; all are used.
        count: counts activations by dry runs; called if by formula nothing fits, or only narrowly.

    Raises:
        PlanError: no plan that the script can run under fits in memory.
    """
    raise_if_refused(_reason_against_start(script, cluster))
    found = _priced(script)
    if isinstance(found, str):
        return _by_bytes(script, cluster, found)
    shape, anatomy = found
    least = 0.0
    counted: dict[bool, LayerActivations | None] = {}
    for space in _spaces(script, cluster, shape, anatomy):
        space, choices, needed = _searched(script, space, count, counted)
        for choice in choices:
            plan = plan_of(choice.layout, Plan(), head_cost(space, choice.layout))
            if not _refusal(partial(_check, script, anatomy, plan, cluster.num_devices)):
                return _chosen(space, choice, plan, least)
        if not choices:
            least = min(filter(None, (least, needed)), default=0.0)
    raise PlanError(
        f"no plan fits on {cluster_text(cluster)}"
        + (
            f": the smallest needs {least / GIB:,.2f} of {MARGIN * cluster.device.memory / GIB:,.2f} GiB"
            if least
            else ""
        ),
        where="plan = auto",
        rule=f"states, and the activations of {script.micro_batch} x {script.tokens} tokens, fit into the memory of a device"
        + (", with one data rank per process, because the script has read their number" * script.one_data_rank_each),
        fix="use more devices, a smaller batch per device or shorter rows"
        + ("; or a plan file under which ranks share rows, such as [parallel] tp = 2" * script.one_data_rank_each),
    )


def _is_narrow(space: Space, choice: Choice) -> bool:
    """True if a layout would not fit if it needed more memory, by the error of the formulas."""
    fixed = space.stack.framework
    return (choice.memory.total - fixed) * (1 + FORMULA_ERROR) > space.budget - fixed


def _searched(
    script: ScriptModel, space: Space, count: Count, counted: dict[bool, LayerActivations | None]
) -> tuple[Space, list[Choice], float]:
    """Search a space; with activations of dry runs, if by formula nothing fits, or only narrowly.

    Args:
        count: counts activations by dry runs.
        counted: activations counted so far without and with tp; a new count is added.

    Returns:
        The space; the best layouts that fit, the chosen one first; and the minimum bytes of the layouts if none fits.
    """
    shares_rows = space.global_batch < script.micro_batch * script.accumulation * space.cluster.num_devices
    with_tp = shares_rows and "tp" not in space.unsplit
    space = space.with_memory(traced=counted.get(with_tp))
    choices, needed = _best(space)
    if with_tp in counted or not space.bounds or (choices and not _is_narrow(space, choices[0])):
        return space, choices, needed
    config = script.model.config.get_text_config().to_dict()
    data, plan = Data(source="tokens", seq_len=space.seq), Plan(precision=script.precision)
    counted[with_tp] = count(Job(model=Model(config=config), data=data, plan=plan), type_of(space.cluster), with_tp)
    space = space.with_memory(traced=counted[with_tp])
    return space, *_best(space)


def _best(space: Space) -> tuple[list[Choice], float]:
    """Best layouts that fit, the simplest of equal ones first; and the minimum bytes of the layouts if none fits."""
    found = search(space, CANDIDATES)
    return simplest_first(with_simplest(space, found.best) if found.best else [], [])[0], found.least_memory


def _reason_against_start(script: ScriptModel, cluster: ClusterSpec) -> Refusal | None:
    """Reason against a model that a device cannot hold before it is sharded."""
    needed = BYTES[script.precision.update] * script.parameters
    if needed > MARGIN * cluster.device.memory:
        return Refusal(
            f"a model of {script.parameters:,} parameters needs {needed / GIB:,.2f} GiB in {script.precision.update}, and "
            f"{MARGIN * cluster.device.memory / GIB:,.2f} GiB of a {cluster.device.name} are usable",
            where="plan = auto",
            rule="each rank of a script loads the full model before it keeps its shard",
            fix="use devices with more memory; or weft train, whose ranks load their shards alone",
        )
    return None


def _priced(script: ScriptModel) -> tuple[Shape, Anatomy] | str:
    """Dimensions and anatomy of a model that the planner has formulas for; the reason if it has none."""
    name = type(script.model).__name__
    try:
        anatomy = read_anatomy(script.model)
        if not anatomy.is_decoder:  # an encoder or an encoder-decoder
            return f"{name} is no causal language model that the planner can read"
        shape = from_config(script.model.config.get_text_config().to_dict())
    except (AttributeError, TypeError, ValueError, ModelError):  # of a configuration of another kind
        return f"{name} is no causal language model that the planner can read"
    shape = shape if anatomy.head else replace(shape, tied=True)
    frozen = script.parameters - script.trained
    own = script.parameters if frozen < script.trained else frozen  # without adapters
    if not (1 - TOLERANCE) * own <= shape.parameters <= (1 + TOLERANCE) * script.parameters:
        return f"{name} has {own:,} parameters, and its configuration implies {shape.parameters:,}"
    return shape, anatomy


def _spaces(script: ScriptModel, cluster: ClusterSpec, shape: Shape, anatomy: Anatomy) -> Iterator[Space]:
    """Search spaces by number of data ranks, the largest first; with a pipeline, which runs one row per micro-batch, last."""
    world_size = cluster.num_devices
    shares = script.trained / script.parameters, script.references / script.parameters
    stack = stack_for(script.precision, WITH_LOGITS, type_of(cluster), *shares)
    rows = script.micro_batch * script.accumulation
    unsplit: dict[str, str] | None = None
    for data_ranks in [world_size] if script.one_data_rank_each else divisors(world_size)[::-1]:
        if unsplit is None and (anatomy.has_experts or data_ranks < world_size):
            unsplit = refused_axes(Plan(), partial(_check, script, anatomy))
        for has_pipeline in (False, True) if data_ranks < world_size else (False,):
            yield Space(
                shape,
                script.tokens + -script.tokens % ROUNDING,
                rows * data_ranks,
                cluster,
                stack,
                dtype="bf16" if script.precision.param_dtype in ("bf16", "fp16") else "fp32",
                unsplit=unsplit or {},
                micro_batch=1 if has_pipeline else script.micro_batch,
                options=_memory_options(script, cluster),
                # Joint forwards and backwards need the loop of `weft train`.
                expert_options=(ExpertOptions(), ExpertOptions(slots=Parallel().expert_slots)),
                accepts=_acceptance(script, data_ranks, has_pipeline),
                reserved=script.reserved,
            )


def _memory_options(script: ScriptModel, cluster: ClusterSpec) -> list[MemoryOptions]:
    """Memory options for a script; on CPU, host memory is device memory."""
    return [
        options
        for options in MEMORY_OPTIONS
        if options.recompute in ("none", "full")
        and (not script.recomputes or (options.recompute, options.interval) == ("full", 1))
        and not (cluster.device.name == "CPU" and (options.offload or options.optimizer_on_host))
    ]


def _acceptance(script: ScriptModel, data_ranks: int, has_pipeline: bool) -> Callable[[Degrees], bool]:
    """Function that is true for degrees with a number of data ranks that the script can run under."""
    known: dict[tuple[int, ...], bool] = {}

    def accepts(degrees: Degrees) -> bool:
        if degrees.dp != data_ranks or (degrees.pp > 1) != has_pipeline or degrees.schedule != "1f1b":
            return False
        key = degrees.tp, degrees.cp, degrees.pp, degrees.ep, degrees.zero
        if key not in known:
            degrees_of_plan = {axis: getattr(degrees, axis) for axis in ("tp", "cp", "pp", "ep", "zero")}
            parallel = Parallel().model_copy(update=degrees_of_plan)
            world_size = degrees.dp * degrees.tp * degrees.cp * degrees.pp
            known[key] = not _refusal(
                partial(script.check, resolve_plan(Plan(parallel=parallel), world_size, native_bf16=True))
            )
        return known[key]

    return accepts


def _check(script: ScriptModel, anatomy: Anatomy, plan: Plan, world_size: int = 2) -> None:
    """Refuse a plan that the model or the script cannot run under.

    Raises:
        WeftError: see `check_axes` and `ScriptModel.check`.
    """
    resolved = resolve_plan(plan, world_size, native_bf16=True)
    script.check(resolved)
    with torch.random.fork_rng(devices=[]):  # the other ranks do not run these checks
        check_axes(script.model, anatomy, resolved, None, script.micro_batch * script.accumulation)


def _refusal(check: Callable[[], object]) -> str:
    """Text of the WeftError that a check raises; "" without one."""
    try:
        check()
    except WeftError as error:
        return error.what
    return ""


def _chosen(space: Space, choice: Choice, plan: Plan, least: float) -> ScriptPlan:
    """Plan of a layout of a search.

    Args:
        choice: the layout.
        least: minimum bytes of the layouts with more data ranks, none of which fits; 0: there are none.
    """
    share = space.cluster.num_devices // choice.layout.dp
    how = "with activations of dry runs" if space.traced else "by formula"
    memory = f"{choice.memory.total / GIB:,.2f} of {space.budget / GIB:,.2f} GiB per device {how}"
    reason = f"the fastest plan that fits with one data rank per process: {memory}"
    if share > 1:
        smallest = f" (the smallest needs {least / GIB:,.2f} GiB)" if least else ""
        reason = f"no plan with more data ranks fits{smallest}, so that {share} ranks share rows: {memory}"
    return ScriptPlan(plan, f"{describe(choice)} on {cluster_text(space.cluster)}", reason, choice.layout.dp)


def _by_bytes(script: ScriptModel, cluster: ClusterSpec, why: str) -> ScriptPlan:
    """Lowest ZeRO stage whose states leave memory for activations, whose size is not known.

    Args:
        cluster: devices of the ranks.
        why: reason why the planner cannot price the model.

    Raises:
        PlanError: not even ZeRO 3 fits, or the script can run under no stage.
    """
    ranks, memory = cluster.num_devices, cluster.device.memory
    shares = script.trained / script.parameters, script.references / script.parameters
    stack = stack_for(script.precision, WITH_LOGITS, type_of(cluster), *shares)
    refused = ""
    for zero in (0, 1, 2, 3) if ranks > 1 else (0,):
        plan = Plan(parallel=Parallel(zero=zero))
        if refusal := _refusal(
            partial(script.check, resolve_plan(plan, ranks, native_bf16=cluster.device.native_bf16))
        ):
            refused = f"; {refusal}"
            continue
        weights = 0.0 if zero == 3 and not stack.shards_hold_copy else stack.weight_bytes
        states = model_state_bytes_of(
            script.parameters, zero, ranks, weights, stack.gradient_bytes, stack.optimizer_bytes
        )
        last = zero == 3 or ranks == 1
        if states + stack.framework + script.reserved <= (MARGIN if last else STATES_SHARE) * memory:
            reason = (
                f"{why}; the lowest ZeRO stage by exact bytes, whose states leave memory for activations: "
                f"{states / GIB:,.2f} of {memory / GIB:,.2f} GiB per device"
            )
            return ScriptPlan(plan, f"zero {zero}, dp {ranks} on {cluster_text(cluster)}", reason, ranks)
    raise PlanError(
        f"the states of {type(script.model).__name__} with {script.parameters:,} parameters do not fit on "
        f"{cluster_text(cluster)} under any ZeRO stage{refused}",
        where="plan = auto",
        rule=f"{why}; parameters, gradients and optimizer states of a rank fit into the memory of its device",
        fix="use more devices, or devices with more memory",
    )
