"""Jobs and loops in workers of Ray Train, on a real cluster of Ray on this machine."""

import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.faults.kill import Rank
from tests.lab.hosts import Host, hosts
from tests.lab.jobs import write_job
from tests.launch.test_inside import leaves_nothing
from weft.checkpoint.folders import list_checkpoints
from weft.cli.app import app
from weft.errors import JobError, PlanError
from weft.launch.scratch import PREFIX, SHARED_MEMORY
from weft.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "RAY_USAGE_STATS_ENABLED": "0"}
NODE = {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled"}  # of a cluster on emulated hosts, which nobody else reaches
STEPS, FAULT_STEP = 60, 17
HANG = {"hang_timeout_seconds": 20.0}
MEASURED = {
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "checkpoint_seconds",
    "comm",
    "peak",
    "peak_operation",
    "time",
    "joules",
    "dollars",
    "grams_co2",
}
NAMED = {
    "killed": r"weft: rank {} on \S+ was killed by SIGKILL; (\w+ at )?step \d+",
    "stopped": r"weft: rank {} on \S+ has been stalled in step \d+ for \d+ s: stopped by a signal at \S+\.py:\d+ \w+",
}

SCRIPT = """
import json, sys
from pathlib import Path
import ray, torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
import weft
from weft.integrations.ray import WeftConfig, checkpoint_folder, connected, train, train_worker, worker_config

folder, job = Path(sys.argv[1]), weft.Job.load(sys.argv[2])
common = {"torch_config": WeftConfig(), "scaling_config": ScalingConfig(num_workers=2)}

class Reports(UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        steps = [[step["step"], step["loss"]] for step in metrics[0]["steps"]]
        saved = str(checkpoint_folder(checkpoint)) if checkpoint else None
        with (folder / "reports.jsonl").open("a") as file:
            last = {"step": metrics[0]["step"], "loss": metrics[0]["loss"], "saved": saved}
            file.write(json.dumps(last | {"steps": steps}) + "\\n")

def own_loop(config):
    from transformers import LlamaConfig, LlamaForCausalLM
    weft.init()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config["model"]))
    plan = weft.Plan(precision=weft.Precision(param_dtype="fp32"))
    run = weft.prepare(model, optimizer=lambda shards: torch.optim.SGD(shards, lr=0.1), plan=plan)
    rows = torch.arange(64).reshape(4, 16) % 50
    for _ in range(3):
        batch = rows[run.data_rank :: run.data_ranks]
        with run.accumulate():
            loss = run.backward(run.model(input_ids=batch, labels=batch).loss)
        run.step()
        losses = torch.tensor([loss.item()])
        dist.all_reduce(losses)
        ray.train.report({"loss": losses.item() / 2, "world": dist.get_world_size(), "backend": dist.get_backend()})
    return [losses.item() / 2, dist.get_world_size()]

with connected(None, cpus=2):
    config = RunConfig(name="job", storage_path=str(folder / "ray"), callbacks=[Reports()])
    TorchTrainer(train_worker, train_loop_config=worker_config(job), run_config=config, **common).fit()
    config = RunConfig(name="loop", storage_path=str(folder / "ray"))
    result = TorchTrainer(own_loop, train_loop_config=json.loads(sys.argv[3]), run_config=config, **common).fit()
    (folder / "loop.json").write_text(json.dumps(result.return_value))
    try:
        bad = job.model_copy(update={"out": str(folder / "refused")})
        train(bad, num_workers=2, max_failures=3, resume=str(folder / "none"))
    except weft.WeftError as error:
        (folder / "refused.txt").write_text(f"{type(error).__name__} {error}")
"""


def run(argv: list[str], log: Path, **options: Any) -> None:
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *argv], env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, **options
        )
    assert done.returncode == 0, log.read_text()[-5000:]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step without those that are measured."""
    return [
        {name: value for name, value in asdict(row).items() if name not in MEASURED}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def started_by(driver: "subprocess.Popen[bytes]") -> set[int]:
    import psutil

    return {process.pid for process in psutil.Process(driver.pid).children(recursive=True)}


def worker_at(workers: set[int], rank: int, step: int) -> int | None:
    """Process of the worker of a rank, by its heartbeat; None if it has not reached a step."""
    for path in glob.glob(f"{SHARED_MEMORY}/{PREFIX}node-*/{rank}"):
        status = Rank(0, Path(path)).status()
        if status.pid in workers and (status.step or 0) >= step:
            return status.pid
    return None


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of Weft's own launcher, beside its job."""
    folder = tmp_path_factory.mktemp("reference")
    job = write_job(folder, train={"steps": STEPS, "global_batch_size": 4}, checkpoint={"every": 5}, guard=HANG)
    command = ["-m", "weft", "train", str(job), "--nproc-per-node", "2", "--out", str(folder / "plain")]
    run(command, folder / "plain.log")
    return folder / "plain"


