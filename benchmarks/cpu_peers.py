"""Weft beside its peers on two CPU ranks: the same model, rows and update rule, taking turns step by step.

    python benchmarks/cpu_peers.py            # every system that is installed; below 8 minutes on two free cores
    python benchmarks/cpu_peers.py --quick    # a smoke run

See benchmarks/README.md for what is compared and how.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from peers.turns import ONE_THREAD

os.environ.update(ONE_THREAD)  # before the ranks' server starts: OpenMP reads it once

import typer
from peers.systems import BUILDERS, installed
from peers.turns import System, Turn, start, stop, take_turn, wait_built
from rich.console import Console
from rich.table import Table

CHECKED_STEPS = 5
WARM_UP_STEPS = 1  # after the checked ones
# Accelerate rounds its loss to bf16: 0.03 at 9. DeepSpeed's ZeRO 0 in bf16 drifts further than the others.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


@dataclass(frozen=True)
class Result:
    """One system at one stage and dtype."""

    losses: list[float]
    """Of the first steps."""
    speeds: list[float]
    """Tokens a second, one a repeat."""


def measure(systems: Sequence[str], zero: int, dtype: str, repeats: int, steps: int) -> dict[str, Result]:
    """Run all systems at one stage and dtype: first steps, warm-up, then repeats in which each takes a turn."""
    running = [start(name, zero, dtype) for name in systems]
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
    """A line for each system: speed, and Weft's speed over it, repeat by repeat."""
    for name, result in results.items():
        ratios = [ours / theirs for ours, theirs in zip(results["weft"].speeds, result.speeds, strict=True)]
        ratio = "" if name == "weft" else spread(ratios, ".3f")
        table.add_row(name, str(zero), dtype, spread(result.speeds, ".0f"), ratio)
    table.add_section()


def spread(values: Sequence[float], style: str) -> str:
    """median (min-max)"""
    return f"{median(values):{style}} ({min(values):{style}}-{max(values):{style}})"


def differing(results: dict[str, Result], dtype: str) -> dict[str, float]:
    """Systems whose first losses differ from Weft's by more than the tolerance, with the largest difference."""
    apart = {name: distance(result.losses, results["weft"].losses) for name, result in results.items()}
    return {name: difference for name, difference in apart.items() if not difference <= TOLERANCE[dtype]}


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference of two courses of the loss; infinite where one of them is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def main(
    quick: Annotated[bool, typer.Option(help="A smoke run: two repeats of one step.")] = False,
    repeats: Annotated[int, typer.Option(help="Turns of each system.")] = 9,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 2,
    systems: Annotated[str, typer.Option(help="Which to run, with commas; weft is always one.")] = ",".join(BUILDERS),
    stages: Annotated[str, typer.Option(help="ZeRO stages, with commas.")] = "0,2,3",
    dtypes: Annotated[str, typer.Option(help="Formats of forward and backward, with commas.")] = "fp32,bf16",
) -> None:
    """Print tokens a second of each system and the ratio Weft / system, and check that their losses agree."""
    if quick:
        repeats, steps = 2, 1
    console, started = Console(), time.perf_counter()
    asked = ["weft", *(name for name in systems.split(",") if name != "weft")]
    present = [name for name in asked if installed(name)]
    for name in asked:
        if name not in present:
            console.print(f"{name}: not installed")
    table = Table("system", "ZeRO", "dtype", "tokens/s: median (min-max)", "Weft / system")
    agreed = True
    for dtype in dtypes.split(","):
        for zero in map(int, stages.split(",")):
            results = measure(present, zero, dtype, repeats, steps)
            add_rows(table, results, zero, dtype)
            console.print(f"ZeRO {zero} {dtype}, losses of the first {CHECKED_STEPS} steps", highlight=False)
            for name, result in results.items():
                console.print(f"  {name:10}", *(f"{loss:.5f}" for loss in result.losses), highlight=False)
            for name, difference in differing(results, dtype).items():
                agreed = False
                console.print(f"  {name} differs from weft by {difference:.2g}, allowed {TOLERANCE[dtype]:g}")
    console.print(table)
    console.print(f"losses {'agree' if agreed else 'DO NOT AGREE'}; {repeats} repeats of {steps} steps;", end=" ")
    console.print(f"{time.perf_counter() - started:.0f} s", highlight=False)
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    typer.run(main)
