"""Formatting of figures in the benchmarks' tables, and parsing of their options."""

import math
from collections.abc import Sequence
from statistics import median

import typer


def spread(values: Sequence[float], style: str) -> str:
    """Text "median (min-max)"."""
    return f"{median(values):{style}} ({min(values):{style}}-{max(values):{style}})"


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Ratios of paired values, for each repeat."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference of two loss curves; infinite if a loss is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def choose(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Split a comma-separated option, and check each value against the known ones."""
    chosen = text.split(",")
    unknown = [value for value in chosen if value not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}", param_hint=option)
    return chosen
