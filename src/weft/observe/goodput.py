"""Goodput of a run, and what its devices cost: from the starts of its ranks and the times of its steps.

Goodput is the share of time in steps that count; the term is that of Google's ML productivity goodput. It counts the time while
Weft's launchers ran: the pause before a run is resumed by a new command is not a loss, the pause before a restart is one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from weft.job import Cluster
from weft.training.energy import Expense, expense
from weft.training.metrics import Attempt, StepMetrics, format_dollars, format_energy, format_seconds

COUNTED = "steps that count"
MIN_SHARE = 0.001  # smaller shares are not shown


@dataclass(frozen=True)
class Goodput:
    """Division of the time of a run."""

    seconds: dict[str, float]
    """Seconds by purpose; "steps that count" is the only one that is no loss."""

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the time in steps that count; 1 without any time."""
        return self.seconds.get(COUNTED, 0.0) / self.total if self.total else 1.0


def divide_time(attempts: Sequence[Attempt], steps: Sequence[StepMetrics]) -> Goodput | None:
    """Divide the time of a run by purpose; None if the run has no record of it.

    Args:
        attempts: starts of the ranks, in order.
        steps: all steps in the order in which they ended, repeated ones included.
    """
    if not attempts or not steps or not all(step.time for step in steps):
        return None
    last_of = {step.step: index for index, step in enumerate(steps)}
    seconds: dict[str, float] = defaultdict(float)
    for attempt, end in _spans(attempts):
        own = [(index, step) for index, step in enumerate(steps) if attempt.time <= step.time < end.time]
        if not own:
            if end.attempt:
                seconds["failed starts"] += end.time - attempt.time
            continue
        first = own[0][1]
        seconds["start of the ranks"] += first.time - first.step_seconds - attempt.time
        for index, step in own:
            counts = last_of[step.step] == index
            seconds["skipped steps" if step.skipped else COUNTED if counts else "repeated steps"] += step.step_seconds
        for (_, before), (_, step) in pairwise(own):
            pause = max(0.0, step.time - step.step_seconds - before.time)
            saving = min(pause, step.checkpoint_seconds)
            seconds["checkpoints"] += saving
            seconds["evaluation and records"] += pause - saving
        if end.attempt:  # a restart, not a new command
            seconds["failures and restarts"] += end.time - own[-1][1].time
    return Goodput({name: span for name, span in seconds.items() if span > 0})


def _spans(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """Each attempt with the next one; the last one with an end in the far future."""
    never = Attempt(0, float("inf"), 0, 0, 0, "")
    return list(pairwise([*attempts, never]))


class Bill(NamedTuple):
    """Expenses of a run, with its tokens."""

    spent: Expense
    tokens: int
    """Target tokens of the steps that count."""
    source: str
    """Source of the energy: counters, or a stated power."""


def bill(attempts: Sequence[Attempt], steps: Sequence[StepMetrics], cluster: Cluster) -> Bill | None:
    """Expenses of a run from the first start of its ranks to its last step; None if nothing is known of them.

    Energy is that of the recorded steps, with what happened between them; the devices are paid for the whole time.

    Args:
        attempts: starts of the ranks, in order.
        steps: all steps in the order in which they ended, repeated ones included.
        cluster: rates of the job.
    """
    time = divide_time(attempts, steps)
    if time is None:
        return None
    known = [step.joules for step in steps if step.joules is not None]
    spent = expense(cluster, attempts[-1].devices, time.total, sum(known) if known else None)
    if spent.joules is None and spent.dollars is None:
        return None
    tokens = sum(step.tokens for step in {step.step: step for step in steps}.values() if not step.skipped)
    return Bill(spent, tokens, attempts[-1].energy)


def goodput_text(found: Goodput) -> str:
    """One line: "93.1% of 12m 03s; start of the ranks 4.1%, checkpoints 2.0%"."""
    lost = {name: span / found.total for name, span in found.seconds.items() if name != COUNTED}
    parts = [
        f"{name} {share:.1%}" for name, share in sorted(lost.items(), key=lambda item: -item[1]) if share >= MIN_SHARE
    ]
    return f"{found.share:.1%} of {format_seconds(found.total)}" + ("; " + ", ".join(parts) if parts else "")


def bill_lines(found: Bill) -> dict[str, str]:
    """Lines of a summary by name: energy, cost and emission, as far as they are known."""
    spent, lines = found.spent, dict[str, str]()
    if spent.joules:
        lines["energy"] = f"{format_energy(spent.joules)}, {found.tokens / spent.joules:.3g} tokens/J ({found.source})"
    if spent.dollars is not None:
        per_million = format_dollars(spent.dollars / found.tokens * 1e6) if found.tokens else "-"
        lines["cost"] = f"{format_dollars(spent.dollars)}, {per_million} per million tokens"
    if spent.grams_co2 is not None:
        lines["emission"] = f"{spent.grams_co2:.3g} g CO2"
    return lines
