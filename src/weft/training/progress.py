"""Progress of a run on the terminal."""

import math
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from weft.evaluation.results import TaskEvaluation
from weft.training.metrics import (
    Evaluation,
    StepMetrics,
    format_count,
    format_dollars,
    format_energy,
    format_seconds,
)

WARM_UP_STEPS = 2  # of a process: the first step fills caches, the second tracks memory


class TerminalProgress:
    """Progress display: a live progress bar on a terminal, else 25 to 50 plain lines for the full run.

    A context manager. Tokens per second and remaining time refer to the last step during the first three steps, because two
    warm-up steps are slower, and to an average over about ten steps later. The third step prints the expected end of the run,
    with its price and energy where they are known. Tokens per joule and dollars are those of this command.

    Args:
        total_steps: optimizer steps of the full run.
        console: output; `console.is_terminal` decides between progress bar and lines.
    """

    def __init__(self, total_steps: int, console: Console):
        self._total, self._console = total_steps, console
        self._every = max(1, total_steps // 25)
        self._seconds = self._tokens = 0.0
        self._last: StepMetrics | None = None
        self._seen = 0
        self._dollars = self._joules = 0.0
        self._all_tokens = 0
        self._held_out: float | None = None
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.fields[status]}")
        self._bar = Bar(*columns, console=console, expand=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total_steps, status="")

    def step(self, metrics: StepMetrics) -> None:
        """Show one optimizer step."""
        first = self._last is None
        self._seen += 1
        weight = 1.0 if self._seen <= WARM_UP_STEPS + 1 else 0.1
        self._seconds += weight * (metrics.step_seconds - self._seconds)
        self._tokens += weight * (metrics.tokens - self._tokens)
        self._last = metrics
        self._dollars += metrics.dollars or 0.0
        self._joules += metrics.joules or 0.0
        self._all_tokens += metrics.tokens
        self._bar.update(self._task, completed=metrics.step, status=self._status(metrics))
        if self._bar.disable and (first or metrics.step % self._every == 0 or metrics.step == self._total):
            self.message(f"step {metrics.step}/{self._total}  {self._status(metrics)}")
        if self._seen == WARM_UP_STEPS + 1 and metrics.step < self._total:
            left = self._seconds * (self._total - metrics.step)
            end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            text = f"expected: {self._speed()} tokens/s, {format_seconds(left)} of training left, until {end}"
            steps = self._total - metrics.step  # this step is the first one without extra work
            text += f", {format_dollars(metrics.dollars * steps)}" if metrics.dollars is not None else ""
            text += f", {format_energy(metrics.joules * steps)}" if metrics.joules is not None else ""
            self.message(text)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show one evaluation; its loss remains visible until the next evaluation."""
        self._held_out = evaluation.held_out_loss
        if self._bar.disable:
            self.message(f"step {evaluation.step}/{self._total}  held-out {self._held_out:.4f}")
        elif self._last is not None:
            self._bar.update(self._task, status=self._status(self._last))

    def tasks(self, evaluation: TaskEvaluation) -> None:
        """Show the results of tasks."""
        self.message(f"step {evaluation.step}/{self._total}  {evaluation.text()}")

    def message(self, text: str) -> None:
        """Print a line without markup: above the progress bar, or between the lines."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _speed(self) -> str:
        """Tokens per second of the recent steps."""
        return format_count(self._tokens / self._seconds if self._seconds else math.nan)

    def _status(self, metrics: StepMetrics) -> str:
        """Status text beside the progress bar."""
        held_out = "" if self._held_out is None else f"  held-out {self._held_out:.4f}"
        left = format_seconds(self._seconds * (self._total - metrics.step))
        memory = metrics.peak_memory_bytes / 2**30
        energy = f"  {self._all_tokens / self._joules:.3g} tokens/J" if self._joules else ""
        cost = f"  {format_dollars(self._dollars)}" if metrics.dollars is not None else ""
        return (
            f"loss {metrics.loss:.4f}{held_out}  {self._speed()} tokens/s{energy}  {memory:.2f} GiB{cost}  {left} left"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
