"""Pipeline schedules on 2 and 4 CPU ranks: speed beside torch's schedules, and bubble beside the simulated bubble.

    python benchmarks/cpu_pipeline.py            # about 8 minutes on two free cores
    python benchmarks/cpu_pipeline.py --quick    # a smoke run on 2 ranks
    python benchmarks/cpu_pipeline.py --parts bubble --schedules 1f1b,zbv --ranks 4

The method is described in benchmarks/README.md.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from peers.beside import COLUMNS, columns_of, measure, start_base
from peers.figures import choose, ratios, spread
from peers.pipeline import Seconds, build_slow_weft, build_torch_pipeline
from peers.systems import Step, build_weft_plan
from peers.turns import ENVIRONMENT, Job, System, start, stop, take_turn, wait_built
from peers.workload import LLAMA, Workload
from rich.console import Console
from rich.table import Table

from weft.errors import RankFailure
from weft.parallel.pipeline.balance import split_blocks
from weft.parallel.pipeline.schedules import build_schedule
from weft.parallel.pipeline.simulate import ActionCosts, simulate
from weft.plan import JOINT_SCHEDULES, Pipeline

PARTS = ["speed", "bubble", "joint"]
QUICK_SCHEDULES = "1f1b,interleaved-overlap,zbv"
MICRO_BATCHES = 8
WORKLOAD = Workload(LLAMA, global_batch=MICRO_BATCHES, seq_len=128)
QUICK_WORKLOAD = Workload(LLAMA, global_batch=MICRO_BATCHES, seq_len=32)
HEAD_COST = 2.6  # final norm, head and loss: the head has 2.6 times the elements of a block
CHECKED_STEPS = 2  # the first steps, which also warm up
TOLERANCE = 1e-4  # of losses near 9, in fp32

# For the bubble: a model so small that nearly all time is sleep.
TINY_SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
TINY = {**LLAMA, **TINY_SIZE, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY_SEQ_LEN = 8
SECONDS = Seconds(forward=0.02, backward_input=0.02, backward_weight=0.02)
# With messages of experts: longer, so that the code around the sleep counts less.
WITH_MESSAGES = Seconds(forward=0.06, backward_input=0.06, backward_weight=0.06, messages=0.036)
WARM_UP_STEPS = 1


class ScheduleEntry(NamedTuple):
    """Schedule of Weft and its counterpart in torch."""

    virtual_stages: int
    torch: str | None
    """Nearest schedule of torch; if None, only the bubble is measured."""


SCHEDULES = {
    "gpipe": ScheduleEntry(1, "GPipe"),
    "1f1b": ScheduleEntry(1, "1F1B"),
    "interleaved": ScheduleEntry(2, "Interleaved1F1B"),
    "interleaved-overlap": ScheduleEntry(2, "Interleaved1F1B"),
    "zb-h1": ScheduleEntry(1, "InterleavedZeroBubble"),
    "zb-h2": ScheduleEntry(1, None),
    "zb-1p": ScheduleEntry(1, None),
    "zb-2p": ScheduleEntry(1, None),
    "zbv": ScheduleEntry(2, "ZBVZeroBubble"),
    "dualpipev": ScheduleEntry(2, "DualPipeV"),
}


def plan_tables(schedule: str, ranks: int, head_cost: float) -> dict[str, Any]:
    """Tables of a pipeline plan."""
    stages = SCHEDULES[schedule].virtual_stages
    pipeline = {"schedule": schedule, "virtual_stages": stages, "head_cost": head_cost}
    return {"parallel": {"pp": ranks, "zero": 0}, "pipeline": pipeline, "precision": {"param_dtype": "fp32"}}


def builders_of(workload: Workload, schedule: str, ranks: int) -> dict[str, Callable[[], Step]]:
    """Builders of Weft and torch, with the same blocks in each stage and the same ranks of stages."""
    tables, (stages, kind) = plan_tables(schedule, ranks, HEAD_COST), SCHEDULES[schedule]
    rank_of_stage = build_schedule(schedule, ranks, MICRO_BATCHES, stages).rank_of_stage
    blocks = split_blocks(workload.config["num_hidden_layers"], len(rank_of_stage), Pipeline(**tables["pipeline"]))
    return {
        "weft": partial(build_weft_plan, workload, tables, MICRO_BATCHES),
        f"torch {kind}": partial(build_torch_pipeline, workload, kind, blocks, rank_of_stage, MICRO_BATCHES),
    }


def compare_speed(
    workload: Workload, schedules: Sequence[str], rank_counts: Sequence[int], repeats: int, steps: int
) -> tuple[Table, float]:
    """Table of speeds by schedule and system, and the largest difference of a loss from that of one Weft rank."""
    table, largest = Table("schedule", "ranks", "stages", *COLUMNS), 0.0
    for column in ("core seconds a step", "over Weft's", "waiting", "MB a step", "loss difference"):
        table.add_column(column)
    one_rank = {"parallel": {"zero": 0}, "precision": {"param_dtype": "fp32"}}
    base = start_base(workload, partial(build_weft_plan, workload, one_rank, MICRO_BATCHES), CHECKED_STEPS)
    for ranks in rank_counts:
        for schedule in (name for name in schedules if SCHEDULES[name].torch):
            base_speeds, results = measure(builders_of(workload, schedule, ranks), ranks, base, repeats, steps)
            for name, result in results.items():
                table.add_row(
                    schedule,
                    str(ranks),
                    str(ranks * SCHEDULES[schedule].virtual_stages),
                    *columns_of(name, results, base_speeds),
                    f"{median(result.core_seconds):.2f}",
                    "" if name == "weft" else spread(ratios(result.core_seconds, results["weft"].core_seconds), ".2f"),
                    f"{result.communication:.0%}",
                    f"{result.bytes / 1e6:.1f}" if name == "weft" else "",
                    f"{result.distance:.0e}",
                )
                largest = max(largest, result.distance)
        table.add_section()
    stop(base.system)
    return table, largest


def start_sleeping(schedule: str, ranks: int, seconds: Seconds, joint: bool) -> System:
    """Start ranks whose stages sleep, and let them warm up."""
    stages = ranks * SCHEDULES[schedule].virtual_stages
    workload = Workload({**TINY, "num_hidden_layers": stages}, MICRO_BATCHES, TINY_SEQ_LEN)
    tables = plan_tables(schedule, ranks, head_cost=0.0)
    build = partial(build_slow_weft, workload, tables, MICRO_BATCHES, seconds, joint)
    system = start(Job(f"weft {schedule}", workload, ranks, build))
    wait_built(system)
    take_turn(system, WARM_UP_STEPS)
    return system


def measure_sleep(schedule: str, ranks: int, repeats: int) -> tuple[list[float], ActionCosts]:
    """Seconds of a step of sleeping stages, for each repeat, and of its actions, in one more step."""
    stages = ranks * SCHEDULES[schedule].virtual_stages
    system = start_sleeping(schedule, ranks, SECONDS, joint=False)
    seconds = [take_turn(system, 1).seconds for _ in range(repeats)]
    actions = take_turn(system, 1, "actions").watched
    stop(system)
    return seconds, as_costs({key: value for of_rank in actions for key, value in of_rank.items()}, stages)


def as_costs(seconds: dict[tuple[str, int], float], stages: int) -> ActionCosts:
    """Convert seconds by kind and stage to the simulator's costs; a full backward is half inputs, half weights."""

    def by_stage(kind: str) -> list[float]:
        return [
            seconds[kind, stage] if (kind, stage) in seconds else seconds["B", stage] / 2 for stage in range(stages)
        ]

    pairs = [seconds["F", stage] + by_stage("I")[stage] + by_stage("W")[stage] for stage in range(stages)]
    joint = [seconds.get(("joint", stage), pair) for stage, pair in enumerate(pairs)]
    return ActionCosts(by_stage("F"), by_stage("I"), by_stage("W"), joint=joint)


