"""Callback of `weft train` that times its loop, and counts the calls for which the host waits in a step."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from bench import count_waits
from loop import FIRST_STEP, Clock

COUNTED_STEP = FIRST_STEP + 4


class WaitsClock(Clock):
    """Clock that also counts the waits of one step on CUDA."""

    def __init__(self, job: Any):
        super().__init__(job)
        self.catching = warnings.catch_warnings(record=True)
        self.caught: list[warnings.WarningMessage] = []

    def on_step(self, metrics: Any) -> None:
        """Begin to count after a step, and end after the next one."""
        super().on_step(metrics)
        if metrics.step == COUNTED_STEP - 1:
            self.caught = self.catching.__enter__() or []
            warnings.simplefilter("always")
            _set_mode("warn")
        if metrics.step == COUNTED_STEP:
            _set_mode("default")
            self.catching.__exit__(None, None, None)

    def on_end(self, folder: Path) -> None:
        """Write the waits too."""
        super().on_end(folder)
        (folder / "waits.json").write_text(json.dumps(count_waits(self.caught)))


def _set_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)
