"""Comparison of systems in one cell of a table with one Weft rank, which lives for all cells of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from peers.figures import distance, ratios, spread
from peers.systems import Step
from peers.turns import Job, System, start, stop, take_turn, wait_built
from peers.workload import Workload


@dataclass(frozen=True)
class Base:
    """Weft on one rank, the base of comparison."""

    system: System
    losses: list[float]


class Result(NamedTuple):
    """Result of one system in one cell."""

    distance: float
    """Largest difference of its first losses from those of the base."""
    speeds: list[float]
    """Tokens per second of each repeat."""
    core_seconds: list[float]
    """CPU seconds of a step, summed over ranks, for each repeat."""
    communication: float
    """Share of rank 0's time in communication; 0 with one rank."""
    bytes: float
    """Bytes sent by rank 0 in a step; 0 for systems other than Weft, which are not counted."""


def start_base(workload: Workload, build: Callable[[], Step], checked: int) -> Base:
    """Start the base and run its first steps."""
    system = start(Job("weft, one rank", workload, 1, build))
    wait_built(system)
    return Base(system, take_turn(system, checked).losses)


def measure(
    builders: Mapping[str, Callable[[], Step]], ranks: int, base: Base, repeats: int, steps: int
) -> tuple[list[float], dict[str, Result]]:
    """Run the first steps of each system, then repeats in which each takes a turn, then profiled steps.

    Args:
        builders: builders by system, including "weft".
        ranks: number of ranks of each system.
        base: the base, which takes a turn in every repeat, too.
        repeats: turns of each system.
        steps: steps of a turn.

    Returns:
        Tokens per second of the base in each repeat, and the results by system.
    """
    running = [start(Job(name, base.system.job.workload, ranks, build)) for name, build in builders.items()]
    for system in running:
        wait_built(system)
    distances = [distance(take_turn(system, len(base.losses)).losses, base.losses) for system in running]
    rounds = [[take_turn(system, steps) for system in (base.system, *running)] for _ in range(repeats)]
    shares = [take_turn(system, 1, "share").watched[0] if ranks > 1 else 0.0 for system in running]
    counted = [take_turn(system, 1, "bytes").watched[0] if system.name == "weft" else 0.0 for system in running]
    for system in running:
        stop(system)
    base_speeds, *speeds = ([turn.tokens_per_second for turn in turns] for turns in zip(*rounds, strict=True))
    _, *core_seconds = ([turn.core_seconds / steps for turn in turns] for turns in zip(*rounds, strict=True))
    results = map(Result, distances, speeds, core_seconds, shares, counted)
    return base_speeds, dict(zip(builders, results, strict=True))


COLUMNS = ("system", "tokens/s: median (min-max)", "over one Weft rank", "Weft / system")


def columns_of(name: str, results: dict[str, Result], base_speeds: list[float]) -> list[str]:
    """Table cells of one system, for `COLUMNS`."""
    speeds = results[name].speeds
    return [
        name,
        spread(speeds, ".0f"),
        spread(ratios(speeds, base_speeds), ".2f"),
        "" if name == "weft" else spread(ratios(results["weft"].speeds, speeds), ".2f"),
    ]
