"""Pipeline schedule of a plan: a named schedule, or a user-defined one from a CSV file. Imports no torch."""

from pathlib import Path

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import WHERE, Schedule, parse_schedule
from weft.parallel.pipeline.schedules import build_schedule, schedule_kind
from weft.parallel.pipeline.simulate import ActionCosts, Timeline, simulate
from weft.parallel.pipeline.verify import verify
from weft.plan import JOINT_SCHEDULES, ResolvedPlan

LARGEST_TABLE = 2**26  # bytes
MOST_MICRO_BATCHES = 100_000


def is_schedule_file(plan: ResolvedPlan) -> bool:
    """True if the plan names a CSV file with a user-defined schedule."""
    return plan.pipeline.schedule.endswith(".csv")


def load_schedule(plan: ResolvedPlan, num_micro_batches: int) -> Schedule:
    """Build the named schedule of a plan, or read its schedule file, for one step.

    Raises:
        PlanError: the schedule does not support the plan's degrees or number of micro-batches, its file cannot be read or
            cannot run, or there are too many micro-batches.
    """
    p, settings = plan.parallel, plan.pipeline
    if num_micro_batches > MOST_MICRO_BATCHES:
        raise PlanError(
            f"{num_micro_batches} micro-batches with plan.parallel.pp = {p.pp}",
            where="train.global_batch_size, train.micro_batch_size",
            rule=f"a schedule of a pipeline has at most {MOST_MICRO_BATCHES} micro-batches",
            fix="increase train.micro_batch_size, or decrease train.global_batch_size",
        )
    if not is_schedule_file(plan):
        return build_schedule(settings.schedule, p.pp, num_micro_batches, settings.stages_per_rank)
    schedule = _read_table(plan, num_micro_batches)
    verify(schedule)
    return schedule


def stage_ranks(plan: ResolvedPlan) -> tuple[int, ...]:
    """Pipeline rank of each stage.

    Raises:
        PlanError: see `load_schedule`.
    """
    p, settings = plan.parallel, plan.pipeline
    if is_schedule_file(plan):
        return _read_table(plan, 1).rank_of_stage
    return schedule_kind(settings.schedule, settings.stages_per_rank).placement(p.pp, settings.stages_per_rank)


def plan_timeline(plan: ResolvedPlan, num_micro_batches: int) -> Timeline:
    """Timeline of one step of a plan's pipeline, with unit cost for a forward and for each part of a backward.

    Raises:
        PlanError: see `load_schedule`.
    """
    return simulate(load_schedule(plan, num_micro_batches), ActionCosts())


def splits_backward(plan: ResolvedPlan) -> bool:
    """True if the schedule computes input gradients (I) and weight gradients (W) separately."""
    schedule = _read_table(plan, 1) if is_schedule_file(plan) else load_schedule(plan, 2 * plan.parallel.pp)
    return any(action.kind == "W" for *_, action in schedule.actions())


def runs_jointly(plan: ResolvedPlan) -> bool:
    """True if forwards and backwards of different micro-batches run together, in two lanes.

    Raises:
        PlanError: the plan asks for it, and its schedule file has no joint slots; see also `load_schedule`.
    """
    if plan.parallel.ep == 1 or plan.comm.expert_overlap == "off":
        return False
    if plan.parallel.pp == 1:
        return plan.comm.expert_overlap == "joint"
    if not is_schedule_file(plan):
        return plan.pipeline.schedule in JOINT_SCHEDULES
    has_joint_slots = any(len(slot) > 1 for slots in _read_table(plan, 1).slots for slot in slots)
    if not has_joint_slots and plan.comm.expert_overlap == "joint":
        raise PlanError(
            f'expert_overlap = "joint" with the schedule {plan.pipeline.schedule}',
            where="plan.comm.expert_overlap",
            rule="in a pipeline, the schedule says which forward and backward run together",
            fix="write a forward and a backward into one cell, or leave plan.comm.expert_overlap at auto",
        )
    return has_joint_slots


def _read_table(plan: ResolvedPlan, num_micro_batches: int) -> Schedule:
    """Read the schedule file of a plan; the order of its actions is not verified.

    Raises:
        PlanError: the file cannot be read or parsed, or has another number of stages than the plan.
    """
    file, ranks, each = plan.pipeline.schedule, plan.parallel.pp, plan.pipeline.stages_per_rank
    schedule = parse_schedule(_read_text(file), ranks, num_micro_batches, file)
    if schedule.num_stages != ranks * each:
        of_rank, rest = divmod(schedule.num_stages, ranks)
        table = f"write the table for {ranks * each} stages"
        raise PlanError(
            f"{file} has {schedule.num_stages} stages",
            where=WHERE,
            rule=f"pp {ranks} x virtual_stages {each} is the number of stages",
            fix=table if rest else f"set plan.pipeline.virtual_stages to {of_rank}, or {table}",
        )
    return schedule


def _read_text(file: str) -> str:
    problem = f"has more than {LARGEST_TABLE} bytes"
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(LARGEST_TABLE + 1)
        if len(raw) <= LARGEST_TABLE:
            return raw.decode()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:  # no UTF-8, or a path with a null character
        problem = f"is no text file: {error}"
    raise PlanError(
        f"the schedule {file} {problem}",
        where=WHERE,
        rule="a schedule is a text file with one line per rank and one cell per slot",
        fix="check the path",
    )
