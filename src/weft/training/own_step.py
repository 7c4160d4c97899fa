"""Step of a loop of the user (`weft.Run`): the state of its micro-batches, and their gradients so far."""

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from weft.errors import ModelError
from weft.training.own_weights import ForwardRecord, divisor


class StepState(Enum):
    """Position in a step."""

    IDLE = auto()
    """Between micro-batches: outside of `Run.accumulate`, before the last one."""
    FORWARD = auto()
    """In `accumulate`, before `backward`."""
    BACKWARD = auto()
    """In `accumulate`, in or after `backward`."""
    REDUCED = auto()
    """In `accumulate`, after `backward` of the last micro-batch, which has reduced the gradients."""
    COMPLETE = auto()
    """Outside of `accumulate`, after the last micro-batch."""


FOLLOWING = {
    StepState.IDLE: (StepState.FORWARD, StepState.COMPLETE),
    # A loop may enter `accumulate` again in `accumulate`, or call `train_batch` there.
    StepState.FORWARD: (StepState.BACKWARD, StepState.IDLE, StepState.FORWARD, StepState.COMPLETE),
    StepState.BACKWARD: (StepState.REDUCED, StepState.IDLE, StepState.FORWARD),
    StepState.REDUCED: (StepState.COMPLETE,),
    StepState.COMPLETE: (),
}
"""States that may follow each state. A step that ends is followed by another object."""


@dataclass
class StepGradients:
    """Gradients of the micro-batches of a step so far."""

    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each micro-batch over the data ranks."""
    weights: list[Tensor] = field(default_factory=list)
    """Weight of each micro-batch in the mean, float64 scalars."""
    is_counted: bool = False
    """True if the weight of the newest micro-batch is its number of targets or items."""
    norm: float | None = None
    """Global norm before clipping; None if it is not computed yet."""
    clip: float = 1.0
    """Factor of clipping."""

    def add(self, loss: Tensor, weight: Tensor, is_counted: bool) -> Tensor:
        """Add a micro-batch; returns the factor of its gradients: its weight relative to the first micro-batch, so that a step
        of one micro-batch has exactly its gradients."""
        self.losses.append(loss)
        self.weights.append(weight)
        self.is_counted = is_counted
        return weight / divisor(self.weights[0]) if len(self.weights) > 1 else torch.ones(())

    def loss(self) -> float:
        """Mean of the losses by their weights."""
        weights = torch.stack(self.weights)
        return ((torch.stack(self.losses).double() * weights).sum() / divisor(weights.sum())).item()

    def share(self) -> float:
        """Weight of the first micro-batch divided by the sum of all weights."""
        if len(self.weights) == 1:
            return 1.0
        return (divisor(self.weights[0]) / divisor(torch.stack(self.weights).sum())).item()


class OwnStep:
    """Micro-batches of one step; the next step has another object."""

    def __init__(self) -> None:
        self.state = StepState.IDLE
        self.gradients = StepGradients()
        self.is_last = True
        """True if the current micro-batch is the last one."""
        self.forward: ForwardRecord | None = None
        """Forward of the current micro-batch; None before."""

    @property
    def is_inside(self) -> bool:
        """True in `accumulate`."""
        return self.state in (StepState.FORWARD, StepState.BACKWARD, StepState.REDUCED)

    @property
    def is_complete(self) -> bool:
        """True if all micro-batches have run."""
        return self.state in (StepState.REDUCED, StepState.COMPLETE)

    @property
    def is_begun(self) -> bool:
        """True if a micro-batch has run."""
        return bool(self.gradients.losses)

    @property
    def has_several(self) -> bool:
        """True if the step has several micro-batches."""
        return self.is_begun or not self.is_last

    def go(self, state: StepState) -> None:
        """Go to another state.

        Raises:
            AssertionError: it does not follow the current one.
        """
        if state not in FOLLOWING[self.state]:
            raise AssertionError(f"a step of a custom loop goes from {self.state.name} to {state.name}")
        self.state = state

    def enter(self, last: bool) -> None:
        """Begin a micro-batch, in `accumulate`."""
        self.go(StepState.FORWARD)
        self.is_last, self.forward = last, None

    def leave(self) -> None:
        """Leave `accumulate`, where it has not been left already."""
        if self.is_inside:
            self.go(StepState.COMPLETE if self.is_complete else StepState.IDLE)

    def finish_backward(self) -> None:
        """Note that the backward of the micro-batch has run."""
        if self.is_last:
            self.go(StepState.REDUCED)

    # Mistakes of the loop

    def check_enter(self) -> None:
        """Refuse a micro-batch after the last one.

        Raises:
            ModelError: all micro-batches have run.
        """
        if self.is_complete:
            raise ModelError(
                "run.accumulate after the last micro-batch of a step",
                where="weft.Run.accumulate",
                rule="gradients are reduced after the last micro-batch",
                fix="pass last=False for all micro-batches but the last, or call run.step() before",
            )

    def check_backward(self) -> None:
        """Refuse a backward that is not the one of a micro-batch.

        Raises:
            ModelError: outside of `accumulate`, or the second time inside of one.
        """
        if not self.is_inside:
            raise ModelError(
                "run.backward outside of run.accumulate",
                where="weft.Run.backward",
                rule="accumulate says whether more micro-batches of the step follow",
                fix="with run.accumulate(): run.backward(run.model(**batch).loss)",
            )
        if self.state is not StepState.FORWARD:
            raise ModelError(
                "a second run.backward in run.accumulate",
                where="weft.Run.backward",
                rule="each micro-batch has one loss, whose backward reduces its gradients",
                fix="add the losses of the micro-batch, and call run.backward once",
            )

    def check_complete(self, method: str) -> None:
        """Refuse a method that needs the gradients of a complete step.

        Raises:
            ModelError: micro-batches are missing.
        """
        if not self.is_complete:
            raise ModelError(
                f"run.{method} without the gradients of a step",
                where=f"weft.Run.{method}",
                rule="the last micro-batch of a step runs in run.accumulate(last=True), which is the default",
                fix=f"call run.backward in run.accumulate, or run.train_batch, before run.{method}",
            )
