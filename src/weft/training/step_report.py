"""Report of a step, and what all ranks agree on after its backward."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from weft.anatomy.roles import Anatomy
from weft.checkpoint.manifest import Position
from weft.parallel.experts.router_stats import imbalances_of_blocks
from weft.precision.scaling import LossScale
from weft.training.energy import Expense
from weft.training.measured_steps import MeasuredSteps
from weft.training.step import RankValues, StepResult


@dataclass(frozen=True)
class Agreement:
    """Measurements and signals of all ranks together; the same on every rank."""

    peak_memory: int
    """Largest peak of allocated memory so far, without the update of the step, in bytes."""
    signal: int
    """Number of a signal that ends training; 0 without one."""
    wants_probe: bool
    """True if a rank waited for others, and asks for the links to be measured."""
    imbalances: list[float] | None
    """Largest load of an expert / mean load, by block; None without experts."""
    joules: float | None
    """Energy that the counters of all ranks have counted since the step before; None without."""

    @classmethod
    def of(cls, result: StepResult, has_experts: bool) -> Self:
        """Agreement of a step whose ranks have given `rank_values`."""
        memory, number, probe, *imbalances = result.maxima
        return cls(int(memory), int(number), bool(probe), imbalances if has_experts else None, *result.sums or (None,))


def rank_values(
    device: torch.device,
    anatomy: Anatomy,
    loads: dict[str, Tensor] | None,
    *,
    peak_memory: int = 0,
    signal: int = 0,
    wants_probe: bool = False,
    joules: float | None = None,
) -> RankValues:
    """Values of this rank for `Agreement`.

    Args:
        device: device of this rank.
        anatomy: anatomy of the full model.
        loads: tokens of each expert, from `RouterStats.take_loads`; None without experts.
        peak_memory, signal, wants_probe, joules: of this rank, as in `Agreement`.
    """
    # Scalars that the device fills itself: the host would wait for a copy from its memory.
    fill = partial(torch.full, (1,), dtype=torch.float64, device=device)
    largest = [fill(float(value)) for value in (peak_memory, signal, wants_probe)]
    summed = torch.empty(0, dtype=torch.float64, device=device) if joules is None else fill(joules)
    if loads is not None:
        largest.append(imbalances_of_blocks(anatomy, loads, device))
    return RankValues(torch.cat(largest), summed)


@dataclass(frozen=True)
class StepReport:
    """A step of training; observers get metrics that are made of it."""

    before: Position
    """Position before the step."""
    result: StepResult
    scale: LossScale
    """Loss scale of the step."""
    seconds: float
    agreed: Agreement
    comm: dict[str, dict[str, float]]
    """Messages and their seconds, by mesh axis and link."""
    blocked: float
    """Seconds for which a checkpoint has blocked the step."""
    measured: MeasuredSteps
    spent: Expense

    @property
    def step(self) -> int:
        """Number of the step; the first one is 1."""
        return self.before.step + 1

    @property
    def after(self) -> Position:
        """Position after the step."""
        skipped = (*self.before.skipped, self.step) if self.result.problem else self.before.skipped
        values = {"next_batch": self.before.next_batch + 1, "loss_scale": self.result.loss_scale, "skipped": skipped}
        return self.before.model_copy(update={"step": self.step, **values})
