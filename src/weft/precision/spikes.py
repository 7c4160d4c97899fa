"""Spikes: steps whose loss or gradient norm stands out of the steps before.

Large runs meet them at irregular intervals. PaLM (Chowdhery et al., 2022) saw about 20, and went on from a checkpoint some 100
steps before each, leaving out 200 to 500 batches; the same batches did no harm from another state. OPT (Zhang et al., 2022)
went back to a checkpoint before the loss blew up, with a lower learning rate. What to do about a spike (warn, skip the
update, roll back) is for the training loop to say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

MAD_TO_DEVIATION = 1.4826  # median absolute deviation -> standard deviation, of a normal distribution
LEAST_LOSS_RISE = 0.02  # of the median
LEAST_NORM_RISE = math.log(1.5)
TINY = 1e-30  # stands for a gradient norm of zero, which has no logarithm
STATE = ("loss", "norm", "high_loss", "high_norm")


class SpikeWatch:
    """Says of each step whether it is a spike. Pure arithmetic on two numbers that all ranks have: all say the same.

    The last values lie along a line, through the medians of their older and of their newer half, which a few outliers do not
    move. A value stands out when it is above the line's end by `threshold` robust standard deviations (1.4826 times the
    median distance from the line), and the loss by 2 %, the gradient norm by half. Gradient norms are compared by their
    logarithm. A value that is no finite number always stands out.

    What stands out is not added to the last values, so that a second spike is measured like the first. After `patience` such
    values in a row it is the new level: they replace the last values, and nothing is judged until there are `warm_up`
    of them.
    """

    def __init__(self, window: int = 128, warm_up: int = 64, patience: int = 16, threshold: float = 8.0):
        """
        Args:
            window: number of last values that a value is compared with.
            warm_up: number of values that are waited for before any is judged.
            patience: number of steps after which a spike is a new level; at most `window`.
            threshold: in robust standard deviations; 8 leaves out what skewed noise does once in a hundred thousand steps.
        """
        self.window, self.warm_up, self.patience, self.threshold = window, warm_up, patience, threshold
        self.loss: list[float] = []
        """Last values, in nats."""
        self.norm: list[float] = []
        """Last values, logarithms."""
        self.high_loss: list[float] = []
        """Values in a row, up to the last step, that stood out."""
        self.high_norm: list[float] = []

    def observe(self, loss: float, grad_norm: float) -> str | None:
        """Look at a step, once, before its update.

        Args:
            loss: global mean of the step.
            grad_norm: global 2-norm, before clipping.

        Returns:
            Why this step is a spike; None if it is not.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss:.4g} and gradient norm {grad_norm:.4g} are not both finite"
        reasons = []
        level = self._judge(self.loss, self.high_loss, loss, lambda level: LEAST_LOSS_RISE * abs(level))
        if level is not None:
            reasons.append(f"loss {loss:.4g} stands out of the last ones, which lead to {level:.4g}")
        log_norm = math.log(max(grad_norm, TINY))
        level = self._judge(self.norm, self.high_norm, log_norm, lambda _: LEAST_NORM_RISE)
        if level is not None:
            reasons.append(
                f"gradient norm {grad_norm:.4g} stands out of the last ones, which lead to {math.exp(level):.4g}"
            )
        return "; ".join(reasons) or None

    def _judge(
        self, last: list[float], high: list[float], value: float, least_rise: Callable[[float], float]
    ) -> float | None:
        """The level that a value stands out of, if it does; the value goes where it belongs."""
        if len(last) >= self.warm_up:
            level, deviation = expect(last)
            if value - level > max(self.threshold * deviation, least_rise(level)):
                high.append(value)
                if len(high) < self.patience:
                    return level
                last[:], high[:] = high, []
                return None
        high.clear()
        last.append(value)
        del last[: -self.window]
        return None

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps, for JSON: some hundred numbers."""
        return {name: list(getattr(self, name)) for name in STATE}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[float]], **settings: Any) -> "SpikeWatch":
        """Go on from `state()`; settings are those of the constructor and may differ from those before."""
        watch = cls(**settings)
        for name in STATE:
            setattr(watch, name, list(state[name]))
        return watch


def expect(last: Sequence[float]) -> tuple[float, float]:
    """What comes next, and its robust standard deviation, from values along a line."""
    half = len(last) // 2
    older, newer = median(last[:half]), median(last[-half:])
    slope = (newer - older) / (len(last) - half)  # their middles are so many steps apart
    end = newer + slope * (half + 1) / 2
    distance = median(abs(x - (end + slope * (i - len(last)))) for i, x in enumerate(last))
    return end, MAD_TO_DEVIATION * distance
