"""What a run says while it trains: one line of numbers a step, on disk, in TensorBoard and on the terminal.

`metrics.jsonl` holds one `StepMetrics` a line and `evaluations.jsonl` one `Evaluation` a line, floats in full. A line
counts once its newline is written: what a killed run left behind it is dropped, by the reader and by a writer that
appends to the file later. So is, with what follows it, a line that is damaged: the writer keeps it in a file beside.

Training does not notice where these files cannot be written, on a full disk say: lines wait in memory until there is room.
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from weft.errors import DataError

MOST_WAITING = 100_000  # lines that wait for room on the disk, about 100 MiB
WARM_UP_STEPS = 2  # of a process: the first step prepares what others reuse, the second is watched

Record = TypeVar("Record")


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Loss and gradient norm are over all target tokens of all ranks."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean cross-entropy of a target token, in nats."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    tokens: int
    """Target tokens of this step, over all ranks."""
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs of the step as a share of the devices' peak; None where the peak is unknown."""
    peak_memory_bytes: int
    """Of the rank that held most."""
    comm_bytes: int
    """Bytes a rank sent in this step."""
    loss_scale: float
    skipped: bool
    """The guard saw a number that is not finite and left the weights as they were."""
    overflowed: tuple[int, ...] = ()
    """Ranks of pp whose gradients were not finite; without a pipeline 0."""
    expert_imbalance: float | None = None
    """Tokens of the busiest expert over the mean, in the most uneven layer; None without experts."""
    checkpoint_seconds: float = 0.0
    """What training waited for the copy of the last checkpoint, before this step."""
    comm: dict[str, dict[str, float]] | None = None
    """By mesh axis, and by link where that is in two levels ("dp_shard between" hosts, within a "host"): bytes and messages
    that a rank sent, as comm_bytes, also by operation; and, on CPU, seconds of rank 0 that were exposed and hidden."""
    peak: dict[str, int] | None = None
    """Bytes at the fullest moment of this step on rank 0, by kind; activations by the part of the model that made them. Of the
    second step of a process, which is watched."""
    peak_maker: str | None = None
    """The operation that made that moment, its results, and in which part of the model."""
    pools: dict[str, dict[str, int]] | None = None
    """Of rank 0, counters in bytes of the memory where activations and the optimizer's states wait: requested so far, and
    reused of that; live now, and at most; and held in all."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy of held-out target tokens, in nats, after `step` optimizer steps."""

    step: int
    held_out_loss: float

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class MetricsWriter:
    """Appends metrics to `metrics.jsonl`, `evaluations.jsonl` and `tensorboard/` of a run folder. For rank 0 only.

    A context manager; every line is on its way to the disk when its call returns, or waits for room there.

    Args:
        out: the run folder; made if it is not there.
        say: is told, once, that a file cannot be written, and when it is written again.
    """

    def __init__(self, out: Path, say: Callable[[str], None] = print):
        out.mkdir(parents=True, exist_ok=True)
        self._steps = _Lines(out / "metrics.jsonl", StepMetrics, say)
        self._evaluations = _Lines(out / "evaluations.jsonl", Evaluation, say)
        self._board = _Board(out / "tensorboard", say)

    def step(self, metrics: StepMetrics) -> None:
        """Write one optimizer step."""
        self._steps.write(_to_line(metrics))
        values = {f"train/{name}": value for name, value in asdict(metrics).items() if name != "step"}
        self._board.write(values, metrics.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation on held-out text."""
        self._evaluations.write(_to_line(evaluation))
        self._board.write({"evaluation/held_out_loss": evaluation.held_out_loss}, evaluation.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.close()
        self._evaluations.close()
        self._board.close()


class _Lines:
    """A file that grows by whole lines; those that do not fit wait."""

    def __init__(self, path: Path, kind: type, say: Callable[[str], None]):
        self.path, self.kind, self.say = path, kind, say
        self.file: FileIO | None = None
        self.waiting: deque[str] = deque()
        self.lost = 0
        self.problem = ""

    def write(self, line: str) -> None:
        if len(self.waiting) == MOST_WAITING:
            self.waiting.popleft()
            self.lost += 1
        self.waiting.append(line)
        try:
            self._write_waiting()
        except OSError as error:
            if not self.problem:
                self.say(f"{self.path} cannot be written: {error.strerror}; training goes on, lines wait in memory")
            self.problem = str(error.strerror)
            return
        if self.problem:
            lost = f", without {self.lost} lines that were too many to keep" if self.lost else ""
            self.say(f"{self.path} is written again{lost}")
            self.problem, self.lost = "", 0

    def _write_waiting(self) -> None:
        if self.file is None:
            self.file = _open_lines(self.path, self.kind, self.say)
        while self.waiting:
            data, size = self.waiting[0].encode(), os.fstat(self.file.fileno()).st_size
            if self.file.write(data) != len(data):  # a part of it fitted
                os.ftruncate(self.file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting.popleft()

    def close(self) -> None:
        if self.waiting:
            self.say(f"{self.path} lacks its last {len(self.waiting)} lines: {self.problem}")
        if self.file is not None:
            self.file.close()


class _Board:
    """Event files of TensorBoard, by tensorboardX's own writer without its thread: that dies on a full disk, unheard."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.say, self.said = folder, say, False
        self.writer: Any = None

    def write(self, values: Mapping[str, object], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event  # only the rank that writes should pay for it
        from tensorboardX.summary import scalar

        try:
            if self.writer is None:
                self._open()
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(
                    value
                ):  # others make it warn; the JSON lines keep them
                    self.writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            self.writer.flush()
        except OSError as error:
            if not self.said:
                self.say(f"{self.folder} cannot be written: {error.strerror}; training goes on, its curves have a gap")
            self.said = True
            self.close()

    def _open(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self.folder.mkdir(exist_ok=True)
        suffix = f".{sum(1 for _ in self.folder.iterdir())}"  # names end with the second: two may fall into one
        self.writer = EventsWriter(str(self.folder / "events"), suffix)

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):  # of what is left in its buffer
                self.writer.close()
            self.writer = None


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read a `metrics.jsonl` back, in order of steps. A step that a resumed run repeated counts once, as written last.

    Raises:
        DataError: the file is missing, or a line other than a torn last one is damaged.
    """
    rows = {metrics.step: metrics for metrics in _read_lines(path, StepMetrics)}
    return [rows[step] for step in sorted(rows)]


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read an `evaluations.jsonl` back, by the rules of `read_metrics`."""
    rows = {evaluation.step: evaluation for evaluation in _read_lines(path, Evaluation)}
    return [rows[step] for step in sorted(rows)]


def _open_lines(path: Path, kind: type, say: Callable[[str], None]) -> FileIO:
    """Open for appending whole lines, without what a reader would refuse at the end; that is kept in a file beside."""
    file = FileIO(path, "a+")
    content = path.read_bytes()
    good = content.rfind(b"\n") + 1  # a killed run may have left a torn line
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    place = 0
    for number, line in enumerate(content[:good].splitlines(keepends=True), start=1):
        try:
            _parse(adapter, line)
        except (ValueError, TypeError, AttributeError):
            aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
            aside.write_bytes(content[place:])
            say(f"{path} is damaged from line {number} on: it is cut there, and the rest kept in {aside}")
            good = place
            break
        place += len(line)
    os.ftruncate(file.fileno(), good)
    return file


def _to_line(record: StepMetrics | Evaluation) -> str:
    """One JSON object and a newline. JSON has no NaN: such a field is null, and `non_finite` says what it was."""
    fields = asdict(record)
    odd = {name: value for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        fields |= dict.fromkeys(odd) | {"non_finite": " ".join(f"{name}={value}" for name, value in odd.items())}
    return json.dumps(fields, allow_nan=False) + "\n"


def _read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """Every whole line of a file as a record; what follows the last newline is torn and left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"there is no file {path}", fix="name a file that a training run wrote") from None
    adapter = TypeAdapter(kind)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_parse(adapter, line))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"a damaged line: {line[:80].decode(errors='replace')!r}",
                where=f"{path}, line {number}",
                rule=f"every line is one JSON object with the fields of {kind.__name__} ({str(error).splitlines()[0]})",
                fix="remove the line; only a torn last one, without its newline, is left out by itself",
            ) from None
    return records


def _parse(adapter: TypeAdapter[Record], line: bytes) -> Record:
    fields = json.loads(line)
    fields |= dict(entry.split("=") for entry in fields.pop("non_finite", "").split())
    return adapter.validate_python(fields)


class TerminalProgress:
    """Shows a run on the terminal: a live bar where there is one, else 25 to 50 plain lines for the whole run.

    A context manager. Tokens a second and the time left are those of the last step at first, because the first two steps take
    longer than others, and then smoothed over about ten steps. The third step prints what is expected of the whole run.

    Args:
        total_steps: optimizer steps of the whole run.
        console: where to print; `console.is_terminal` decides between the bar and the lines.
    """

    def __init__(self, total_steps: int, console: Console):
        self._total, self._console = total_steps, console
        self._every = max(1, total_steps // 25)
        self._seconds = self._tokens = 0.0
        self._last: StepMetrics | None = None
        self._seen = 0
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
        self._bar.update(self._task, completed=metrics.step, status=self._status(metrics))
        if self._bar.disable and (first or metrics.step % self._every == 0 or metrics.step == self._total):
            self.message(f"step {metrics.step}/{self._total}  {self._status(metrics)}")
        if self._seen == WARM_UP_STEPS + 1 and metrics.step < self._total:
            left = self._seconds * (self._total - metrics.step)
            end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            self.message(f"expected: {self._speed()} tokens/s, {format_seconds(left)} of training left, until {end}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show one evaluation; its loss stays in sight from then on."""
        self._held_out = evaluation.held_out_loss
        if self._bar.disable:
            self.message(f"step {evaluation.step}/{self._total}  held-out {self._held_out:.4f}")
        elif self._last is not None:
            self._bar.update(self._task, status=self._status(self._last))

    def message(self, text: str) -> None:
        """Print a line as it is: above the bar, or between the lines."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _speed(self) -> str:
        """Tokens a second of the recent steps."""
        return format_count(self._tokens / self._seconds if self._seconds else math.nan)

    def _status(self, metrics: StepMetrics) -> str:
        """The numbers beside the bar."""
        held_out = "" if self._held_out is None else f"  held-out {self._held_out:.4f}"
        left = format_seconds(self._seconds * (self._total - metrics.step))
        memory = metrics.peak_memory_bytes / 2**30
        return f"loss {metrics.loss:.4f}{held_out}  {self._speed()} tokens/s  {memory:.2f} GiB  {left} left"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def utilization(rate: float, peak: float | None) -> float | None:
    """Model FLOPs utilization: the share of a peak rate; None where the peak is not known or was measured too low.

    A peak that is measured while other processes compute can be below the rate of a later step.
    """
    return rate / peak if peak and rate <= peak else None


def format_count(value: float) -> str:
    """A count with three digits and a unit of thousands: 950, 12.3k, 1.27M, 30.5B."""
    for unit, size in ("B", 1e9), ("M", 1e6), ("k", 1e3):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """A duration with two units at most: 48s, 3m 20s, 2h 05m, 3d 04h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minutes}m {second:02}s" if minutes else f"{second}s"
