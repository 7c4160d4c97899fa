"""Runs ended by a signal: the current step is finished and saved, a second signal stops at once, and the run resumes."""

import os
import re
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.faults.kill import Command, job_file, processes, ranks_of, weft_train
from tests.faults.test_runs import job_of, stop_after_5
from tests.lab.commands import weft
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.training.metrics import read_evaluations, read_metrics

LAYOUT = "zero3 on 2"
LONG = {"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1}
NO_INTERVAL = {"every": 0}


def press(command: Command, number: signal.Signals = signal.SIGINT) -> str:
    """Send a signal to the launcher and return its reply."""
    before = len(command.errors())
    command.process.send_signal(number)
    return command.until(lambda: command.errors()[before:], "an answer to the signal")[0]


def line_with(command: Command, words: str) -> str:
    """The only line of output that contains the given words."""
    (found,) = [line.text for line in command.lines if words in line.text]
    return found


@pytest.mark.slow("whole commands, one of them resumes")
def test_an_interrupted_run_without_a_checkpoint_interval_resumes_bit_equal(tmp_path: Path) -> None:
    whole, _ = train_in_the_pool(*job_of(tmp_path, "zero 3 on 2", "whole"))
    job, ranks = job_of(tmp_path, "zero 3 on 2", "parts", checkpoint=NO_INTERVAL)
    parts, _ = train_in_the_pool(job, ranks, fault=stop_after_5)
    assert [step_of(path) for path in list_checkpoints(parts)] == [5]
    train_in_the_pool(job, ranks, resume="auto")
    one, other = (read_metrics(run / "metrics.jsonl") for run in (whole, parts))
    assert [(row.step, row.loss, row.grad_norm) for row in one] == [
        (row.step, row.loss, row.grad_norm) for row in other
    ]
    assert (whole / "export/model.safetensors").read_bytes() == (parts / "export/model.safetensors").read_bytes()


def test_completed_run_without_an_interval_has_no_checkpoint(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "zero 3 on 2", "run", checkpoint=NO_INTERVAL, train={"steps": 2})
    run, _ = train_in_the_pool(job, ranks)
    assert list_checkpoints(run) == []


@pytest.mark.must("fault: Ctrl-C, or SIGTERM of a scheduler")
@pytest.mark.must("command: train")
def test_ctrl_c_finishes_the_step_saves_and_prints_the_command_that_resumes(tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=LONG, checkpoint=NO_INTERVAL), tmp_path / "a run"
    with weft_train(job, LAYOUT, out, "--set", "optimizer.lr=0.005") as command:
        command.rank_at(1, 4)
        said = r"weft: (finishing step \d+|\w+ after step \d+, then ending), press again to stop now"
        assert re.fullmatch(said, press(command))
        assert command.wait() == 128 + signal.SIGINT, command.printed()
    assert command.errors()[1:] == ["weft: stopped by SIGINT"]
    assert not any(word in line.text for line in command.lines for word in ("error", "Traceback"))
    last = read_metrics(out / "metrics.jsonl")[-1].step
    assert line_with(command, "saved after step") == f"saved after step {last} in {out / f'step-{last:08d}'}"
    assert line_with(command, "report.html").split(maxsplit=1) == ["report", str(out / "report.html")]
    assert read_evaluations(out / "evaluations.jsonl")[-1].step == last
    AutoModelForCausalLM.from_pretrained(out / "export")
    resume = shlex.split(line_with(command, "resume with: ").removeprefix("resume with: "))
    assert resume[0] == "weft"
    done = weft(*resume[1:], "--accept-changes", "--set", f"train.steps={last + 2}")
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {last}, from {out / f'step-{last:08d}'}" in done.stdout
    assert "resume with" not in done.stdout
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, last + 3))
    assert "lr = 0.005" in (out / "job.toml").read_text()


@pytest.mark.effect("checkpoint.signals", "signal after which a run saves and ends")
@pytest.mark.parametrize(
    ("number", "settings"),
    [(signal.SIGUSR1, ()), (signal.SIGUSR2, ("--set", 'checkpoint.signals=["USR2"]'))],
    ids=["USR1", "USR2"],
)
def test_a_signal_of_a_scheduler_saves_and_ends_the_run(
    number: signal.Signals, settings: tuple[str, ...], tmp_path: Path
) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=LONG, checkpoint=NO_INTERVAL), tmp_path / "run"
    with weft_train(job, LAYOUT, out, *settings) as command:
        command.rank_at(1, 4)
        assert f"send {number.name} again to stop now" in press(command, number)
        assert command.wait() == 128 + number, command.printed()
    last = read_metrics(out / "metrics.jsonl")[-1].step
    assert [step_of(path) for path in list_checkpoints(out)] == [last]
    assert line_with(command, "resume with: ")


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """Rank 1 is suspended, so that no step can finish."""
    job, out = job_file(tmp_path, LAYOUT, train=LONG, checkpoint=NO_INTERVAL), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as command:
        os.kill(command.rank_at(1, 4).pid, signal.SIGSTOP)
        ranks = [rank.pid for rank in ranks_of(command.process.pid).values()]
        assert "press again to stop now" in press(command)
        time.sleep(0.5)
        assert command.process.poll() is None
        assert press(command) == "weft: stopping now"
        assert command.wait() == 128 + signal.SIGINT, command.printed()
    assert not set(ranks) & {pid for pid, _, _ in processes()}
    assert not any(word in line.text for line in command.lines for word in ("error", "Traceback"))
    assert (
        line_with(command, "checkpoint was saved")
        == "no checkpoint was saved: the same command starts the run again from the first step"
    )
    assert (out / "report.html").exists()


def test_ctrl_c_while_the_ranks_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # of every process of the command
    job, out = job_file(tmp_path, LAYOUT, train=LONG), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as command:
        command.until(lambda: [name for pid, parent, name in processes() if parent == command.process.pid], "a start")
        assert _processes_in(tmp_path)
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT, command.printed()
    assert command.errors() == ["weft: stopped by SIGINT"]
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:  # a process started at the last moment would appear now
        assert not _processes_in(tmp_path)
        time.sleep(0.1)


def _processes_in(folder: Path) -> list[int]:
    """Processes with a working directory, except this one."""
    found = []
    for pid, _, _ in processes():
        with suppress(OSError):  # the process has exited or belongs to another user
            if os.readlink(f"/proc/{pid}/cwd") == str(folder) and pid != os.getpid():
                found.append(pid)
    return found
