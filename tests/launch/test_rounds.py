"""Rounds of ranks: a launcher that starts ranks again continues their run, whatever it counts; a second command does not."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from tests.faults.kill import START_SECONDS, job_file, processes
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from weft.job import Job
from weft.launch.environment import explain_allocation
from weft.launch.rounds import LaunchRound, join_rounds, resume_sources, round_of, write_round
from weft.training.metrics import read_metrics

AGENT = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "7"}


def agent(folder: str, attempt: int = 0) -> dict[str, str]:
    """Variables of a rank of torchrun whose agent has this folder of logs."""
    error = f"{folder}/attempt_{attempt}/0/error.json"
    return {**AGENT, "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_ERROR_FILE": error}


@pytest.mark.parametrize(
    ("before", "now", "resumes"),
    [
        ([agent("/a")], [agent("/a")], True),  # a host has joined or left: the count stays 0
        ([agent("/a")], [agent("/b"), agent("/a")], True),  # the newcomer has rank 0
        ([agent("/a"), agent("/b")], [agent("/b")], True),
        ([agent("/a")], [agent("/a", 1)], True),
        ([agent("/a")], [agent("/b")], False),  # a second command with the same id
        ([agent("/a")], [agent("/b", 1)], False),  # whose first attempt ended before it prepared the folder
        ([AGENT], [{**AGENT, "TORCHELASTIC_RESTART_COUNT": "1"}], True),  # an agent without logs
        ([SLURM], [{**SLURM, "SLURM_RESTART_COUNT": "2"}], True),
        ([SLURM], [SLURM], False),  # a second srun of the same script
        ([SLURM], [{"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "2"}], False),
        (
            [{**SLURM, **agent("/a")}],
            [{**SLURM, "SLURM_RESTART_COUNT": "1", **agent("/b")}],
            True,
        ),  # torchrun, requeued
        ([{}], [{}], False),
    ],
)
def test_a_new_round_of_the_same_job_resumes(
    before: list[dict[str, str]], now: list[dict[str, str]], resumes: bool, tmp_path: Path
) -> None:
    write_round(tmp_path, join_rounds(map(round_of, before)))
    found = join_rounds(map(round_of, now))
    assert resume_sources(found, tmp_path, None) == ["auto"] * resumes
    assert resume_sources(found, tmp_path, "step-00000004") == ["auto"] * resumes + ["step-00000004"]
    assert resume_sources(found, tmp_path, "auto") == ["auto"]


def test_a_round_does_not_resume_where_no_round_has_prepared_the_run(tmp_path: Path) -> None:
    own = LaunchRound(("a",), ("a",))
    assert resume_sources(own, tmp_path, None) == []
    write_round(tmp_path, LaunchRound(("an earlier run",)))
    assert resume_sources(own, tmp_path, None) == []


@pytest.mark.must("fault: A host joins or leaves under another launcher, or Slurm queues the job again")
def test_a_queued_again_job_of_slurm_resumes_under_the_launcher_of_weft(tmp_path: Path) -> None:
    """`weft train` in a batch script, without srun and without --resume."""
    job = Job.load(write_job(tmp_path, train={"steps": 4, "global_batch_size": 4}, checkpoint={"every": 2}))
    with mock.patch.dict(os.environ, SLURM):
        first = observe(job, 2)
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_RESTART_COUNT": "1"}):
        again = observe(job, 2)
    assert any("the run has ended, after step 4" in text for text in again.printed)
    assert again.losses == first.losses
    with mock.patch.dict(os.environ, {**SLURM, "SLURM_RESTART_COUNT": "1"}):
        observe(job, 2)  # a second command of the restarted script
    assert (tmp_path / "run.1").is_dir()


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]"}, "this job 2 nodes (n[0-1])"),
        ({"SLURM_NNODES": "2", "SLURM_STEP_ID": "4294967290"}, "this job 2 nodes"),  # the shell of salloc
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0"}, ""),  # srun --nodes=1, on purpose
        ({"SLURM_JOB_NUM_NODES": "1"}, ""),
        ({}, ""),
    ],
)
def test_idle_nodes_of_an_allocation_are_named(environment: dict[str, str], line: str) -> None:
    found = explain_allocation(environment)
    assert line in found
    assert bool(found) == bool(line)


JOIN = """
import pathlib, sys, time
from torch.distributed.run import main
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
main(sys.argv[2:])
"""


PACE = """
import os
import time
from pathlib import Path
import torch.distributed as dist

