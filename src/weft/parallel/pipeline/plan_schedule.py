"""The schedule that a plan asks for: one with a name, or the user's own from a file. Imports no torch."""

from pathlib import Path

from weft.errors import PlanError
from weft.parallel.pipeline.schedule import WHERE, Schedule, parse_schedule
from weft.parallel.pipeline.schedules import build_schedule, find_kind
from weft.parallel.pipeline.simulate import ActionCosts, Timeline, simulate
from weft.parallel.pipeline.verify import verify
from weft.plan import Plan


def is_file(plan: Plan) -> bool:
    """Whether the schedule is a file of the user's own."""
    return plan.pipeline.schedule.endswith(".csv")


def read_order(plan: Plan, num_micro_batches: int) -> Schedule:
    """The schedule of a plan, for a step of some micro-batches.

    Raises:
        PlanError: the schedule does not take these numbers, or the user's own cannot be read or cannot run.
    """
    p, settings = plan.parallel, plan.pipeline
    if not is_file(plan):
        return build_schedule(settings.schedule, p.pp, num_micro_batches, settings.stages_a_rank)
    schedule = _read_table(plan, num_micro_batches)
    if schedule.num_stages != p.pp * settings.stages_a_rank:
        each, rest = divmod(schedule.num_stages, p.pp)
        table = f"write the table for {p.pp * settings.stages_a_rank} stages"
        raise PlanError(
            f"{settings.schedule} has {schedule.num_stages} stages",
            where=WHERE,
            rule=f"pp {p.pp} x virtual_stages {settings.stages_a_rank} is the number of stages",
            fix=table if rest else f"set plan.pipeline.virtual_stages to {each}, or {table}",
        )
    verify(schedule)
    return schedule


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Stage -> rank of pp.

    Raises:
        PlanError: see `read_order`.
    """
    p, settings = plan.parallel, plan.pipeline
    if is_file(plan):
        return _read_table(plan, 1).rank_of_stage
    return find_kind(settings.schedule, settings.stages_a_rank).place(p.pp, settings.stages_a_rank)


def plan_timeline(plan: Plan, num_micro_batches: int) -> Timeline:
    """One step of a plan's pipeline where every stage takes 1 for a forward, and 1 for each part of a backward.

    Raises:
        PlanError: see `read_order`.
    """
    return simulate(read_order(plan, num_micro_batches), ActionCosts())


def splits_backward(plan: Plan) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    schedule = _read_table(plan, 1) if is_file(plan) else read_order(plan, 2 * plan.parallel.pp)
    return any(action.kind == "W" for *_, action in schedule.actions())


def _read_table(plan: Plan, num_micro_batches: int) -> Schedule:
    file = plan.pipeline.schedule
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"the schedule {file} cannot be read: {error.strerror}", where=WHERE, fix="check the path"
        ) from None
    return parse_schedule(text, plan.parallel.pp, num_micro_batches, file)
