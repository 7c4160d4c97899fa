"""Loss scaling: keeps fp16 gradients above underflow (Micikevicius et al., Mixed Precision Training, 2018)."""

from dataclasses import dataclass, replace
from typing import Literal

INITIAL_SCALE = 2.0**16
FACTOR = 2.0
WINDOW = 1000


@dataclass(frozen=True)
class LossScale:
    """The factor on the loss before backward, and how it moves.

    A dynamic scale is halved after a step with non-finite gradients, which is skipped, and doubled after `WINDOW` good
    steps in a row. A fixed one stays.
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def from_plan(cls, setting: Literal["none", "dynamic"] | float) -> "LossScale":
        """The scale at the first step for `plan.precision.loss_scale`."""
        if setting == "dynamic":
            return cls(INITIAL_SCALE, dynamic=True)
        return cls() if setting == "none" else cls(float(setting))

    def after(self, finite: bool) -> "LossScale":
        """The scale of the next step, given whether all gradients of this one were finite."""
        if not self.dynamic:
            return self
        if not finite:
            return replace(self, value=max(self.value / FACTOR, 1.0), good_steps=0)
        if self.good_steps + 1 == WINDOW:
            return replace(self, value=self.value * FACTOR, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
