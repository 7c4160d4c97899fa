"""Metrics: bit-equal round trip, torn and damaged files, and terminal output."""

import errno
import io
import json
import math
import os
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from weft.errors import DataError
from weft.training.metrics import (
    Evaluation,
    MetricsWriter,
    StepMetrics,
    format_count,
    format_seconds,
    read_evaluations,
    read_metrics,
    utilization,
)
from weft.training.progress import TerminalProgress

STEP = StepMetrics(
    step=1,
    loss=0.1 + 0.2,
    grad_norm=1e-300,
    learning_rate=3e-4,
    tokens=2048,
    step_seconds=0.25,
    tokens_per_second=8192.0,
    mfu=None,
    peak_memory_bytes=2**33,
    comm_bytes=12,
    loss_scale=65536.0,
    skipped=False,
)
CONTRACT = """step, loss, grad_norm, learning_rate, tokens, step_seconds, tokens_per_second, mfu, peak_memory_bytes,
comm_bytes, loss_scale, skipped, overflowed, expert_imbalance, expert_imbalances, router_z_loss, rows_per_rank, moved_experts,
compiled_regions, checkpoint_seconds, comm, peak, peak_operation, pools, time, joules, dollars, grams_co2"""


def write(folder: Path, *steps: StepMetrics, evaluations: tuple[Evaluation, ...] = ()) -> Path:
    with MetricsWriter(folder) as writer:
        for step in steps:
            writer.step(step)
        for evaluation in evaluations:
            writer.evaluation(evaluation)
    return folder / "metrics.jsonl"