class Pace:
    def on_step(self, metrics):
        if dist.get_rank() == 0:
            with open(Path(os.environ["PYTHONPATH"], "sizes"), "a") as file:
                file.write(f"{dist.get_world_size()} ")
        if dist.get_world_size() != 3:
            time.sleep(0.3)

def pace(job):
    return Pace()
"""
HOSTS, STEPS = 4, 80


def kill_host(agent: int) -> None:
    """Kill an agent and its rank at once, as the loss of their host does."""
    for pid in [agent, *(pid for pid, parent, _ in processes() if parent == agent)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.exclusive
@pytest.mark.timeout(600)
@pytest.mark.slow("four agents of the real torchrun")
def test_a_run_continues_when_hosts_join_and_leave_torchrun(tmp_path: Path) -> None:
    """From two hosts to four, of which one is killed: the losses are those of a run without the changes.

    Ranks wait in each step as long as there is another change to come.
    """
    (tmp_path / "own_pace.py").write_text(PACE)
    steps = {"steps": STEPS, "global_batch_size": 12, "micro_batch_size": 1, "callbacks": ["own_pace:pace"]}
    job, out = job_file(tmp_path, "zero3 on 2", train=steps, checkpoint={"every": 3}), tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    options = ["--nnodes", "2:4", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "join"]
    options += ["--max-restarts", "3", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    job_options = ["-m", "weft", "train", str(job), "--out", str(out), "--interface", "lo"]
    # With a shared store, the agents of torch 2.13 leave the address of the next round out, and a newcomer waits for it.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(tmp_path)}
    begin, agents = [tmp_path / f"begin-{index}" for index in range(HOSTS)], []

    def printed() -> str:
        return "".join((tmp_path / f"agent-{index}").read_text() for index in range(HOSTS))

    def wait_for(ranks: int) -> None:
        """Wait until a rank has made steps, and a checkpoint, among this number of ranks."""
        deadline = time.monotonic() + START_SECONDS
        while (tmp_path / "sizes").read_text().split().count(str(ranks)) < 6:
            assert time.monotonic() < deadline, printed()
            time.sleep(0.05)

    try:
        (tmp_path / "sizes").touch()
        for index in range(HOSTS):
            own = f"is_host={'false' if index else 'true'},timeout=60,last_call_timeout=3"
            command = [sys.executable, "-c", JOIN, str(begin[index]), *options, "--rdzv-conf", own, *job_options]
            with (tmp_path / f"agent-{index}").open("w") as file:
                agent = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            agents.append(agent)
        for index in (0, 1):
            begin[index].touch()
        wait_for(2)
        for index in (2, 3):
            begin[index].touch()
        wait_for(4)
        kill_host(agents[3].pid)
        for process in agents[:3]:
            process.wait(2 * START_SECONDS)
        assert [process.returncode for process in agents[:3]] == [0, 0, 0], printed()
    finally:
        for process in agents:
            if process.poll() is None:
                kill_host(process.pid)
    assert "resuming after step" in printed()
    assert not (tmp_path / "run.1").exists()
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert list(dict.fromkeys((tmp_path / "sizes").read_text().split())) in (["2", "4", "3"], ["2", "3", "4"])
    undisturbed = observe(Job.load(job, [f'out="{tmp_path / "whole"}"', "train.callbacks=[]"]), 1)
    assert [row.loss for row in rows] == pytest.approx(undisturbed.losses, rel=1e-4)