def compare_bubble(schedules: Sequence[str], rank_counts: Sequence[int], repeats: int) -> Table:
    """Table of step times and bubbles by schedule: simulated from the sleep and from timed actions, and measured."""
    table = Table("schedule", "ranks", "stages", "step, ms: of the sleep", "of timed actions", "measured (min-max)")
    for column in ("difference", "bubble: of the sleep", "of timed actions", "measured"):
        table.add_column(column)
    for ranks in rank_counts:
        for name in schedules:
            stages = SCHEDULES[name].virtual_stages
            schedule = build_schedule(name, ranks, MICRO_BATCHES, stages)
            seconds, costs = measure_sleep(name, ranks, repeats)
            asleep, timed = simulate(schedule, ActionCosts(*SECONDS)), simulate(schedule, costs)
            table.add_row(
                name,
                str(ranks),
                str(ranks * stages),
                f"{asleep.makespan * 1e3:.0f}",
                f"{timed.makespan * 1e3:.0f}",
                spread([value * 1e3 for value in seconds], ".0f"),
                f"{median(seconds) / asleep.makespan - 1:+.1%}, {median(seconds) / timed.makespan - 1:+.1%}",
                f"{1 - asleep.mean_busy / asleep.makespan:.1%}",
                f"{1 - timed.mean_busy / timed.makespan:.1%}",
                f"{1 - timed.mean_busy / median(seconds):.1%}",
            )
        table.add_section()
    return table


