"""Ranks and launchers of real runs that are killed, stopped and broken: the cause is named first, and results are bit-equal."""

import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.kill import (
    FOUR_RANKS,
    Command,
    differences,
    forkserver_of,
    job_file,
    leftovers_of,
    ranks_of,
    run_alone,
    steps_of,
    trials,
    weft_train,
)
from tests.lab.commands import start_function
from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.launch.forkserver import ForkServer
from weft.launch.launcher import launch
from weft.launch.watchdog import Timeouts, process_state
from weft.training.run_folder import LAUNCHER_LOCK

LAYOUT = "zero3 on 2"
HANG_TIMEOUT = 8.0  # seconds


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of an undisturbed run on two ranks."""
    return run_alone(tmp_path_factory.mktemp("reference"), LAYOUT)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The same job, in a new folder."""
    return job_file(tmp_path, LAYOUT)


NOT_COMPARED = ("logs", "report.html", LAUNCHER_LOCK)


def contents(folder: Path) -> dict[str, bytes]:
    """Contents of a run folder without logs, report and lock, which contain times."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    own = [path.relative_to(folder) for path in files]
    return {str(name): (folder / name).read_bytes() for name in own if name.parts[0] not in NOT_COMPARED}


# Death


@pytest.mark.must("fault: A rank is killed, crashes or raises")
def test_a_run_continues_after_a_rank_is_killed(reference: Path, tmp_path: Path) -> None:
    for result in trials(tmp_path, LAYOUT, reference, random.Random(3)):
        assert not result.problems, result


@pytest.mark.must("fault: The launcher is killed")
@pytest.mark.must("format: checkpoint in the memory of hosts")
def test_a_run_is_resumed_after_its_launcher_was_killed(reference: Path, tmp_path: Path) -> None:
    """Ranks and fork server end with it; the next command removes what is left, and continues from the copy in memory."""
    job, out = job_file(tmp_path, LAYOUT, checkpoint={"memory_every": 1}), tmp_path / "run"
    with weft_train(job, LAYOUT, out) as command:
        pids = [command.rank_at(rank, 3).pid for rank in range(2)]
        pids.append(forkserver_of(command.process.pid))
        scratch_folders = [rank.heartbeat.parent for rank in ranks_of(command.process.pid).values()]
        command.process.kill()
        command.process.wait()
        deadline = time.monotonic() + 2
        while living := [pid for pid in pids if process_state(pid) not in ("", "Z")]:
            assert time.monotonic() < deadline, living
            time.sleep(0.01)
    assert scratch_folders[0].exists()
    with weft_train(job, LAYOUT, out, "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert not scratch_folders[0].exists()
    assert differences(reference, out) == []
    assert not list(out.glob(".step-*"))
    assert leftovers_of(out) == []


def test_a_run_survives_a_kill_of_its_fork_server(reference: Path, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with weft_train(job, LAYOUT, out, "--max-restarts", "3") as command:
        first = command.rank_at(1, 4)
        os.kill(forkserver_of(command.process.pid), signal.SIGKILL)
        os.kill(first.pid, signal.SIGKILL)
        assert command.wait() == 0, command.printed()
    assert any("restart 1 of 3" in line for line in command.errors())
    assert differences(reference, out) == []
    assert leftovers_of(out) == []


@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_a_run_continues_after_a_rank_is_killed_in_every_layout(layout: str, tmp_path: Path) -> None:
    reference = run_alone(tmp_path / "reference", layout, train={"steps": steps_of(kills=2)})
    for result in trials(tmp_path, layout, reference, random.Random(3), kills=2):
        assert not result.problems, result


def test_a_run_without_restarts_can_be_resumed(reference: Path, job: Path, tmp_path: Path) -> None:
    """It exits as documented in docs/errors.md, can be resumed, and does not change once it has ended."""
    with weft_train(job, LAYOUT, tmp_path / "run", "--max-restarts", "0") as command:
        victim = command.rank_at(1, 7)
        os.kill(victim.pid, signal.SIGKILL)
        assert command.wait() == 1, command.printed()
        errors = command.errors()
    assert errors[0].startswith(f"weft: rank 1 on {os.uname().nodename} was killed by SIGKILL; ")
    assert errors[1:3] == ["error: RankFailure", "rank 1 was killed by SIGKILL"]
    assert f"  where: rank 1 on {os.uname().nodename}, which wrote nothing to stderr" in errors
    assert not list((tmp_path / "run" / "logs").glob("rank-1.*"))
    assert not any("Traceback" in line for line in errors)
    assert step_of(list_checkpoints(tmp_path / "run")[0]) in (
        4,
        6,
    )  # the checkpoint of step 6 may not have been complete
    with weft_train(job, LAYOUT, tmp_path / "run", "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert differences(reference, tmp_path / "run") == []
    ended = contents(tmp_path / "run")
    with weft_train(job, LAYOUT, tmp_path / "run", "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert "the run has ended, after step 8 of 8" in command.printed()
    assert contents(tmp_path / "run") == ended


# Hangs


def test_a_pause_of_one_second_is_not_reported(reference: Path, job: Path, tmp_path: Path) -> None:
    with weft_train(job, LAYOUT, tmp_path / "run", "--max-restarts", "3") as command:
        victim = command.rank_at(1, 4)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(1)
        state, step = process_state(victim.pid), victim.status().step
        os.kill(victim.pid, signal.SIGCONT)
        assert command.wait() == 0, command.printed()
    assert (state, step in range(4, 8)) == ("T", True)  # before the last step
    assert command.errors() == []
    assert differences(reference, tmp_path / "run") == []


@pytest.mark.effect("guard.hang_timeout_seconds", "time after which a run with a stopped rank restarts")
def test_a_hung_rank_is_named_and_the_run_restarts(reference: Path, job: Path, tmp_path: Path) -> None:
    options = ("--max-restarts", "1", "--set", f"guard.hang_timeout_seconds={HANG_TIMEOUT}")
    with weft_train(job, LAYOUT, tmp_path / "run", *options) as command:
        victim = command.rank_at(1, 4)
        stopped = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        assert command.wait() == 0, command.printed()
    first, *rest = [line for line in command.lines if line.error]
    assert first.text.startswith(f"weft: rank 1 on {os.uname().nodename} "), command.printed()
    assert "stopped by a signal" in first.text
    assert Timeouts.stopped < first.seconds - stopped < Timeouts.stopped + 2
    ended = next(line for line in rest if "attempt 1 starts 2 ranks" in line.text)
    assert "rank 1 made no progress for" in ended.text
    assert HANG_TIMEOUT < ended.seconds - stopped < HANG_TIMEOUT + 15
    assert differences(reference, tmp_path / "run") == []


# Errors

BROKEN_RANK = """
import os
from torch.nn.modules.module import register_module_forward_pre_hook
from weft.training.rank import main as train