@pytest.mark.must("format: metrics.jsonl")
def test_metrics_round_trip(tmp_path: Path) -> None:
    steps = [STEP, replace(STEP, step=2, loss=math.pi, mfu=0.4, skipped=True)]
    path = write(tmp_path, *steps, evaluations=(Evaluation(2, 1 / 3),))
    assert read_metrics(path) == steps
    assert read_evaluations(tmp_path / "evaluations.jsonl") == [Evaluation(2, 1 / 3)]
    assert list(json.loads(path.read_text().splitlines()[0])) == re.findall(r"\w+", CONTRACT)
    assert list(tmp_path.glob("tensorboard/events.out.tfevents.*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@given(loss=st.floats(), grad_norm=st.floats(), mfu=st.none() | st.floats())
def test_every_float_round_trips_through_valid_json(folder: Path, loss: float, grad_norm: float, mfu: float | None):
    step = replace(STEP, loss=loss, grad_norm=grad_norm, mfu=mfu)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    path = write(folder, step)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    fields = json.loads(path.read_text(), parse_constant=refuse)
    odd = [name for name in ("loss", "grad_norm", "mfu") if not math.isfinite(getattr(step, name) or 0)]
    assert re.findall(r"(\w+)=", fields.get("non_finite", "")) == odd
    assert repr(read_metrics(path)) == repr([step])


def test_a_line_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.step(STEP)
        assert read_metrics(tmp_path / "metrics.jsonl") == [STEP]


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_torn_last_line_is_ignored_and_removed_by_the_next_writer(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, STEP, replace(STEP, step=2))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert read_metrics(path) == [STEP]
    write(tmp_path, replace(STEP, step=2, loss=5.0))
    assert read_metrics(path) == [STEP, replace(STEP, step=2, loss=5.0)]


def test_a_step_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    write(tmp_path, STEP, replace(STEP, step=2), replace(STEP, step=3))
    path = write(tmp_path, replace(STEP, step=2, loss=7.0))
    assert [(row.step, row.loss) for row in read_metrics(path)] == [(1, STEP.loss), (2, 7.0), (3, STEP.loss)]


@pytest.mark.parametrize(
    "damage",
    [b"{\n", b"\n", b"[1]\n", b"\xff\n", b'{"step": 1}\n', b'{"step": 1, "held_out_loss": 2.0, "extra": 1}\n'],
)
def test_any_other_damage_names_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(b'{"step": 1, "held_out_loss": 2.5}\n' + damage + b'{"step": 3, "held_out_loss": 2.0}\n')
    with pytest.raises(DataError) as caught:
        read_evaluations(path)
    assert caught.value.where == f"{path}, line 2"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read_metrics(tmp_path / "metrics.jsonl")


def show(console: Console, total: int) -> str:
    """Output of a run with a message and an evaluation in the middle."""
    with TerminalProgress(total, console) as progress:
        for step in range(1, total + 1):
            progress.step(replace(STEP, step=step))
            if step == max(1, total // 2):
                progress.message("step skipped: [red] loss is nan")
                progress.evaluation(Evaluation(step, 2.5))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("total", [2, 7, 24, 25, 49, 50, 99, 1000])
def test_plain_lines_are_few_and_hold_the_first_and_the_last_step(total: int) -> None:
    lines = show(Console(file=io.StringIO(), width=40), total).splitlines()
    shown = [int(found[1]) for line in lines if (found := re.match(rf"step (\d+)/{total}  loss 0\.3000 ", line))]
    assert shown[0] == 1
    assert shown[-1] == total
    assert min(total, 20) <= len(shown) <= 50
    expected = [line for line in lines if line.startswith("expected: 8.19k tokens/s, ")]
    assert len(expected) == (total > 3)
    assert len(lines) == len(shown) + len(expected) + 2  # the message and the evaluation: one line each, at any width
    assert "step skipped: [red] loss is nan" in lines
    assert "held-out 2.5000" in lines[-1]
    assert "8.19k tokens/s  8.00 GiB  0s left" in lines[-1]


def test_terminal_has_a_full_bar_below_the_messages() -> None:
    text = show(Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120), 30)
    assert "step skipped: [red] loss is nan\n" in text
    assert "step 30/30" in text.splitlines()[-1] or "step 30/30" in text.splitlines()[-2]
    assert text.count("\n") <= 4


def test_remaining_time_follows_recent_steps() -> None:
    """The first two steps of a process are slow and therefore ignored."""
    console = Console(file=io.StringIO(), width=200)
    with TerminalProgress(20, console) as progress:
        for step, seconds in enumerate((600.0, 300.0, 60.0, 0.0), 1):
            progress.step(replace(STEP, step=step, tokens=120, step_seconds=seconds))
    first, _, third, expected, fourth = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.endswith("3h 10m left")
    assert third.endswith("17m 00s left")
    assert expected.startswith("expected: 2 tokens/s, 17m 00s of training left, until ")
    assert fourth.endswith("14m 24s left")  # 16 steps at 0.9 * 60 seconds


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999.4, "999"), (999.9, "1k"), (12_345, "12.3k"), (1.5e6, "1.5M"), (30.5e9, "30.5B")]
)
def test_counts_have_a_unit(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m"), (275_000, "3d 04h")]
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_rate_above_the_peak_has_no_utilization() -> None:
    assert utilization(40e9, 160e9) == 0.25
    assert utilization(161e9, 160e9) is None
    assert utilization(40e9, None) is None


@pytest.mark.must("fault: A line of `metrics.jsonl` is damaged")
def test_writer_moves_damaged_lines_to_a_separate_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 4):
            writer.step(replace(STEP, step=step))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b'{"step": "odd"}\n' + lines[2] + b'{"torn')
    messages: list[str] = []
    with MetricsWriter(tmp_path, messages.append) as writer:
        writer.step(replace(STEP, step=2))
    assert [row.step for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    (backup,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert backup.read_bytes() == b'{"step": "odd"}\n' + lines[2] + b'{"torn'
    assert messages == [
        f"{tmp_path / 'metrics.jsonl'} is damaged from line 2 on: it is cut there, and the rest is saved in {backup}"
    ]


@pytest.mark.must("fault: The disk is full, has no inodes left, or is read-only")
def test_lines_are_buffered_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a size limit contains only complete lines at any time."""
    messages: list[str] = []
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, messages.append) as writer:
        writer.step(replace(STEP, step=1))
        size = path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, before[1]))
        try:
            writer.step(replace(STEP, step=2))
            writer.step(replace(STEP, step=3))
            assert path.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        writer.step(replace(STEP, step=4))
    assert [row.step for row in read_metrics(path)] == [1, 2, 3, 4]
    assert [text for text in messages if "metrics.jsonl" in text] == [
        f"{path} cannot be written: {os.strerror(errno.ENOSPC)}; training continues, lines are buffered in memory",
        f"{path} can be written again",
    ]
