"""weft launch slurm: its script, and jobs on a real Slurm cluster of two emulated hosts.

A job that is stopped, drained, killed or at its time limit is queued again; its losses are bit-equal to those of a run without
interruption.
"""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import refuse
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from tests.lab.slurm import Cluster, slurm
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.cli import main
from weft.errors import JobError
from weft.job import Job
from weft.launch.schedulers.slurm import SlurmJob, parse_array, parse_nodes, parse_sbatch, parse_time, sbatch_script
from weft.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("slurm_script.sh")
PYTHON = [sys.executable, "-m", "weft"]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
SAVING = {"every": 10}
SHORT = {"hang_timeout_seconds": 20.0}  # a time limit of three minutes is long enough
LIMIT = ("--time", "30:00")


def request(**changes: Any) -> SlurmJob:
    arguments = {
        "job": Path("/shared/job.toml"),
        "out": Path("/shared/my runs/first"),
        "nodes": range(4, 5),
        "time": "2:00:00",
    }
    return SlurmJob(**{**arguments, "hang_timeout_seconds": 600.0, **changes})


def check_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.must("format: script of Slurm, slurm.sh")
def test_script_is_the_golden_file() -> None:
    script = sbatch_script(
        request(
            partition="gpu",
            nproc_per_node=8,
            settings=("optimizer.name=it's",),
            sbatch={"gpus-per-node": "8", "comment": "two words", "exclusive": ""},
        ),
        "/env/bin/python",
        Path("/shared/work"),
    )
    check_bash(script)
    assert script == GOLDEN.read_text()


def test_array_has_a_run_folder_for_each_job() -> None:
    script = sbatch_script(request(sweep=parse_array("train.seed=1,2,3")), "/env/bin/python", Path("/shared/work"))
    check_bash(script)
    assert "#SBATCH --array=0-2\n" in script
    assert "settings=(train.seed=1 train.seed=2 train.seed=3)\n" in script
    assert "run='/shared/my runs/first'/\"$SLURM_ARRAY_TASK_ID\"\n" in script
    assert '--set "$setting"' in script
    check_bash(sbatch_script(request(nodes=range(1, 2)), "/env/bin/python", Path("/shared/work")))
    assert '"$SLURM_JOB_ID"' not in script  # of the last job of an array it is the id of the array


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:01", 7201), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_time_limits_are_those_of_slurm(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "2h", "1:2:3:4", "-5", "UNLIMITED", "1.5", "1-1:1:1:1"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a time limit"):
        parse_time(text)


def test_values_of_an_array_may_have_commas() -> None:
    found = parse_array("optimizer.betas=[0.9, 0.95],[0.8,0.99]")
    assert found == ["optimizer.betas=[0.9, 0.95]", "optimizer.betas=[0.8,0.99]"]
    assert parse_array('data.path="a,b",c') == ['data.path="a,b"', "data.path=c"]


