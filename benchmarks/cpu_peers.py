"""Speed of ZeRO stages on two CPU ranks: Weft beside torch, Accelerate and DeepSpeed, taking turns.

    python benchmarks/cpu_peers.py            # all installed systems; below 8 minutes on two free cores
    python benchmarks/cpu_peers.py --quick    # a smoke run

The method is described in benchmarks/README.md.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer
from peers.figures import choose, distance, ratios, spread
from peers.systems import BUILDERS, installed
from peers.turns import ENVIRONMENT, Job, System, Turn, start, stop, take_turn, wait_built
from peers.workload import LLAMA, Workload
from rich.console import Console
from rich.table import Table

from weft.device.cpu import Cpu
from weft.errors import RankFailure

RANKS = 2
WORKLOAD = Workload(LLAMA, global_batch=4, seq_len=256)
EMULATED = replace(WORKLOAD, seq_len=32)  # with emulated bf16, longer rows would take a minute a step
PEERS = [name for name in BUILDERS if name != "weft"]
STAGES = ["0", "2", "3"]
CHECKED_STEPS = 5
WARM_UP_STEPS = 1  # after the checked steps
# Accelerate rounds its loss to bf16: 0.03 at 9. DeepSpeed's ZeRO 0 in bf16 drifts furthest.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


@dataclass(frozen=True)
class Result:
    """Result of one system at one stage and dtype."""

    losses: list[float]
    """Losses of the first steps."""
    speeds: list[float]
    """Tokens per second of each repeat."""


def measure(systems: Sequence[str], zero: int, dtype: str, repeats: int, steps: int) -> dict[str, Result]:
    """Run all systems at one stage and dtype: checked steps, warm-up, then repeats in which each system takes a turn."""
    workload = EMULATED if dtype == "bf16" and not Cpu().supports("bf16") else WORKLOAD
    jobs = [Job(name, workload, RANKS, partial(BUILDERS[name], workload, zero, dtype)) for name in systems]
    running = [start(job) for job in jobs]
    for system in running:
        wait_built(system)
    losses = {system.name: take_turn(system, CHECKED_STEPS).losses for system in running}
    for system in running:
        take_turn(system, WARM_UP_STEPS)
    rounds = [_round(running, steps) for _ in range(repeats)]
    for system in running:
        stop(system)
    return {name: Result(losses[name], [turns[name].tokens_per_second for turns in rounds]) for name in systems}


def _round(running: list[System], steps: int) -> dict[str, Turn]:
    return {system.name: take_turn(system, steps) for system in running}


def add_rows(table: Table, results: dict[str, Result], zero: int, dtype: str) -> None:
    """Add a row for each system: its speed, and the ratio of Weft's speed to it within each repeat."""
    for name, result in results.items():
        ratio = "" if name == "weft" else spread(ratios(results["weft"].speeds, result.speeds), ".3f")
        table.add_row(name, str(zero), dtype, spread(result.speeds, ".0f"), ratio)
    table.add_section()


def report_losses(console: Console, results: dict[str, Result], zero: int, dtype: str) -> bool:
    """Print the first losses of each system; return True if all agree with Weft's to the tolerance."""
    console.print(f"ZeRO {zero} {dtype}, losses of the first {CHECKED_STEPS} steps, and the difference from Weft's")
    differences = {name: distance(result.losses, results["weft"].losses) for name, result in results.items()}
    for name, result in results.items():
        console.print(f"  {name:10}", *(f"{loss:.5f}" for loss in result.losses), f"  {differences[name]:.1e}")
    return max(differences.values()) <= TOLERANCE[dtype]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: two repeats of one step.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per system.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 2,
    systems: Annotated[str, typer.Option(help="Comma-separated systems to run beside weft.")] = ",".join(PEERS),
    stages: Annotated[str, typer.Option(help="Comma-separated ZeRO stages.")] = ",".join(STAGES),
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes of forward and backward.")] = ",".join(TOLERANCE),
) -> None:
    """Print tokens per second of each system and the ratio Weft / system, and check that the losses agree."""
    os.environ.update(ENVIRONMENT)
    asked = choose("--systems", systems, PEERS)
    cells = [
        (int(zero), dtype)
        for dtype in choose("--dtypes", dtypes, list(TOLERANCE))
        for zero in choose("--stages", stages, STAGES)
    ]
    if quick:
        repeats, steps = 2, 1
    console, started = Console(highlight=False), time.perf_counter()
    for name in asked:
        if not installed(name):
            console.print(f"{name}: not installed")
    present = ["weft", *filter(installed, asked)]
    title = f"{Cpu().name}: {Cpu().instruction_set}"
    table = Table("system", "ZeRO", "dtype", "tokens/s: median (min-max)", "Weft / system", title=title)
    agreed = True
    for zero, dtype in cells:
        try:
            results = measure(present, zero, dtype, repeats, steps)
        except RankFailure as failure:
            console.print(str(failure), markup=False)
            raise typer.Exit(failure.exit_code) from None
        add_rows(table, results, zero, dtype)
        agreed &= report_losses(console, results, zero, dtype)
    console.print(table)
    if "bf16" in {dtype for _, dtype in cells} and not Cpu().supports("bf16"):
        console.print(
            f"bf16 is emulated on this processor and ran with {EMULATED.seq_len} tokens a row; do not compare it with fp32"
        )
    seconds = time.perf_counter() - started
    console.print(f"losses {'agree' if agreed else 'DIFFER'}; {repeats} repeats of {steps} steps; {seconds:.0f} s")
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    typer.run(main)