forwards = 0

def break_step_3(module, arguments):  # a step has two micro-batches
    global forwards
    forwards += module.training and type(module).__name__.endswith("ForCausalLM")  # not the experiments at start
    if forwards == 5 and os.environ["RANK"] == "1" and os.environ["WEFT_ATTEMPT"] == "0":
        raise ValueError("an odd token")

def main():
    register_module_forward_pre_hook(break_step_3)
    train()
"""


def launch_broken_ranks(out: Path) -> None:
    """Launch two ranks of BROKEN_RANK, with one restart."""
    sys.path.insert(0, str(out.parent))
    with ForkServer("broken_rank", os.environ, fork=True) as forkserver:
        command = [sys.executable, "-m", "broken_rank", str(out), "auto"]
        launch(command, ranks=2, log_dir=out / "logs", max_restarts=1, forkserver=forkserver)


def test_an_exception_of_one_rank_is_the_first_error(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "broken_rank.py").write_text(BROKEN_RANK)
    out.mkdir()
    for name in ("job.toml", "prepared.json"):
        shutil.copy(reference / name, out)
    with Command(start_function(["launcher"], partial(launch_broken_ranks, out))) as command:
        assert command.wait() == 0, command.printed()
    first = command.errors()[0]
    assert first.startswith(
        f"weft: rank 1 on {os.uname().nodename} exited with code 1 (ValueError: an odd token); step 3"
    )
    log = tmp_path / "run/logs/rank-1.traceback"
    assert first.endswith(f"; log {log}")
    assert "in break_step_3" in log.read_text()
    assert differences(reference, tmp_path / "run") == []


# Refusals


def test_resume_auto_in_an_empty_folder_starts_a_new_run(reference: Path, job: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with weft_train(job, LAYOUT, tmp_path / "run", "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert differences(reference, tmp_path / "run") == []


@pytest.fixture
def ended(reference: Path, tmp_path: Path) -> Path:
    """Copy of the undisturbed run."""
    return Path(shutil.copytree(reference, tmp_path / "ended"))


def test_resume_with_other_batches_is_refused_and_changes_nothing(ended: Path, job: Path) -> None:
    before = contents(ended)
    settings = ("--set", "train.global_batch_size=8", "--set", "train.steps=20")
    with weft_train(job, LAYOUT, ended, "--resume", "auto", *settings) as command:
        assert command.wait() == 2, command.printed()
    errors = command.errors()
    assert errors[:2] == ["error: JobError", "train.global_batch_size = 8; the checkpoint was made with 4"]
    assert len(errors) == 5  # class, what, where, rule, fix
    assert contents(ended) == before


def test_a_damaged_checkpoint_is_refused_with_its_file(reference: Path, ended: Path) -> None:
    folder = folder_of(ended, 6)
    shard = folder / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    before = contents(ended)
    with weft_train(reference.parent / "job.toml", LAYOUT, ended, "--resume", str(folder)) as command:
        assert command.wait() == 2, command.printed()
    errors = command.errors()
    assert "shard-00001.safetensors" in errors[1]
    assert any(line.strip().startswith(f"where: {folder}") for line in errors)
    assert {name: data for name, data in contents(ended).items() if name.startswith("step-")} == {
        name: data for name, data in before.items() if name.startswith("step-")
    }