@pytest.mark.parametrize(
    "text", ["train.seed", "train.seed=1", "=1,2", "train.seed=1,,2", "train.seed=1,[2", "out=a,b"]
)
def test_arrays_without_two_values_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="cannot read --array"):
        parse_array(text)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("--mem=4G", "is malformed"),
        ("mem=", "is malformed"),
        ("N=2", "is malformed"),
        ("comment=a\n#SBATCH --uid=0", "is malformed"),
        ("nodes=3", "sets nodes, which the script sets itself"),
        ("signal=TERM@5", "sets signal, which the script sets itself"),
    ],
)
def test_options_of_sbatch_are_checked(entry: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        parse_sbatch([entry])
    with pytest.raises(JobError, match="sets mem twice"):
        parse_sbatch(["mem=4G", "mem=8G"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--time", "11:00"], "the time limit 11:00 (660 s) leaves no time to train"),
        (["--time", "two hours"], "'two hours' is not a time limit"),
        (["--out", "runs/mine"], "the run folder 'runs/mine' is relative"),
        (["--sbatch", "requeue"], "--sbatch 'requeue' sets requeue, which the script sets itself"),
        (["--array", "train.seed=1,x"], "train.seed"),
        (
            ["--array", "train.seed=1,2", "--set", "checkpoint.folder=/shared/c"],
            "checkpoint.folder = '/shared/c' with --array",
        ),
        (["--set", "plan.parallel.tp=3", "--nproc-per-node", "1"], "tp"),
        ([], "the command sbatch is not found"),
    ],
)
def test_bad_input_is_refused(
    options: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = write_job(tmp_path)
    time_limit = () if "--time" in options else ("--time", "2:00:00")
    assert text in refuse(capsys, monkeypatch, "launch", "slurm", str(job), "--nodes", "2", *time_limit, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.must("command: launch slurm")
def test_submission_writes_the_script_and_a_private_new_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\ncat "$2" > ' + str(tmp_path / "seen") + "\necho '77;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job, out, tokens = write_job(tmp_path), tmp_path / "run", []
    arguments = ["weft", "launch", "slurm", str(job), "--nodes", "2", "--time", "2:00:00"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        tokens.append((out / "slurm.token").read_text())
        assert stat.S_IMODE((out / "slurm.token").stat().st_mode) == 0o600
    assert tokens[0] != tokens[1]
    assert tokens[1] not in (out / "slurm.sh").read_text() == (tmp_path / "seen").read_text()
    printed = capsys.readouterr().out
    assert "job 77: 2 nodes, 2:00:00" in printed
    assert f"tail -F {out}/slurm-77.out" in printed
    assert "scancel 77" in printed

    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: p' >&2\nexit 1\n")
    text = refuse(capsys, monkeypatch, *arguments[1:])
    assert "sbatch refused the script: sbatch: error: invalid partition specified: p" in text


def test_dry_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "launch", "slurm", str(job), "--nodes", "2", "--time", "1-0", "--dry"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    check_bash(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()


# On a real cluster

on_a_cluster = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm() as cluster:
        yield cluster


@pytest.mark.parametrize(("text", "numbers"), [("4", [4]), ("2-4", [2, 3, 4]), ("1-1", [1])])
def test_numbers_of_nodes_are_those_of_sbatch(text: str, numbers: list[int]) -> None:
    assert list(parse_nodes(text)) == numbers
    script = sbatch_script(request(nodes=parse_nodes(text)), "/env/bin/python", Path("/shared/work"))
    assert f"\n#SBATCH --nodes={'1' if text == '1-1' else text}\n" in script


@pytest.mark.parametrize("text", ["0", "4-2", "2:4", "two", "2-", "1k"])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(JobError, match=f"'{text}' is not a number of nodes"):
        parse_nodes(text)


class Submitted:
    """Job on the cluster that trains on two nodes."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, **tables: dict[str, Any]):
        self.cluster, self.folder = cluster, folder
        self.job = write_job(folder, **{"guard": SHORT, "checkpoint": SAVING, **tables})
        self.out = folder / "run"
        self.submit(*options or ("--nodes", "2", "--nproc-per-node", "1", *LIMIT))

    def submit(self, *options: str) -> None:
        command = [
            "env",
            *(f"{name}={value}" for name, value in PATHS.items()),
            *PYTHON,
            "launch",
            "slurm",
            str(self.job),
        ]
        printed = self.cluster.run(*command, *options, cwd=self.folder)
        found = re.search(r"job (\d+):", printed)
        assert found, printed
        self.id = found[1]

    def printed(self) -> str:
        path = self.out / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self) -> int:
        rows = read_metrics(self.out / "metrics.jsonl") if (self.out / "metrics.jsonl").exists() else []
        return rows[-1].step if rows else 0

    def wait(self, *states: str) -> None:
        self.cluster.wait_for_state(self.id, *states, seconds=600, output=self.printed)

    def reach(self, step: int, saved: int = 0) -> None:
        """Wait until training has reached a step, and the checkpoint of step `saved` or a later one is complete."""
        self.until(lambda: self.steps() >= step and max(map(step_of, list_checkpoints(self.out)), default=0) >= saved)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < end, self.printed()
            assert self.cluster.state(self.id) not in ("FAILED", "TIMEOUT", "NODE_FAIL"), self.printed()
            time.sleep(0.3)

    def restarts(self) -> int:
        return int(self.cluster.show(self.id, "Restarts"))

    def check_equal_to_one_host(self, *options: str, run: Path | None = None, ranks: int = 2) -> None:
        """Compare its losses with those of `weft train` on one machine, to the bit."""
        losses = {row.step: row.loss for row in read_metrics((run or self.out) / "metrics.jsonl")}
        assert list(losses) == list(range(1, max(losses) + 1))
        out = self.folder / f"reference-{len(list(self.folder.glob('reference-*')))}"
        command = [*PYTHON, "train", str(self.job), "--nproc-per-node", str(ranks), "--out", str(out), *options]
        with subprocess.Popen(
            command, env=os.environ | PATHS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed.decode(errors="replace")
        reference = {row.step: row.loss for row in read_metrics(out / "metrics.jsonl")}
        assert losses == {step: reference[step] for step in losses}


class StartedBySrun(Submitted):
    """Job whose ranks srun starts: `weft train` in one task on each of two nodes, queued again once after a failure."""

    def submit(self, *options: str) -> None:
        script, tasks = self.folder / "job.sh", "srun --ntasks=2 --kill-on-bad-exit"
        train = f"{tasks} {' '.join(PYTHON)} train {self.job}"
        again = '[ -z "$SLURM_RESTART_COUNT" ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60'
        script.write_text(f"#!/bin/bash\n{train} || {{ {again}; exit 1; }}\n")
        environment = ["env", *(f"{name}={value}" for name, value in PATHS.items())]
        numbers = [
            "--nodes=2",
            "--ntasks-per-node=1",
            "--requeue",
            "--open-mode=append",
            f"--output={self.folder}/output",
        ]
        self.id = self.cluster.run(*environment, "sbatch", "--parsable", *numbers, str(script), cwd=self.folder).strip()

    def printed(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill_rank(self, rank: int) -> None:
        found = subprocess.run(
            ["ip", "netns", "pids", self.cluster.nodes[rank].namespace], capture_output=True, text=True
        )
        commands = {int(pid): Path("/proc", pid, "cmdline").read_bytes() for pid in found.stdout.split()}
        (victim,) = [pid for pid, command in commands.items() if b"weft\0train\0" in command]
        os.kill(victim, signal.SIGKILL)


def kill_launcher(cluster: Cluster, node: int) -> None:
    """Kill the launcher of a node and its ranks, as the system does when memory is short."""
    found = subprocess.run(["ip", "netns", "pids", cluster.nodes[node].namespace], capture_output=True, text=True)
    launchers = [pid for pid in found.stdout.split() if b"--node-rank" in Path("/proc", pid, "cmdline").read_bytes()]
    assert launchers
    for pid in launchers:
        os.kill(int(pid), signal.SIGKILL)


SLOW = """
import time

class Slow:
    def on_step(self, metrics):
        time.sleep(0.2)

def slow(job):
    return Slow()
"""


@on_a_cluster
@pytest.mark.slow("Slurm starts four nodes three times")
def test_a_job_grows_and_shrinks_whenever_slurm_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two nodes to four to three: the losses are those of a run without the changes."""
    (tmp_path / "own_slow.py").write_text(SLOW)
    monkeypatch.setitem(PATHS, "PYTHONPATH", os.pathsep.join([PATHS["PYTHONPATH"], str(tmp_path)]))
    with slurm(nodes=4) as cluster:

        def change(state: str, *nodes: int) -> None:
            for node in nodes:
                cluster.run("scontrol", "update", f"NodeName=node{node}", f"State={state}", "Reason=test")

        change("DRAIN", 2, 3)
        train = {"steps": 90, "global_batch_size": 12, "micro_batch_size": 1, "callbacks": ["own_slow:slow"]}
        job = Submitted(cluster, tmp_path, "--nodes", "2-4", "--nproc-per-node", "1", *LIMIT, train=train)
        job.reach(15)
        for restart, (state, node) in enumerate([("RESUME", (2, 3)), ("DRAIN", (3,))], start=1):
            change(state, *node)
            cluster.run("scontrol", "requeue", job.id)
            job.until(lambda restart=restart: job.printed().count("resuming after step") == restart)
            job.reach(15 + 25 * restart)
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
    assert re.findall(r"device +(\d) ranks", job.printed()) == ["2", "4", "3"]
    rows = read_metrics(job.out / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 91))
    undisturbed = observe(Job.load(job.job, [f'out="{tmp_path / "whole"}"', "train.callbacks=[]"]), 1)
    assert [row.loss for row in rows] == pytest.approx(undisturbed.losses, rel=1e-5)


class TestOnACluster:
    """Jobs on a real Slurm cluster."""

    pytestmark = on_a_cluster

    def test_two_nodes_train_as_one_host(self, cluster: Cluster, tmp_path: Path) -> None:
        job = Submitted(cluster, tmp_path, train={"steps": 20, "global_batch_size": 4})
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        assert job.restarts() == 0
        assert "host 1" in job.printed()
        job.check_equal_to_one_host()

    def test_signal_before_the_time_limit_saves_and_the_job_resumes(self, cluster: Cluster, tmp_path: Path) -> None:
        """The job ends when it is finished: it does not queue itself a second time."""
        job = Submitted(cluster, tmp_path, train={"steps": 60, "global_batch_size": 4}, checkpoint={"every": 0})
        job.reach(5)
        cluster.run("scancel", "--batch", "--signal=USR1", job.id)
        job.until(lambda: job.restarts() == 1)
        saved = max(map(step_of, list_checkpoints(job.out)))
        assert f"resumes from {job.out}/step-{saved:08d}" in job.printed()
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        assert f"resuming after step {saved}" in job.printed()
        assert job.restarts() == 1
        job.check_equal_to_one_host()

    def test_drained_node_requeues_and_resumes(self, cluster: Cluster, tmp_path: Path) -> None:
        job = Submitted(cluster, tmp_path, train={"steps": 60, "global_batch_size": 4})
        job.reach(15)
        cluster.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test")
        cluster.run("scontrol", "requeue", job.id)
        job.wait("PENDING")
        time.sleep(8)  # longer than a job that was queued again has to wait
        assert cluster.state(job.id) == "PENDING"
        cluster.run("scontrol", "update", "NodeName=node1", "State=RESUME")
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        job.check_equal_to_one_host()

    @pytest.mark.parametrize("node", [0, 1])
    def test_lost_node_requeues_and_resumes(self, cluster: Cluster, tmp_path: Path, node: int) -> None:
        """Also the first node, on which the script and host 0 of the job run."""
        job = Submitted(cluster, tmp_path, train={"steps": 200, "global_batch_size": 4})
        job.reach(15, saved=10)
        cluster.kill_node(node)
        job.until(lambda: job.restarts() == 1)
        cluster.start_node(node)
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        assert "resuming after step" in job.printed()
        job.check_equal_to_one_host()

    def test_killed_launcher_requeues_and_resumes(self, cluster: Cluster, tmp_path: Path) -> None:
        job = Submitted(cluster, tmp_path, train={"steps": 200, "global_batch_size": 4})
        job.reach(15, saved=10)
        kill_launcher(cluster, 1)
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        assert "weft: a rank or a node failed: the job is queued again" in job.printed()
        job.check_equal_to_one_host()

    def test_scancel_saves_and_a_second_submission_continues(self, cluster: Cluster, tmp_path: Path) -> None:
        job = Submitted(cluster, tmp_path, train={"steps": 60, "global_batch_size": 4}, checkpoint={"every": 0})
        job.reach(5)
        cluster.run("scancel", job.id)
        job.wait("CANCELLED")
        time.sleep(8)
        assert cluster.state(job.id) == "CANCELLED"  # and is not queued again
        saved = max(map(step_of, list_checkpoints(job.out)))
        assert f"saved after step {saved}" in job.printed()
        job.submit("--nodes", "2", "--nproc-per-node", "1", *LIMIT)
        job.wait("COMPLETED", "FAILED")
        assert f"resuming after step {saved}" in job.printed()
        job.check_equal_to_one_host()

    def test_array_trains_each_value(self, cluster: Cluster, tmp_path: Path) -> None:
        options = ("--nodes", "1", "--nproc-per-node", "1", *LIMIT, "--array", "train.seed=1,2")
        job = Submitted(cluster, tmp_path, *options, train={"steps": 10, "global_batch_size": 4})
        for index in (0, 1):
            cluster.wait_for_state(f"{job.id}_{index}", "COMPLETED", "FAILED", seconds=400)
            output = job.out / str(index) / f"slurm-{job.id}_{index}.out"
            assert cluster.state(f"{job.id}_{index}") == "COMPLETED", output.read_text()
            job.check_equal_to_one_host("--set", f"train.seed={index + 1}", run=job.out / str(index), ranks=1)

    def test_job_at_its_time_limit_is_queued_again(self, cluster: Cluster, tmp_path: Path) -> None:
        """Two attempts of three minutes each, of a job that would take longer."""
        options = ("--nodes", "2", "--nproc-per-node", "1", "--time", "3:00")
        job = Submitted(
            cluster, tmp_path, *options, train={"steps": 100_000, "global_batch_size": 4}, checkpoint={"every": 0}
        )
        job.until(lambda: job.restarts() == 1)
        saved = max(map(step_of, list_checkpoints(job.out)))
        job.reach(saved + 5)
        cluster.run("scancel", job.id)
        job.wait("CANCELLED")
        assert "weft: the time limit is near: the job is queued again" in job.printed()
        assert f"resuming after step {saved}" in job.printed()
        rows = [row.step for row in read_metrics(job.out / "metrics.jsonl")]
        assert rows == list(range(1, len(rows) + 1))

    def test_a_killed_rank_of_srun_is_named_and_the_job_resumes(self, cluster: Cluster, tmp_path: Path) -> None:
        job = StartedBySrun(cluster, tmp_path, train={"steps": 200, "global_batch_size": 4})
        job.reach(15, saved=10)
        job.kill_rank(1)
        job.wait("COMPLETED", "FAILED")
        assert cluster.state(job.id) == "COMPLETED", job.printed()
        assert re.findall(r"weft: rank (\d) on \S+ was killed by SIGKILL; (?:\w+ at )?step \d+", job.printed()) == ["1"]
        assert "resuming after step" in job.printed()
        assert job.restarts() == 1
        job.check_equal_to_one_host()

    def test_own_loop_joins_the_ranks_of_srun(self, cluster: Cluster, tmp_path: Path) -> None:
        """`weft.init()` in two tasks on two nodes trains as the same script under torchrun."""
        script = str(ROOT / "examples" / "own_loop.py")
        batch, out = tmp_path / "job.sh", tmp_path / "out"
        batch.write_text(f"#!/bin/bash\nexec srun --ntasks=2 {sys.executable} {script}\n")
        environment = [f"{name}={value}" for name, value in {**PATHS, "OMP_NUM_THREADS": "1"}.items()]
        argv = [
            "env",
            *environment,
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--ntasks-per-node=1",
            f"--output={out}",
            str(batch),
        ]
        job = cluster.run(*argv, cwd=tmp_path).strip()
        cluster.wait_for_state(job, "COMPLETED", "FAILED", seconds=300, output=out.read_text)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script]
        done = subprocess.run(
            launcher, env=os.environ | PATHS | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        losses = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        assert len(losses) == 8, done.stderr
        assert [line for line in out.read_text().splitlines() if line.startswith("step ")] == losses

    def test_doctor_on_all_nodes(self, cluster: Cluster, tmp_path: Path) -> None:
        """The script of docs/doctor.md, in which srun starts one doctor on each node."""
        job = write_job(tmp_path)
        (script,) = re.findall(r"\n    (#!/bin/bash\n(?:    .*\n)+)", (ROOT / "docs" / "doctor.md").read_text())
        batch, out = tmp_path / "doctor.sh", tmp_path / "out"
        batch.write_text(re.sub(r"^    ", "", script, flags=re.M).replace("job.toml", str(job)))
        commands = tmp_path / "bin"
        commands.mkdir()
        (commands / "weft").write_text(f'#!/bin/bash\nexec {" ".join(PYTHON)} "$@"\n')
        (commands / "weft").chmod(0o755)
        environment = [f"{name}={value}" for name, value in PATHS.items()]
        argv = ["env", *environment, f"PATH={commands}:{os.environ['PATH']}", "sbatch", "--parsable", f"--output={out}"]
        submitted = cluster.run(*argv, str(batch), cwd=tmp_path).strip()
        cluster.wait_for_state(submitted, "COMPLETED", "FAILED", seconds=300, output=out.read_text)
        assert "2 hosts examined" in out.read_text()
        assert not (tmp_path / "run").exists()
