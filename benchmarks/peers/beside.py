"""Systems in one cell of a table, beside one Weft rank that stays alive for all cells of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from peers.figures import distance, ratios, spread
from peers.systems import Step
from peers.turns import Job, System, start, stop, take_turn, wait_built
from peers.workload import Workload


@dataclass(frozen=True)
class Base:
    """Weft on one rank."""

    system: System
    losses: list[float]


class Result(NamedTuple):
    """One system in one cell."""

    distance: float
    """Of its first losses from those of the base."""
    speeds: list[float]
    """Tokens a second, one a repeat."""
    core_seconds: list[float]
    """Of a step on all ranks together, one a repeat."""
    communication: float
    """Share of rank 0's time; 0 on one rank."""
    bytes: float
    """Sent by rank 0 in a step; 0 where nobody counts."""


def start_base(workload: Workload, build: Callable[[], Step], checked: int) -> Base:
    """Start the one rank and let it take its first steps."""
    system = start(Job("weft, one rank", workload, 1, build))
    wait_built(system)
    return Base(system, take_turn(system, checked).losses)


def measure(
    builders: Mapping[str, Callable[[], Step]], ranks: int, base: Base, repeats: int, steps: int
) -> tuple[list[float], dict[str, Result]]:
    """First steps of each system, then repeats in which each takes a turn, then watched steps.

    Args:
        builders: by system, weft among them.
        ranks: of each.
        base: takes a turn in every repeat, too.
        repeats: turns of each system.
        steps: of a turn.

    Returns:
        Tokens a second of the base in each repeat, and the results by system.
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


COLUMNS = ("system", "tokens/s: median (min-max)", "/ one Weft rank", "Weft / system")


def columns_of(name: str, results: dict[str, Result], base_speeds: list[float]) -> list[str]:
    """What `COLUMNS` say of one system."""
    speeds = results[name].speeds
    return [
        name,
        spread(speeds, ".0f"),
        spread(ratios(speeds, base_speeds), ".2f"),
        "" if name == "weft" else spread(ratios(results["weft"].speeds, speeds), ".2f"),
    ]
