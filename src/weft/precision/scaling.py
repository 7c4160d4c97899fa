"""Loss scaling: prevents underflow of fp16 gradients (Micikevicius et al., Mixed Precision Training, 2018)."""

from dataclasses import dataclass, replace
from typing import Literal

INITIAL_SCALE = 2.0**16
FACTOR = 2.0
WINDOW = 1000


@dataclass(frozen=True)
class LossScale:
    """Static or dynamic loss scale.

    A dynamic scale is halved after a step with non-finite gradients, whose update is skipped, and doubled after `WINDOW` finite
    steps in a row. A static scale never changes.
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def from_plan(cls, setting: Literal["none", "dynamic"] | float) -> "LossScale":
        """Initial scale for `plan.precision.loss_scale`."""
        if setting == "dynamic":
            return cls(INITIAL_SCALE, dynamic=True)
        return cls() if setting == "none" else cls(float(setting))

    def resumed(self, saved: "LossScale") -> "LossScale":
        """This initial scale, continued from the scale of a checkpoint: only a dynamic scale has moved since its start."""
        return saved if self.dynamic and saved.dynamic else self

    def after(self, finite: bool) -> "LossScale":
        """Scale of the next step.

        Args:
            finite: True if all gradients of this step were finite.
        """
        if not self.dynamic:
            return self
        if not finite:
            return replace(self, value=max(self.value / FACTOR, 1.0), good_steps=0)
        if self.good_steps + 1 == WINDOW:
            return replace(self, value=self.value * FACTOR, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
