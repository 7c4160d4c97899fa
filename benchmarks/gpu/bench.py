"""Shared parts of all stages: the accelerator, timing, and tables."""

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.device.device import Device

Row = dict[str, Any]
Rows = Iterable[Row]


@dataclass
class Bench:
    """The accelerator, and whether sizes are small."""

    device: Device
    torch_device: torch.device
    small: bool

    def free(self) -> None:
        """Free the memory of models that nothing refers to."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def seconds(self, function: Callable[..., Any], *arguments: Any, repeats: int = 10) -> float:
        """Median seconds of a call on the device, after two warm-up calls; without the time in which the host launches it."""
        return self.times(function, *arguments, repeats=repeats)[0]

    def times(self, function: Callable[..., Any], *arguments: Any, repeats: int = 10) -> tuple[float, float]:
        """Median seconds of a call on the device and on the host, after two warm-up calls.

        The device has other work when the call begins, so that the host is ahead of it.
        """
        found, launched = [], []
        size = 64 if self.small else 8192  # 1.1 TFLOP, some ms
        busy = torch.ones(size, size, dtype=torch.bfloat16, device=self.torch_device)
        for index in range(repeats + 2):
            start, end = self.device.event(), self.device.event()
            if self.device.type != "cpu":
                busy @ busy
                busy @ busy
            start.record()
            began = time.perf_counter()
            function(*arguments)
            launched.append(time.perf_counter() - began)
            end.record()
            self.device.synchronize()
            if index >= 2:
                found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found), statistics.median(launched[2:])


def count_waits(caught: Sequence[warnings.WarningMessage]) -> Counter[str]:
    """Calls for which the host waits by line, from the warnings of `torch.cuda.set_sync_debug_mode`."""
    waits = (warning for warning in caught if "synchroniz" in str(warning.message))
    return Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in waits)


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = (f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
