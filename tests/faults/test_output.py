"""Output that cannot be written, and a terminal that hangs up: a run trains to its end, or saves as for SIGTERM."""

import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.kill import job_file, weft_train
from tests.lab.commands import completed, start_function
from tests.lab.jobs import write_job
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.cli import main
from weft.launch.output import keep_output
from weft.training.metrics import read_metrics

LAYOUT = "zero3 on 2"


def reader_left(descriptor: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, descriptor)


def full_disk(descriptor: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def hung_up(descriptor: int) -> None:
    terminal, end = pty.openpty()
    os.dup2(end, descriptor)
    os.close(end)
    os.close(terminal)


def read_only(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), descriptor)


def closed(descriptor: int) -> None:
    """As `>&-`; Python then has no stream."""
    os.close(descriptor)
    if name := {1: "stdout", 2: "stderr"}.get(descriptor):
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)


def ascii_only(descriptor: int) -> None:
    """As PYTHONIOENCODING=ascii."""
    name = {1: "stdout", 2: "stderr"}[descriptor]
    stream = open(descriptor, "w", encoding="ascii", closefd=False, buffering=1)  # noqa: SIM115
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
    print("the first line", file=stream)


def slow_reader(descriptor: int) -> None:
    """Full pipe that another process has made non-blocking, with a reader that starts late."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.write(writing, bytes(2**16))
    os.dup2(writing, descriptor)
    if not os.fork():
        os.close(writing)
        os.close(descriptor)
        time.sleep(0.2)
        while os.read(reading, 2**16):
            pass
        os._exit(0)
    os.close(writing)
    os.close(reading)


def writes(descriptors: tuple[int, ...], fault: Callable[[int], None], *argv: str) -> None:
    """Command whose output has a fault."""
    for descriptor in descriptors:
        fault(descriptor)
    sys.argv = ["weft", *argv]
    main()


FAULTS: dict[str, tuple[tuple[int, ...], Callable[[int], None]]] = {
    "the reader of stdout leaves": ((1,), reader_left),
    "the reader of stderr leaves": ((2,), reader_left),
    "the readers of both leave": ((1, 2), reader_left),
    "stdout is closed": ((1,), closed),
    "stderr is closed": ((2,), closed),
    "all three are closed": ((0, 1, 2), closed),
    "the disk of stdout is full": ((1,), full_disk),
    "the disk of both is full": ((1, 2), full_disk),
    "the terminal has hung up": ((1, 2), hung_up),
    "stdout is read-only": ((1,), read_only),
    "the encoding is ASCII": ((1, 2), ascii_only),
    "the reader is slow, and the pipe does not block": ((1,), slow_reader),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            name,
            marks=[pytest.mark.must("fault: stdout or stderr cannot be written")]
            * (name == "the readers of both leave"),
        )
        for name in FAULTS
    ],
)
def test_a_run_ends_in_order_whatever_happens_to_its_output(fault: str, tmp_path: Path) -> None:
    job, out = write_job(tmp_path, train={"steps": 3}), tmp_path / "run"
    descriptors, break_output = FAULTS[fault]
    arguments = ("train", str(job), "--nproc-per-node", "2")
    done = completed(start_function(["weft"], lambda: writes(descriptors, break_output, *arguments)), timeout=200)
    log = out / "logs" / "rank-0.err"
    said = log.read_text() if log.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + said
    assert [row.step for row in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]
    assert (out / "export" / "config.json").is_file()
    assert (out / "report.html").is_file()
    if break_output in (reader_left, full_disk, hung_up, read_only) and 1 in descriptors:
        assert said.startswith("weft: stdout cannot be written: ")  # rank 0 has printed its steps
        assert said.count("\n") == len(descriptors) or said.count("\n") == 1
    if descriptors == (1,) and break_output is not slow_reader:
        assert "Traceback" not in done.stderr


def print_through_a_fault(folder: Path) -> None:
    """Print to a file on a disk that is full for a moment."""
    file = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    keep_output(folder / "log")
    print("before")
    full_disk(1)
    print("lost")
    print("lost too")
    os.dup2(file, 1)
    print("after")


def test_dropped_output_leaves_a_line_in_the_log_and_before_the_next_output(tmp_path: Path) -> None:
    done = completed(start_function(["print"], lambda: print_through_a_fault(tmp_path)))
    line = "weft: stdout cannot be written: No space left on device; output is dropped"
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "printed").read_text().splitlines() == ["before", line, "after"]
    assert (tmp_path / "log").read_text().splitlines() == [line]


def test_the_other_stream_has_the_line_about_dropped_output(tmp_path: Path) -> None:
    def lose() -> None:
        reader_left(1)
        keep_output()
        print("lost")
        print("lost too")

    done = completed(start_function(["print"], lose))
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["weft: stdout cannot be written: Broken pipe; output is dropped"]


@pytest.mark.must("fault: The terminal hangs up")
def test_a_hang_up_finishes_the_step_and_saves(tmp_path: Path) -> None:
    """The shell and the kernel may both send the signal."""
    long = {"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1}
    job, out = job_file(tmp_path, LAYOUT, train=long, checkpoint={"every": 0}), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as command:
        command.rank_at(1, 4)
        for _ in range(2):
            command.process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert command.wait() == 128 + signal.SIGHUP, command.printed()
    last = read_metrics(out / "metrics.jsonl")[-1].step
    assert [step_of(path) for path in list_checkpoints(out)] == [last]
    assert (out / "export" / "config.json").is_file()


def ignore_hang_ups(argv: list[str]) -> None:
    """As nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = argv
    main()


def test_a_run_under_nohup_ignores_a_hang_up(tmp_path: Path) -> None:
    job, out = write_job(tmp_path, train={"steps": 30}), tmp_path / "run"
    argv = ["weft", "train", str(job), "--nproc-per-node", "2"]
    process = start_function(argv, lambda: ignore_hang_ups(argv))
    metrics, sent = out / "metrics.jsonl", 0
    while process.poll() is None:
        if metrics.exists() and sent < 5:  # while the ranks train
            process.send_signal(signal.SIGHUP)
            sent += 1
        time.sleep(0.05)
    assert process.returncode == 0, process.communicate()
    assert sent > 0
    assert read_metrics(metrics)[-1].step == 30
