"""Spike detection: steps whose loss or gradient norm exceeds the recent trend.

Large runs have spikes at irregular intervals. PaLM (Chowdhery et al., 2022) had about 20. Each time the run was resumed from a
checkpoint some 100 steps earlier, and 200 to 500 batches were skipped; the same batches did no harm from another state. OPT
(Zhang et al., 2022) went back to a checkpoint before the loss blew up, with a lower learning rate. The training loop decides
what to do about a spike (warn, skip the update, roll back).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

MAD_TO_DEVIATION = 1.4826  # median absolute deviation -> standard deviation, of a normal distribution
LEAST_LOSS_RISE = 0.02  # of the median
LEAST_NORM_RISE = math.log(1.5)
TINY = 1e-30  # replaces a gradient norm of zero, which has no logarithm
STATE = ("loss", "norm", "high_loss", "high_norm")


class SpikeDetector:
    """Spike detector for loss and gradient norm. Deterministic on two values that all ranks share, so all ranks agree.

    The trend of the recent values is a line through the medians of their older and of their newer half, which a few outliers
    do not move. A value is a spike if it exceeds the end of the line by `threshold` robust standard deviations (1.4826 times
    the median distance from the line), and by at least 2 % (loss) or by half (gradient norm). Gradient norms are compared by
    their logarithm. A non-finite value is always a spike.

    Spikes are not added to the recent values, so that a second spike is measured like the first. After `patience` spikes in a
    row they become the new level: they replace the recent values, and detection pauses until there are `warm_up` values.
    """

    def __init__(self, window: int = 128, warm_up: int = 64, patience: int = 16, threshold: float = 8.0):
        """
        Args:
            window: number of recent values that a value is compared with.
            warm_up: number of values before detection starts.
            patience: number of spikes in a row that become the new level; at most `window`.
            threshold: in robust standard deviations; skewed noise exceeds 8 about once in a hundred thousand steps.
        """
        self.window, self.warm_up, self.patience, self.threshold = window, warm_up, patience, threshold
        self.loss: list[float] = []
        """Recent losses, in nats."""
        self.norm: list[float] = []
        """Logarithms of the recent gradient norms."""
        self.high_loss: list[float] = []
        """Spikes in a row, up to the last step."""
        self.high_norm: list[float] = []

    def observe(self, loss: float, grad_norm: float) -> str | None:
        """Check a step; call once per step, before its update.

        Args:
            loss: global mean loss of the step.
            grad_norm: global 2-norm of the gradient, before clipping.

        Returns:
            The reason if the step is a spike, else None.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss:.4g} and gradient norm {grad_norm:.4g} are not both finite"
        reasons = []
        level = self._judge(self.loss, self.high_loss, loss, lambda level: LEAST_LOSS_RISE * abs(level))
        if level is not None:
            reasons.append(f"loss {loss:.4g} exceeds its recent trend of {level:.4g}")
        log_norm = math.log(max(grad_norm, TINY))
        level = self._judge(self.norm, self.high_norm, log_norm, lambda _: LEAST_NORM_RISE)
        if level is not None:
            reasons.append(f"gradient norm {grad_norm:.4g} exceeds its recent trend of {math.exp(level):.4g}")
        return "; ".join(reasons) or None

    def _judge(
        self, last: list[float], high: list[float], value: float, least_rise: Callable[[float], float]
    ) -> float | None:
        """Trend level if the value is a spike, else None; adds the value to the recent values or to the spikes in a row."""
        if len(last) >= self.warm_up:
            level, deviation = predict_next(last)
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
        """State for a checkpoint, as JSON: a few hundred values."""
        return {name: list(getattr(self, name)) for name in STATE}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[float]], **settings: Any) -> "SpikeDetector":
        """Continue from `state()`; the settings are arguments of the constructor, and may differ from the earlier ones."""
        detector = cls(**settings)
        for name in STATE:
            setattr(detector, name, list(state[name]))
        return detector


def predict_next(last: Sequence[float]) -> tuple[float, float]:
    """Linear prediction of the next value, and its robust standard deviation."""
    half = len(last) // 2
    older, newer = median(last[:half]), median(last[-half:])
    slope = (newer - older) / (len(last) - half)  # distance between the centers of the two halves
    end = newer + slope * (half + 1) / 2
    distance = median(abs(x - (end + slope * (i - len(last)))) for i, x in enumerate(last))
    return end, MAD_TO_DEVIATION * distance
