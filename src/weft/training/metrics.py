"""Metrics of a run: JSON Lines files and TensorBoard.

`metrics.jsonl` holds one `StepMetrics` per line, `attempts.jsonl` one `Attempt`, `evaluations.jsonl` one `Evaluation`,
`eval.jsonl` one `TaskEvaluation`. A line is valid once its newline is written: readers ignore the torn last line of a killed
run, and a later writer removes it. A writer also cuts the file at a damaged line, and saves the rest in a separate file. If
these files cannot be written, for example on a full disk, training continues and lines are buffered in memory.
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

from weft.errors import DataError
from weft.evaluation.results import HISTORY, TaskEvaluation
from weft.files import open_file, replace_file
from weft.training.tensorboard import TensorBoardWriter

ATTEMPTS = "attempts.jsonl"
MAX_BUFFERED_LINES = 100_000  # about 100 MiB
MAX_THINNED = 10_000  # records of a file that keep a field of which a page shows medians


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step. Loss and gradient norm are over all target tokens of all ranks."""

    step: int
    """Step, counted from 1."""
    loss: float
    """Mean cross-entropy per target token, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    tokens: int
    """Target tokens of the step, over all ranks."""
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization: fraction of the peak FLOPs of all devices; None if the peak is unknown."""
    peak_memory_bytes: int
    """Peak device memory so far, without the update of the step; maximum over ranks."""
    comm_bytes: int
    """Bytes sent per rank in the step."""
    loss_scale: float
    skipped: bool
    """True if the update was skipped: non-finite loss or gradients, or a spike."""
    overflowed: tuple[int, ...] = ()
    """pp ranks with non-finite gradients; (0,) without a pipeline."""
    expert_imbalance: float | None = None
    """Tokens of the busiest expert divided by the mean, in the most imbalanced layer; None without experts."""
    expert_imbalances: tuple[float, ...] = ()
    """The same ratio for each block of the model, 0 for a block without experts; empty without experts."""
    router_z_loss: float | None = None
    """Mean of logsumexp(router logits)^2 over all tokens and layers; None without train.router_z_loss."""
    rows_per_rank: tuple[int, ...] = ()
    """Rows of each data rank in this step; empty for equal numbers of rows."""
    moved_experts: int | None = None
    """Experts that moved to another rank after the step, in all layers; None without plan.parallel.expert_relocate_every."""
    compiled_regions: int | None = None
    """Compiled regions that ran in the step on rank 0, once each time they ran; None without plan.compute.compile."""
    checkpoint_seconds: float = 0.0
    """Seconds that the previous checkpoint blocked training before this step."""
    comm: dict[str, dict[str, float]] | None = None
    """Bytes and messages sent per rank, and on CPU exposed and hidden seconds of rank 0, by mesh axis and kind of link."""
    peak: dict[str, int] | None = None
    """Bytes at peak memory on rank 0, by kind; activations by part of the model. Only in the second step of a process."""
    peak_operation: str | None = None
    """Operation at peak memory, its results, and its part of the model."""
    pools: dict[str, dict[str, int]] | None = None
    """Bytes of the memory pools for offloaded tensors on rank 0: requested, reused, live, peak live and held."""
    time: float = 0.0
    """Unix time in seconds at the end of the step; 0 in runs of version 0.1."""
    joules: float | None = None
    """Energy of all devices since the end of the previous step of the process; None if nothing measures or states it."""
    dollars: float | None = None
    """Price of all devices for the same time; None without cluster.dollars_per_hour."""
    grams_co2: float | None = None
    """Emission for the same energy; None without cluster.grams_co2_per_kwh."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Attempt:
    """Start of the ranks of a run: the first one, a restart after a failure, or a resume."""

    attempt: int
    """0 for a new command, then the number of the restart."""
    time: float
    """Unix time in seconds at which rank 0 started."""
    step: int
    """Steps that the run had completed."""
    world_size: int
    devices: int
    """Number of accelerators; of hosts on cpu."""
    energy: str
    """Source of the energy: counters, or a stated power; empty without one."""
    attention: str = ""
    """Attention kernels, and the times by which they were chosen; empty for those of torch's own order."""
    measured_kernels: tuple[str, str] | None = None
    """Kernels of rows and of documents, where times chose them: restarts keep them, as others would round differently."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy of held-out target tokens, in nats, after `step` optimizer steps."""

    step: int
    held_out_loss: float

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class MetricsWriter:
    """Writer of `metrics.jsonl`, `evaluations.jsonl` and `tensorboard/` in a run folder; for rank 0 only.

    A context manager. Each line is passed to the operating system before its call returns, or buffered if that fails.

    Args:
        out: run folder; created if missing.
        log: function that prints a message when a file cannot be written, and when it can be written again.
    """

    def __init__(self, out: Path, log: Callable[[str], None] = print):
        out.mkdir(parents=True, exist_ok=True)
        self._steps = JsonLinesFile(out / "metrics.jsonl", StepMetrics, log)
        self._attempts = JsonLinesFile(out / ATTEMPTS, Attempt, log)
        self._evaluations = JsonLinesFile(out / "evaluations.jsonl", Evaluation, log)
        self._tasks = JsonLinesFile(out / HISTORY, TaskEvaluation, log)
        self._tensorboard = TensorBoardWriter(out / "tensorboard", log)

    def attempt(self, attempt: Attempt) -> None:
        """Write the start of the ranks."""
        self._attempts.write(to_line(attempt))

    def step(self, metrics: StepMetrics) -> None:
        """Write the metrics of one optimizer step."""
        self._steps.write(to_line(metrics))
        values = {f"train/{name}": value for name, value in asdict(metrics).items() if name != "step"}
        self._tensorboard.write(values, metrics.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the result of one evaluation."""
        self._evaluations.write(to_line(evaluation))
        self._tensorboard.write({"evaluation/held_out_loss": evaluation.held_out_loss}, evaluation.step)

    def tasks(self, evaluation: TaskEvaluation) -> None:
        """Write the results of tasks."""
        self._tasks.write(to_line(evaluation))
        self._tensorboard.write({f"evaluation/{k}": v for k, v in evaluation.values().items()}, evaluation.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._steps, self._attempts, self._evaluations, self._tasks, self._tensorboard):
            file.close()


class JsonLinesFile:
    """JSON Lines file that is appended by complete lines; lines that cannot be written are buffered."""

    def __init__(self, path: Path, record_type: Any, log: Callable[[str], None]):
        self.path, self.record_type, self.log = path, record_type, log
        self.file: FileIO | None = None
        self.buffer: deque[str] = deque()
        self.dropped = 0
        self.problem = ""

    def write(self, line: str) -> None:
        self.add(line)
        self.flush()

    def add(self, line: str) -> None:
        """Buffer a line."""
        if len(self.buffer) == MAX_BUFFERED_LINES:
            self.buffer.popleft()
            self.dropped += 1
        self.buffer.append(line)

    def flush(self) -> None:
        """Write the buffered lines."""
        try:
            self._write_buffer()
        except OSError as error:
            if not self.problem:
                what = f"{self.path} cannot be written: {error.strerror}"
                self.log(f"{what}; training continues, lines are buffered in memory")
            self.problem = str(error.strerror)
            return
        if self.problem:
            dropped = f"; {self.dropped} lines that exceeded the buffer are lost" if self.dropped else ""
            self.log(f"{self.path} can be written again{dropped}")
            self.problem, self.dropped = "", 0

    def _write_buffer(self) -> None:
        if self.file is None:
            self.file = _open_lines(self.path, self.record_type, self.log)
        while self.buffer:
            data, size = self.buffer[0].encode(), os.fstat(self.file.fileno()).st_size
            if self.file.write(data) != len(data):  # the disk became full within the line
                os.ftruncate(self.file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.buffer.popleft()

    def close(self) -> None:
        if self.buffer:
            self.log(f"{self.path} lacks its last {len(self.buffer)} lines: {self.problem}")
        if self.file is not None:
            self.file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read a `metrics.jsonl`, sorted by step. Of a step that a resumed run repeated, the last line counts.

    Raises:
        DataError: the file is missing, or a line other than a torn last line is damaged.
    """
    return sort_by_step(read_lines(path, StepMetrics))


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read an `evaluations.jsonl`, as `read_metrics` reads a `metrics.jsonl`."""
    return sort_by_step(read_lines(path, Evaluation))


def read_task_evaluations(path: Path) -> list[TaskEvaluation]:
    """Read an `eval.jsonl`, as `read_metrics` reads a `metrics.jsonl`."""
    return sort_by_step(read_lines(path, TaskEvaluation))


def read_history(run: Path) -> tuple[list[Attempt], list[StepMetrics]]:
    """Read the starts of the ranks and all steps of a run folder in the order of the files, repeated steps included.

    Of a long run, every n-th step has its communication, which takes most of the memory, and the others have None.

    Raises:
        DataError: a line other than a torn last line is damaged.
    """
    attempts, steps = run / ATTEMPTS, run / "metrics.jsonl"
    return (
        read_lines(attempts, Attempt) if attempts.exists() else [],
        read_lines(steps, StepMetrics, thinned="comm") if steps.exists() else [],
    )


def sort_by_step(records: Sequence[Any]) -> list[Any]:
    """Records in the order of their steps; of several with the same step, the last."""
    rows = {record.step: record for record in records}
    return [rows[step] for step in sorted(rows)]


def _open_lines(path: Path, record_type: Any, log: Callable[[str], None]) -> FileIO:
    """Open a file for appending lines. It is cut at its first damaged line, and the rest is saved in a separate file."""
    file = FileIO(open_file(path, os.O_RDWR | os.O_APPEND), "a+")
    file.seek(0)
    content = file.readall()
    valid_bytes = content.rfind(b"\n") + 1  # a killed run may have written a torn last line
    adapter: TypeAdapter[Any] = TypeAdapter(record_type)
    offset = 0
    for line_number, line in enumerate(content[:valid_bytes].splitlines(keepends=True), start=1):
        try:
            _parse(adapter, line)
        except (ValueError, TypeError, AttributeError):
            backup = path.with_name(f"{path.name}.damaged-{int(time.time())}")
            replace_file(backup, content[offset:])
            log(f"{path} is damaged from line {line_number} on: it is cut there, and the rest is saved in {backup}")
            valid_bytes = offset
            break
        offset += len(line)
    os.ftruncate(file.fileno(), valid_bytes)
    return file


def to_line(record: Any) -> str:
    """JSON line of a dataclass. JSON has no NaN or infinity: such a field is null, and `non_finite` holds its value as text."""
    fields = asdict(record)
    bad = {name: value for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        fields |= dict.fromkeys(bad) | {"non_finite": " ".join(f"{name}={value}" for name, value in bad.items())}
    return json.dumps(fields, allow_nan=False) + "\n"


def read_lines(path: Path, record_type: Any, thinned: str = "", skip_torn: bool = False) -> list[Any]:
    """Records of all complete lines of a file, read line by line; a torn last line is ignored.

    Args:
        path: file.
        record_type: dataclass of its lines.
        thinned: field with a default that about `MAX_THINNED` records keep, the last one among them; "" for none.
        skip_torn: ignore empty and torn lines anywhere, in a `HostLinesFile`.

    Raises:
        DataError: the file is missing, or a line is damaged.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(record_type)
    records, name = [], getattr(record_type, "__name__", record_type)
    for line_number, line, is_kept in _complete_lines(path, bool(thinned)):
        try:
            records.append(_parse(adapter, line, "" if is_kept else thinned))
        except (ValueError, TypeError, AttributeError) as error:
            if skip_torn and isinstance(error, json.JSONDecodeError):
                continue
            raise DataError(
                f"a damaged line: {line[:80].decode(errors='replace')!r}",
                where=f"{path}, line {line_number}",
                rule=f"every line is one JSON object with the fields of {name} ({str(error).splitlines()[0]})",
                fix="remove the line; only a torn last line, without a newline, is ignored automatically",
            ) from None
    return records


def _complete_lines(path: Path, thins: bool) -> Iterator[tuple[int, bytes, bool]]:
    """Number and content of each complete line, and whether it is among those that keep all fields."""
    try:
        with path.open("rb") as file:
            count = sum(line.endswith(b"\n") for line in file) if thins else 0
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line[:-1], (count - number) % (count // MAX_THINNED + 1) == 0
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"there is no file {path}", fix="name a file that a training run wrote") from None


def _parse(adapter: TypeAdapter[Any], line: bytes, without: str = "") -> Any:
    fields = json.loads(line)
    fields.pop(without, None)
    fields |= dict(entry.split("=") for entry in fields.pop("non_finite", "").split())
    return adapter.validate_python(fields)


def utilization(rate: float, peak: float | None) -> float | None:
    """Model FLOPs utilization, a fraction of the peak; None if the peak is unknown or below `rate`.

    A peak that was measured while other processes used the device can be below the rate of a later step.
    """
    return rate / peak if peak and rate <= peak else None


def format_count(value: float) -> str:
    """Format a count with three digits and a unit: 950, 12.3k, 1.27M, 30.5B."""
    for unit, size in ("B", 1e9), ("M", 1e6), ("k", 1e3):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Format a duration with at most two units: 48s, 3m 20s, 2h 05m, 3d 04h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minutes}m {second:02}s" if minutes else f"{second}s"


def format_dollars(dollars: float) -> str:
    """Format a price: $1,234, $12.30, $0.0042."""
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.2g}"


def format_energy(joules: float) -> str:
    """Format an energy: 950 J, 12.3 kJ, 1.27 kWh, 30.5 MWh."""
    for unit, size in ("MWh", 3.6e9), ("kWh", 3.6e6), ("kJ", 1e3):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:.3g} J"
