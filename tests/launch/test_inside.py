"""`weft train` inside ranks of torchrun, mpirun and srun: the bits of Weft's launcher, and the same names of culprits.

torchrun and mpirun are real; srun is a script that sets its variables, and tests/launch/test_slurm.py has a real one.
"""

import glob
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from tests.faults.kill import START_SECONDS, Command, Rank, differences, job_file, processes, run_alone
from tests.lab.hosts import Host, hosts
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.launch.scratch import LOCK, PREFIX, SHARED_MEMORY
from weft.lock import take_lock
from weft.training.metrics import read_evaluations, read_metrics

LAYOUT = "zero3 on 2"
LONG = {"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1}
SHORT = {"steps": 8}
TRAIN = [sys.executable, "-m", "weft", "train"]
END_SECONDS = 30.0  # from the death of a rank to the end of the command, on a busy machine
SRUN = """
import os, signal, subprocess, sys, time
step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
own = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
tasks = [subprocess.Popen(sys.argv[1:], env={**os.environ, **step, **each}) for each in own]
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, _: [task.send_signal(number) for task in tasks])
ended = False
while None in (codes := [task.poll() for task in tasks]):
    if any(codes) and not ended:  # --kill-on-bad-exit
        ended = [task.terminate() for task in tasks if task.poll() is None]
    time.sleep(0.1)
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
MARK = "WEFT_MARK_OF_A_TEST"  # variable of all processes of a test
LAUNCHERS = ("torchrun", "mpirun", "srun")


def launcher_command(launcher: str, *options: str) -> list[str]:
    """Command of a launcher that starts two ranks of the command that follows."""
    if launcher == "srun":
        return [sys.executable, "-c", SRUN, sys.executable, "-m", "weft"]
    if launcher == "mpirun":
        if not shutil.which("mpirun"):
            pytest.skip("mpirun of Open MPI is not installed")
        return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *options, sys.executable, "-m", "weft"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    numbers = ["--nproc-per-node", "2", "--master-port", port]
    return [sys.executable, "-m", "torch.distributed.run", *numbers, *options, "-m", "weft"]


def start(launcher: str, job: Path, out: Path, *options: str, of_launcher: tuple[str, ...] = ()) -> Command:
    return Command([*launcher_command(launcher, *of_launcher), "train", str(job), "--out", str(out), *options])


def find_rank(out: Path, rank: int, step: int) -> Rank | None:
    """A rank of the run in a folder; None if it has not reached a step."""
    for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}node-*/{rank}"):
        each = Rank(Rank(0, Path(path)).status().pid, Path(path))
        if (each.status().step or 0) >= step and str(out) in read(each.pid, "cmdline"):
            return each
    return None


def rank_at(command: Command, out: Path, rank: int, step: int) -> Rank:
    """Wait until a rank of the run in a folder has reached a step; return it."""
    result: Rank = command.until(lambda: find_rank(out, rank, step), f"rank {rank} reached step {step}")
    return result


def read(pid: int, name: str) -> str:
    """Arguments or environment of a process, which end with zero bytes; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


@contextmanager
def leaves_nothing(out: Path) -> Iterator[None]:
    """Check that no process of a run and no folder of its ranks remains; after a failure, kill what remains."""

    def left() -> list[int]:
        return [pid for pid, _, _ in processes() if f"{MARK}={out}" in read(pid, "environ").split("\0")]

    try:
        with mock.patch.dict(os.environ, {MARK: str(out)}):
            yield
        deadline = time.monotonic() + 10
        while left():
            assert time.monotonic() < deadline, [read(pid, "cmdline") for pid in left()]
            time.sleep(0.1)
    finally:
        for pid in left():
            os.kill(pid, signal.SIGKILL)
    for folder in map(Path, glob.glob(f"{SHARED_MEMORY}/{PREFIX}node-*")):  # folders of other tests are locked
        assert not (folder / LOCK).exists() or take_lock(folder / LOCK) is None, folder


def messages(command: Command) -> list[str]:
    """Lines of Weft about failures; mpirun marks lines, and colours are removed."""
    texts = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", line.text) for line in command.lines]
    return [text for text in texts if text.startswith(("weft: ", "error: "))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of Weft's own launcher."""
    return run_alone(tmp_path_factory.mktemp("reference"), LAYOUT, train=SHORT, checkpoint={"every": 4})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_another_launcher_train_bit_equal(launcher: str, reference: Path, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=SHORT, checkpoint={"every": 4}), tmp_path / "run"
    with leaves_nothing(tmp_path), start(launcher, job, out) as command:
        assert command.wait() == 0, command.printed()
    assert differences(reference, out) == []
    assert messages(command) == []
    assert sum("held-out loss" in line.text for line in command.lines) == 1
    for name in ("run.json", "report.html", "evaluations.jsonl", "export/model.safetensors"):
        assert (out / name).exists()
    assert read_evaluations(out / "evaluations.jsonl") == read_evaluations(reference / "evaluations.jsonl")


def test_checkpoints_pass_between_launchers(reference: Path, tmp_path: Path) -> None:
    """torchrun continues from a checkpoint of Weft's launcher, and Weft's launcher from one of torchrun."""
    job, first, second = (
        job_file(tmp_path, LAYOUT, train=SHORT, checkpoint={"every": 2}),
        tmp_path / "first",
        tmp_path / "second",
    )
    with start("torchrun", job, first, "--resume", str(reference / "step-00000004")) as command:
        assert command.wait() == 0, command.printed()
    arguments = [*TRAIN, str(job), "--nproc-per-node", "2", "--out", str(second)]
    with Command([*arguments, "--resume", str(first / "step-00000006")]) as command:
        assert command.wait() == 0, command.printed()
    whole = [(row.step, row.loss, row.grad_norm) for row in read_metrics(reference / "metrics.jsonl")]
    for folder, done in ((first, 4), (second, 6)):
        assert [(row.step, row.loss, row.grad_norm) for row in read_metrics(folder / "metrics.jsonl")] == whole[done:]
        assert (folder / "export/model.safetensors").read_bytes() == (
            reference / "export/model.safetensors"
        ).read_bytes()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_bad_job_is_refused_once(launcher: str, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT), tmp_path / "run"
    with leaves_nothing(tmp_path), start(launcher, job, out, "--set", "plan.parallel.tp=3") as command:
        code = command.wait()
    assert code == (1 if launcher == "torchrun" else 2), command.printed()
    assert len([text for text in messages(command) if text.startswith("error: ")]) == 1, command.printed()
    assert sum(line.text.startswith("  rule: ") for line in command.lines) == 1
    assert not out.exists()


@pytest.mark.parametrize("options", [("--max-restarts", "2"), ("--nproc-per-node", "3"), ("--rdzv-endpoint", "a:1")])
def test_options_of_the_launcher_are_refused(options: tuple[str, str], tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT), tmp_path / "run"
    with leaves_nothing(tmp_path), start("srun", job, out, *options) as command:
        assert command.wait() == 2, command.printed()
    assert sum(f"{' '.join(options)} in a rank that srun has started" in line.text for line in command.lines) == 1


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_named(launcher: str, victim: int, tmp_path: Path) -> None:
    """Also local rank 0, which has started the watchdog."""
    job, out = job_file(tmp_path, LAYOUT, train=LONG), tmp_path / "run"
    with leaves_nothing(tmp_path), start(launcher, job, out) as command:
        rank = rank_at(command, out, victim, 4)
        killed = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        assert command.wait() != 0
        assert time.monotonic() - killed < END_SECONDS
    first, *others = messages(command)
    assert re.match(rf"weft: rank {victim} on \S+ was killed by SIGKILL; (\w+ at )?step \d+", first), command.printed()
    assert others == ["error: RankFailure"]


def test_a_restart_by_torchrun_resumes_bit_equal(reference: Path, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=SHORT, checkpoint={"every": 4}), tmp_path / "run"
    with leaves_nothing(tmp_path), start("torchrun", job, out, of_launcher=("--max-restarts", "1")) as command:
        command.until(lambda: list_checkpoints(out), "a checkpoint")
        rank = rank_at(command, out, 1, 5)
        os.kill(rank.pid, signal.SIGKILL)
        assert command.wait() == 0, command.printed()
    assert differences(reference, out) == []
    assert any("resuming after step" in line.text for line in command.lines), command.printed()
    assert re.match(r"weft: rank 1 on \S+ was killed by SIGKILL", messages(command)[0])


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_stopped_rank_is_named_and_continues(launcher: str, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=LONG), tmp_path / "run"
    with leaves_nothing(tmp_path), start(launcher, job, out) as command:
        rank = rank_at(command, out, 1, 4)
        os.kill(rank.pid, signal.SIGSTOP)
        command.until(lambda: messages(command), "the stopped rank is named")
        os.kill(rank.pid, signal.SIGCONT)
        command.until(lambda: len(messages(command)) == 2, "it continues")
        os.kill(rank.pid, signal.SIGKILL)
        command.wait()
    assert re.match(
        r"weft: rank 1 on \S+ has been stalled in step \d+ for \d+ s: stopped by a signal", messages(command)[0]
    )
    assert re.match(r"weft: rank 1 continues after \d+ s", messages(command)[1])


@pytest.mark.parametrize(
    ("launcher", "number"), [("srun", signal.SIGTERM), ("srun", signal.SIGUSR1), ("torchrun", signal.SIGTERM)]
)
def test_a_signal_ends_the_run_in_order(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    job, out = job_file(tmp_path, LAYOUT, train=LONG, checkpoint={"every": 0}), tmp_path / "run"
    with leaves_nothing(tmp_path), start(launcher, job, out) as command:
        rank_at(command, out, 1, 4)
        command.process.send_signal(number)
        code = command.wait()
    assert code == (128 + number if launcher == "srun" else 1), command.printed()
    assert messages(command) == []
    last = read_metrics(out / "metrics.jsonl")[-1].step
    assert [step_of(path) for path in list_checkpoints(out)] == [last]
    assert any("resume with: weft train" in line.text for line in command.lines), command.printed()
    assert (out / "report.html").exists()
    with start(
        launcher, job, out, "--resume", "auto", "--accept-changes", "--set", f"train.steps={last + 2}"
    ) as command:
        assert command.wait() == 0, command.printed()
    assert [row.step for row in read_metrics(out / "metrics.jsonl")] == list(range(1, last + 3))


def test_a_script_on_ranks_of_another_launcher(tmp_path: Path) -> None:
    """`weft run`: the error of the rank that fails is printed once."""
    (tmp_path / "plan.toml").write_text("[parallel]\nzero = 3\n")
    (tmp_path / "script.py").write_text(
        "import sys, time, torch, torch.distributed as dist\n"
        "ones = torch.ones(1)\n"
        "dist.all_reduce(ones)\n"
        "print(f'rank {dist.get_rank()} of {ones.item():g}\\n', end='', flush=True)\n"  # in one piece
        "if len(sys.argv) > 1 and dist.get_rank(): raise ValueError(sys.argv[1])\n"
        "dist.barrier()\n"
    )
    logs = tmp_path / "logs"
    command = [*launcher_command("srun"), "run", "--plan", str(tmp_path / "plan.toml"), "--log-dir", str(logs)]
    for arguments in ((), ("boom",)):
        with leaves_nothing(tmp_path), Command([*command, str(tmp_path / "script.py"), *arguments]) as running:
            assert bool(running.wait()) == bool(arguments), running.printed()
        assert {"rank 0 of 2", "rank 1 of 2"} <= {line.text for line in running.lines}
    named = r"weft: rank 1 on \S+ exited with code 1 \(ValueError: boom\)"
    assert re.match(named, messages(running)[0]), running.printed()
    assert sum(line.text == "  | ValueError: boom" for line in running.lines) == 1


def torchrun_on(host: Host, index: int, address: str, job: Path, out: Path, log: Path) -> "subprocess.Popen[bytes]":
    """torchrun with one rank on an emulated host; its output goes to a file."""
    numbers = ["--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", "1"]
    where = ["--master-addr", address, "--master-port", "29500"]
    command = [sys.executable, "-m", "torch.distributed.run", *numbers, *where, "-m", "weft", "train", str(job)]
    with log.open("w") as file:
        return host.start([*command, "--out", str(out), "--interface", "eth0"], stdout=file, stderr=subprocess.STDOUT)


def test_two_hosts_of_torchrun_and_the_host_of_the_killed_rank_names_it(reference: Path, tmp_path: Path) -> None:
    """The other host says that it lost a peer, and names none of its ranks."""
    with hosts(2) as (first, second):
        for out, fault in ((tmp_path / "whole", False), (tmp_path / "killed", True)):
            job = job_file(tmp_path, LAYOUT, train=LONG if fault else SHORT, checkpoint={"every": 4})
            logs = [tmp_path / f"{out.name}-{index}" for index in range(2)]
            nodes = [torchrun_on(host, i, first.address, job, out, logs[i]) for i, host in enumerate((first, second))]
            if fault:
                deadline = time.monotonic() + START_SECONDS
                while (rank := find_rank(out, 1, 4)) is None:
                    assert time.monotonic() < deadline, [log.read_text() for log in logs]
                    time.sleep(0.05)
                os.kill(rank.pid, signal.SIGKILL)
            codes = [node.wait(START_SECONDS) for node in nodes]
            printed = [log.read_text() for log in logs]
            assert all(codes) if fault else codes == [0, 0], printed
    assert differences(reference, tmp_path / "whole") == []
    assert re.search(r"weft: rank 1 on \S+ was killed by SIGKILL; (\w+ at )?step \d+", printed[1]), printed[1]
    assert "weft: rank" not in printed[0]
    assert re.search(r"no rank on \S+ failed first: the ranks lost a rank on another host", printed[0]), printed[0]