@pytest.mark.exclusive(reason="a cluster of Ray needs both cores, and its processes have deadlines")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("fault", "victim"), [("killed", 0), ("killed", 1), ("stopped", 0), ("stopped", 1)])
def test_a_worker_that_fails_is_named_and_the_run_resumes_bit_equal(
    reference: Path, tmp_path: Path, fault: str, victim: int
) -> None:
    """A stopped worker is ended after `guard.hang_timeout_seconds`; Ray itself waits for it for ten minutes."""
    pytest.importorskip("psutil"), pytest.importorskip("ray.train", reason='pip install "weft-train[ray]"')
    job, out, log = reference.with_name("job.toml"), tmp_path / "out", tmp_path / "ray.log"
    command = ["-m", "weft", "launch", "ray", str(job), "--num-workers", "2", "--max-failures", "1", "--out", str(out)]
    with leaves_nothing(tmp_path), log.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, *command], env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while (worker := worker_at(started_by(driver), victim, FAULT_STEP)) is None:
                assert driver.poll() is None, log.read_text()[-5000:]
                time.sleep(0.01)
            os.kill(worker, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            assert len(read_metrics(out / "metrics.jsonl")) < STEPS, "the run had ended before the fault"
            assert driver.wait(600) == 0, log.read_text()[-5000:]
        finally:
            driver.terminate()
            driver.wait(60)
    printed = log.read_text()
    assert len(re.findall(NAMED[fault].format(victim), printed)) == 1, printed
    assert len(re.findall(r"weft: rank \d", printed)) == 1, printed
    assert "resuming after step" in printed
    assert not out.with_name("out.1").exists()
    assert (out / "logs" / "attempt-1").is_dir()
    assert numbers(out) == numbers(reference)
    export = "export/model.safetensors"
    assert (out / export).read_bytes() == (reference / export).read_bytes()


def processes_on(*pair: Host) -> set[int]:
    commands = [["ip", "netns", "pids", host.namespace] for host in pair]
    return {int(pid) for command in commands for pid in subprocess.run(command, capture_output=True).stdout.split()}


def ray_start(host: Host, *options: str) -> None:
    """Start Ray on an emulated host, with one CPU and in the background; it ends with the host."""
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--num-cpus=1"]
    command += [f"--node-ip-address={host.address}", "--object-store-memory=104857600", *options]
    process = host.start(command, env=os.environ | NODE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed.decode(errors="replace")


@pytest.mark.exclusive(reason="a cluster of Ray needs both cores, and its processes have deadlines")
@pytest.mark.timeout(900)
def test_the_node_of_a_killed_worker_names_it_and_the_other_blames_none(reference: Path, tmp_path: Path) -> None:
    """A cluster of two nodes on emulated hosts, with one rank each."""
    pytest.importorskip("ray.train", reason='pip install "weft-train[ray]"')
    job, out, log = reference.with_name("job.toml"), tmp_path / "out", tmp_path / "ray.log"
    with leaves_nothing(tmp_path), hosts(2) as (first, second), log.open("w") as file:
        ray_start(first, "--head", "--port=6379", "--include-dashboard=false")
        ray_start(second, f"--address={first.address}:6379")
        command = ["-m", "weft", "launch", "ray", str(job), "--address", f"{first.address}:6379", "--out", str(out)]
        command += ["--num-workers", "2", "--max-failures", "1"]
        driver = first.start([sys.executable, *command], env=os.environ | NODE, stdout=file, stderr=subprocess.STDOUT)
        while (worker := worker_at(processes_on(first, second), 1, FAULT_STEP)) is None:
            assert driver.poll() is None, log.read_text()[-5000:]
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        assert len(read_metrics(out / "metrics.jsonl")) < STEPS, "the run had ended before the fault"
        assert driver.wait(600) == 0, log.read_text()[-5000:]
    printed = log.read_text()
    assert re.search(NAMED["killed"].format(1), printed), printed
    assert set(re.findall(r"weft: rank \d", printed)) == {"weft: rank 1"}  # twice: both nodes send the logs in /tmp/ray
    assert re.search(r"no rank on \S+ failed first: the ranks lost a rank on another host", printed), printed
    assert "resuming after step" in printed
    assert numbers(out) == numbers(reference)


@pytest.mark.exclusive(reason="a cluster of Ray needs both cores, and its processes have deadlines")
@pytest.mark.timeout(900)
def test_reports_own_loops_and_refused_jobs(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='pip install "weft-train[ray]"')
    job = write_job(tmp_path, train={"steps": 12}, checkpoint={"every": 4, "keep": 0})
    model = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (tmp_path / "script.py").write_text(SCRIPT)
    run(["script.py", str(tmp_path), str(job), json.dumps({"model": model})], tmp_path / "log", cwd=tmp_path)
    reports = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    steps = [step for report in reports for step in report["steps"]]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert steps == [[row.step, row.loss] for row in rows], "each step is in one report"
    assert [reports[-1]["step"], reports[-1]["loss"]] == steps[-1]
    saved = [Path(report["saved"]) for report in reports if report["saved"]]
    assert saved[-1] == list_checkpoints(tmp_path / "run")[0], "Ray is told the folder of the newest checkpoint"
    assert json.loads((tmp_path / "loop.json").read_text()) == [pytest.approx(_own_loop(model), abs=1e-6), 2]
    refused = (tmp_path / "refused.txt").read_text()
    assert refused.startswith("CheckpointError")
    assert str(tmp_path / "none") in refused
    assert (tmp_path / "log").read_text().count("using tokens from the cache") <= 2, "a refused job is not tried again"


def _own_loop(model: dict[str, Any]) -> float:
    """Loss of the third step of the script's loop in plain PyTorch, in one process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**model))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows = torch.arange(64).reshape(4, 16) % 50
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.must("command: launch ray")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--resources-per-worker", "CPU"], JobError),
        (["--resources-per-worker", "CPU=many"], JobError),
        (["--set", "plan.parallel.tp=3"], PlanError),
        (["--set", "train.step=3"], JobError),
    ],
)
def test_bad_input_is_refused_before_ray_starts(tmp_path: Path, options: list[str], error: type[JobError]) -> None:
    job = write_job(tmp_path)
    result = CliRunner().invoke(app, ["launch", "ray", str(job), "--num-workers", "2", *options])
    assert type(result.exception) is error
    assert "fix:" in str(result.exception)