def compare_joint(schedules: Sequence[str], rank_counts: Sequence[int], repeats: int) -> Table:
    """Table of steps with messages of experts, of which joint slots hide those that another action can compute over."""
    table = Table(
        "schedule", "ranks", "joint slots", "step, ms: of the sleep", "of timed actions", "measured (min-max)"
    )
    for column in ("difference", "in turn / in two lanes"):
        table.add_column(column)
    forward, inputs, weights, messages = WITH_MESSAGES
    asleep = ActionCosts(forward + messages, inputs + messages, weights)
    for ranks in rank_counts:
        for name in schedules:
            schedule = build_schedule(name, ranks, MICRO_BATCHES, SCHEDULES[name].virtual_stages)
            systems = {joint: start_sleeping(name, ranks, WITH_MESSAGES, joint) for joint in (False, True)}
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(repeats):
                for joint, system in systems.items():
                    seconds[joint].append(take_turn(system, 1).seconds)
            # Actions are timed where they run in turn, so that the simulation knows nothing of the lanes.
            actions = take_turn(systems[False], 1, "actions").watched
            by_action = {key: value for of_rank in actions for key, value in of_rank.items()}
            timed = replace(as_costs(by_action, schedule.num_stages), joint=None)
            for joint, system in systems.items():
                stop(system)
                waits = {"forward_wait": messages, "backward_wait": messages} if joint else {}
                simulated = [simulate(schedule, replace(costs, **waits)).makespan for costs in (asleep, timed)]
                table.add_row(
                    name,
                    str(ranks),
                    "in two lanes" if joint else "in turn",
                    *(f"{value * 1e3:.0f}" for value in simulated),
                    spread([value * 1e3 for value in seconds[joint]], ".0f"),
                    ", ".join(f"{median(seconds[joint]) / value - 1:+.1%}" for value in simulated),
                    spread(ratios(seconds[False], seconds[True]), ".2f") if joint else "",
                )
        table.add_section()
    return table


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run on 2 ranks: short rows, one repeat.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per system.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn of the speed part.")] = 1,
    parts: Annotated[str, typer.Option(help="Comma-separated parts to measure.")] = ",".join(PARTS),
    schedules: Annotated[
        str, typer.Option(help="Comma-separated schedules; default: all, or three with --quick.")
    ] = "",
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks.")] = "2,4",
) -> None:
    """Print tokens per second beside torch's schedules, and step times and bubbles beside the simulated ones."""
    os.environ.update(ENVIRONMENT)
    schedules = schedules or (QUICK_SCHEDULES if quick else ",".join(SCHEDULES))
    asked, names = choose("--parts", parts, PARTS), choose("--schedules", schedules, list(SCHEDULES))
    workload = WORKLOAD
    if quick:
        repeats, ranks, workload = 1, "2", QUICK_WORKLOAD
    rank_counts = [int(count) for count in choose("--ranks", ranks, ["2", "4"])]
    console, started, largest = Console(highlight=False, width=200), time.perf_counter(), 0.0
    try:
        if "speed" in asked:
            table, largest = compare_speed(workload, names, rank_counts, repeats, steps)
            console.print(table)
        if "bubble" in asked:
            console.print(compare_bubble(names, rank_counts, repeats))
        if "joint" in asked:
            console.print(compare_joint([name for name in names if name in JOINT_SCHEDULES], rank_counts, repeats))
    except RankFailure as failure:
        console.print(str(failure), markup=False)
        raise typer.Exit(failure.exit_code) from None
    cores, agreed = len(os.sched_getaffinity(0)), largest <= TOLERANCE
    seconds = time.perf_counter() - started
    console.print(f"{cores} cores, one thread per rank; ranks beyond {cores} share cores")
    console.print(f"losses {'agree' if agreed else 'DIFFER'}; {repeats} repeats of {steps} steps; {seconds:.0f} s")
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    typer.run(main)
