"""Planning for a cluster of unlike hosts: the layout, the order of hosts, the rows of data ranks and the blocks of stages.

Each layout of the search space is placed on the hosts in each order (`costmodel/unlike.py`); like hosts get equal shares. Which
axis crosses the links between hosts follows from the degrees. Layouts are visited in the order of `Space.bounds`, up to
`MOST_DEGREES` combinations of degrees; those whose bound, by the sum of all speeds, is above the best ones are skipped.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import DeviceError, PlanError, Refusal, raise_if_refused
from weft.job import Job
from weft.launch.log import log
from weft.plan import Plan, Prediction
from weft.planner.costmodel.cluster_file import HostGroup
from weft.planner.costmodel.hardware import GIB
from weft.planner.costmodel.unlike import Placement, place
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.dryrun.trace import Trace
from weft.planner.search.alternatives import EQUAL
from weft.planner.search.options import Degrees
from weft.planner.search.search import search, techniques
from weft.planner.search.space import MARGIN, Space
from weft.planner.search.space_of_job import space_of, type_of
from weft.planner.search.strategy import cluster_text, matmul_dtype, plan_of

MOST_DEGREES = 2000
MOST_REFUSED = 8
SLACK = 0.9  # unequal stages can be more even than the equal ones of a bound


@dataclass(frozen=True)
class UnlikeProposal:
    """Result of planning for unlike hosts."""

    job: Job
    groups: tuple[HostGroup, ...]
    best: list[Placement]
    """The chosen placement, followed by others, the fastest first."""
    equal: Placement
    """The layout of the chosen placement with equal rows and blocks."""
    alone: dict[str, float]
    """Seconds of the fastest step on each group of hosts alone; infinite if no layout fits there."""
    traces: list[Trace]
    """Dry runs of the chosen placement; empty if it was not confirmed."""


def propose_unlike(
    job: Job,
    groups: Sequence[HostGroup],
    margin: float = MARGIN,
    count: int = 5,
    confirm: bool = True,
) -> UnlikeProposal:
    """Find the fastest placements of a job on unlike hosts.

    Args:
        job: provides model, sequence length, batch size and dtypes; the layout of its plan is ignored.
        groups: groups of like hosts.
        margin: share of a device's memory that a plan may fill.
        count: number of placements to return.
        confirm: True to confirm the best placement by a dry run, and the next one if its memory does not fit.

    Raises:
        DeviceError: the hosts have devices of several types, or different numbers of devices.
        PlanError: no layout fits.
    """
    raise_if_refused(_reason_against_groups(groups))
    job = job.model_copy(
        update={"plan": job.plan.with_dtypes(all(group.cluster.device.native_bf16 for group in groups))}
    )
    first_space, precision = space_of(job, groups[0].cluster, margin), job.plan.precision
    alone_spaces = {
        group.name: replace(first_space, cluster=group.cluster, dtype=matmul_dtype(precision, group.cluster.device))
        for group in groups
    }
    hosts = sum(group.cluster.hosts for group in groups)
    spaces = {name: replace(space, cluster=replace(space.cluster, hosts=hosts)) for name, space in alone_spaces.items()}
    budgets = {name: space.budget for name, space in spaces.items()}
    roomiest = spaces[max(budgets, key=lambda name: budgets[name])]
    found = _placements(groups, spaces, roomiest, budgets, count)
    if not found:
        raise PlanError(
            f"no layout fits on {text_of(groups)}",
            where="weft plan",
            rule="each rank fits into the memory of its device; tp x cp, and ep, are among hosts of one kind",
            fix="use devices with more memory, a larger global batch size, or a smaller model",
        )
    log(f"{len(found):,} placements fit")
    found.sort(key=lambda placed: placed.seconds)
    limit = found[0].seconds * (1 + EQUAL)
    first = min((placed for placed in found if placed.seconds <= limit), key=_complexity)
    by_identity = {_identity(first): first}
    for placed in found:
        by_identity.setdefault(_identity(placed), placed)
    best = list(by_identity.values())
    traces: list[Trace] = []
    for refused in range(MOST_REFUSED if confirm else 0):
        log(f"dry run of {describe(best[0])}")
        traces, why = dry_run(job, best[0], budgets, roomiest)
        if not why:
            break
        log(f"refused: {why}")
        del best[0]
        if not best or refused == MOST_REFUSED - 1:
            raise PlanError(
                f"none of the {refused + 1} best placements passes its dry run: {why}",
                where="weft plan",
                fix="use devices with more memory",
            )
    equal = place(best[0].layout, best[0].order, spaces, equal=True)
    assert equal is not None
    alone = {}
    for group in groups:
        fastest = search(alone_spaces[group.name], 1).best
        alone[group.name] = fastest[0].time.seconds * group.scalar if fastest else math.inf
    return UnlikeProposal(job, tuple(groups), best[:count], equal, alone, traces)


def _placements(
    groups: Sequence[HostGroup], spaces: Mapping[str, Space], roomiest: Space, budgets: dict[str, float], count: int
) -> list[Placement]:
    """Placements that fit, except of degrees that are slower than the best `count` whatever the layout is."""
    found: list[Placement] = []
    for bound, degrees in roomiest.bounds[:MOST_DEGREES]:
        limit = sorted(placed.seconds for placed in found)[count - 1] if len(found) >= count else math.inf
        if degrees.vpp > 1 or bound * _least_share(degrees, roomiest, groups, spaces) > limit * (1 + EQUAL):
            continue
        options = roomiest.expert_options_of(degrees)
        choices = (choice for experts in options for choice in roomiest.fitting(degrees, experts, math.inf))
        for choice, order in itertools.product(choices, list(itertools.permutations(groups))):
            placed = place(choice.layout, order, spaces)
            if placed and _fits(placed, budgets):
                found.append(placed)
    return found


def _least_share(degrees: Degrees, roomiest: Space, groups: Sequence[HostGroup], spaces: Mapping[str, Space]) -> float:
    """Least step time on the hosts, relative to that on as many devices of `roomiest`: by the sum of all speeds."""
    layout = roomiest.layout(degrees, roomiest.options[0])
    alike = roomiest.layer(layout).total.sum
    speeds = sum(
        group.cluster.num_devices * alike / (spaces[group.name].layer(layout).total.sum * group.scalar)
        for group in groups
    )
    return SLACK * roomiest.cluster.num_devices / speeds


def _reason_against_groups(groups: Sequence[HostGroup]) -> Refusal | None:
    """Reason against hosts that cannot run one job together."""
    types = {group.name: type_of(group.cluster) for group in groups}
    sizes = {group.name: group.cluster.per_host for group in groups}
    for what, values, fix in (
        (
            "devices of type",
            types,
            "plan for hosts with one type of devices: their ranks share one communication library",
        ),
        ("devices on a host:", sizes, "set devices_per_host, and use as many devices of each host"),
    ):
        if len(set(values.values())) > 1:
            return Refusal(
                ", ".join(f"{name} has {what} {value}" for name, value in values.items()),
                where="cluster file",
                rule="the hosts of a job have the same type and number of devices; their speed and memory may differ",
                fix=fix,
                error=DeviceError,
            )
    return None


def _fits(placed: Placement, budgets: dict[str, float]) -> bool:
    names = [group.name for group in placed.order for _ in range(group.cluster.num_devices)]
    inner = placed.layout.tp * placed.layout.cp
    for (stage, part), size in placed.memory.items():
        first = (stage * placed.layout.dp + part) * inner
        if size > min(budgets[name] for name in names[first : first + inner]):
            return False
    return True


def _complexity(placed: Placement) -> tuple[int, float]:
    return techniques(placed.layout), placed.seconds


def _identity(placed: Placement) -> tuple[object, ...]:
    """Layout and shares; without a pipeline, all orders of hosts are the same."""
    rows = placed.rows if placed.layout.pp > 1 else tuple(sorted(placed.rows))
    return replace(placed.layout, micro_batch=1), rows, placed.blocks, placed.num_micro_batches


def planned(job: Job, placed: Placement) -> Job:
    """Job with the plan of a placement."""
    plan = plan_of(placed.layout, job.plan)
    rows = placed.rows if len(set(placed.rows)) > 1 else ()
    blocks = placed.blocks if placed.layout.pp > 1 else ()
    update = {
        "parallel": plan.parallel.model_copy(update={"rows_per_rank": rows}),
        "pipeline": plan.pipeline.model_copy(update={"stage_blocks": blocks, "embedding_cost": 0.0, "head_cost": 0.0}),
    }
    train = job.train.model_copy(update={"micro_batch_size": placed.layout.micro_batch})
    return job.model_copy(update={"plan": plan.model_copy(update=update), "train": train})


def dry_run(job: Job, placed: Placement, budgets: dict[str, float], space: Space) -> tuple[list[Trace], str]:
    """Dry-run the first, the last and the largest stage, on the data rank with the most rows.

    Returns:
        The traces, and the reason why the placement is refused, or "".
    """
    fullest = placed.blocks.index(max(placed.blocks))
    devices, layout = placed.layout.num_devices, placed.layout
    try:
        traces = trace_in_brief(planned(job, placed), devices, type_of(space.cluster), fullest)
    except PlanError as error:
        return [], error.what
    names = [group.name for group in placed.order for _ in range(group.cluster.num_devices)]
    most = placed.rows.index(max(placed.rows)) * layout.tp * layout.cp
    for trace in traces:
        name = names[trace.rank + most]
        peak = trace.count.peak * space.stack.reserve + space.memory(layout).framework
        if peak > budgets[name]:
            return [], f"a rank on {name} needs {peak / GIB:,.2f} GiB of {budgets[name] / GIB:,.2f} GiB"
    return traces, ""


def plan_with_prediction(found: UnlikeProposal) -> Plan:
    """Plan of the chosen placement with its prediction."""
    first = found.best[0]
    run = planned(found.job, first)
    memory = dict(found.traces[0].count.peak_bytes) if found.traces else {}
    peak = max((trace.count.peak for trace in found.traces), default=max(first.memory.values()))
    prediction = Prediction(
        cluster=text_of(found.groups),
        hosts=tuple(group.name for group in first.order for _ in range(group.cluster.hosts)),
        micro_batch=first.layout.micro_batch,
        step_seconds=first.seconds,
        terms=first.terms,
        tokens_per_second=first.layout.global_batch * first.layout.seq / first.seconds,
        memory_bytes=int(peak),
        memory=memory,
        sent_bytes=found.traces[0].count.sent_bytes() if found.traces else {},
    )
    return run.plan.model_copy(update={"prediction": prediction})


def text_of(groups: Sequence[HostGroup]) -> str:
    """Hosts as text."""
    return ", ".join(f"{group.name}: {cluster_text(group.cluster)}" for group in groups)


def describe(placed: Placement) -> str:
    """Placement as one line of text."""
    layout = placed.layout
    parts = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep", "dp") if getattr(layout, name) > 1]
    parts += [f"zero {layout.zero}", f"{placed.num_micro_batches} micro-batches"]
    parts += [f"{layout.schedule}, blocks {list(placed.blocks)}"] * (layout.pp > 1)
    parts += [f"rows {list(placed.rows)}"] * (layout.dp > 1)
    parts += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    parts += ["offload block"] * layout.offload + ["optimizer on host"] * layout.optimizer_on_host
    return ", ".join(parts)
