"""Shared parts of all stages: the accelerator, timing, and tables."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.device.device import Device

Rows = list[dict[str, Any]]


@dataclass
class Bench:
    """The accelerator, and whether sizes are small."""

    device: Device
    torch_device: torch.device
    small: bool
    predicted_bytes: dict[str, int]
    """Peak bytes by memory option, from dry runs."""

    def free(self) -> None:
        """Free the memory of models that nothing refers to."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def seconds(self, function: Callable[..., Any], *arguments: Any, repeats: int = 10) -> float:
        """Median seconds of a call on the device, after two warm-up calls."""
        found = []
        for index in range(repeats + 2):
            start, end = self.device.event(), self.device.event()
            start.record()
            function(*arguments)
            end.record()
            self.device.synchronize()
            if index >= 2:
                found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = (f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
