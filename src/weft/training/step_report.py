"""Report of a step, and the agreement of all ranks after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.checkpoint.manifest import Position
from weft.comm.collectives import all_reduce
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES
from weft.training.energy import Expense
from weft.training.measured_steps import MeasuredSteps
from weft.training.session import Session
from weft.training.step import StepResult


@dataclass(frozen=True)
class Agreement:
    """Maximum over all ranks of what each has measured or been told; the same on every rank."""

    peak_memory: int
    """Peak of allocated memory, in bytes."""
    signal: int
    """Number of a signal that ends training; 0 without one."""
    wants_probe: bool
    """True if a rank waited for others, and asks for the links to be measured."""
    imbalances: list[float] | None
    """Largest load of an expert / mean load, by block; None without experts."""


def agree(
    session: Session, *, peak_memory: int, signal: int, wants_probe: bool, imbalances: Tensor | None
) -> Agreement:
    """Agree with all ranks, by one small all-reduce, for which the host waits once. Collective.

    Args:
        session: training state of this rank.
        peak_memory, signal, wants_probe: values of this rank, as in `Agreement`.
        imbalances: [blocks] float64 on the device; None without experts.
    """
    values = torch.tensor((peak_memory, signal, wants_probe), dtype=torch.float64, device=session.torch_device)
    largest = values if imbalances is None else torch.cat([values, imbalances])
    memory, number, probe, *others = all_reduce(largest, session.mesh, AXES, "max").tolist()
    return Agreement(int(memory), int(number), bool(probe), None if imbalances is None else others)


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
