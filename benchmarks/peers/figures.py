"""Numbers as the tables of the benchmarks show them, and their options."""

import math
from collections.abc import Sequence
from statistics import median

import typer


def spread(values: Sequence[float], style: str) -> str:
    """median (min-max)"""
    return f"{median(values):{style}} ({min(values):{style}}-{max(values):{style}})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of speeds, repeat by repeat."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference of two courses of the loss; infinite where one of them is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def choose(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Split a value with commas, each one of the known ones."""
    chosen = text.split(",")
    unknown = [value for value in chosen if value not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}", param_hint=option)
    return chosen
