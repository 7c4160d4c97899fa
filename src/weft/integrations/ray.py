"""Jobs and training loops of Weft in workers of Ray Train. A worker is a rank.

    trainer = TorchTrainer(
        train_worker,                                   # or a loop of your own, which calls weft.init()
        train_loop_config=worker_config("job.toml"),
        torch_config=WeftConfig(),
        scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        run_config=RunConfig(storage_path="/shared/ray", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()

`train` does the same for a job. Ray starts the workers, restarts them after a failure, and is told metrics and checkpoints; the
rest is `weft train` in ranks of another launcher (`weft.training.inside`), with a watchdog on each node.
"""

import json
import math
import os
import socket
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig
from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.train.v2.api.result import Result
from ray.train.v2.torch.torch_trainer import TorchTrainer

from weft.comm.objects import broadcast_json
from weft.errors import JobError, RankFailure, WeftError
from weft.job import Job
from weft.launch.environment import RANK_ENVIRONMENT, missing_environment, started_rank
from weft.launch.node_member import announce_end, join_node
from weft.launch.rank_entry import started_rank_call
from weft.launch.rank_status import HEARTBEAT_VARIABLE
from weft.launch.rendezvous import interface_of
from weft.launch.rounds import RESTARTS_VARIABLE, LaunchRound
from weft.plan import check_plan
from weft.planner.zero_stage import choose_zero
from weft.training.functions import Callback
from weft.training.inside import inside
from weft.training.metrics import Evaluation, StepMetrics
from weft.training.rank import train_rank
from weft.training.run import TrainWork

POINTER = "weft.json"
"""File of a checkpoint of Ray, with the path of the checkpoint folder of Weft."""
POLL_SECONDS = ("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", 2.0)
"""Variable and default of the interval in which Ray's controller takes one report; a second report would wait for it."""
OBJECT_STORE_BYTES = 100 << 20  # of a cluster on this machine: workers exchange no tensors through Ray
VARIABLES = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each line twice
    **{name: RANK_ENVIRONMENT[name] for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM")},
}
"""Environment variables that libraries read when they are imported. Ray itself sets OMP_NUM_THREADS to the CPUs of a worker."""


@dataclass
class WeftConfig(TorchConfig):
    """Configuration of TorchTrainer under which Weft joins the workers, not Ray: with a backend for host memory as well, on
    any accelerator. Ray sets the variables of torchrun."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class that prepares the workers."""
        return _TorchrunEnvironment


class _TorchrunEnvironment(Backend):
    """Sets the variables of torchrun in each worker. Ray keeps this object for all attempts of a run."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self.attempts = 0

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray when the workers of an attempt have started."""
        address, port = worker_group.execute_single(0, _free_endpoint)
        worker_group.execute(_set_environment, address, port, self.attempts)
        self.attempts += 1

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray before it ends the workers, also those of nodes without a failure. Does not wait for them."""
        worker_group.execute_async(_announce_end)


def _free_endpoint() -> tuple[str, int]:
    """Address of this node, and a free port there."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as server:
        return address, server.getsockname()[1]


def _set_environment(address: str, port: int, attempt: int) -> None:
    context = ray.train.get_context()
    if not attempt and ray.train.get_checkpoint():  # a run of this name that was started again
        attempt = 1
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NODE_RANK": str(context.get_node_rank()),
        RESTARTS_VARIABLE: str(attempt),
    }
    started = started_rank(os.environ)
    assert started
    os.environ |= missing_environment(started, os.environ, interface_of(ray.util.get_node_ip_address()))


def _announce_end() -> None:
    if heartbeat := os.environ.get(HEARTBEAT_VARIABLE):
        announce_end(Path(heartbeat))


def worker_config(job: Job | str | Path, *, resume: str | None = None, accept_changes: bool = False) -> dict[str, Any]:
    """Value of `train_loop_config` for `train_worker`.

    Args:
        job: job, or the path of a job file. The workers run in the current folder, which all nodes must have.
        resume: checkpoint folder to resume from, or "auto" for the newest valid checkpoint in the run folder. Default: start a
            new run. Restarts by Ray always continue from the newest valid checkpoint.
        accept_changes: allow a resumed run to change optimizer, schedule, configuration or tokens.

    Raises:
        JobError: the job is invalid.
    """
    job = job if isinstance(job, Job) else Job.load(job)
    return {
        "job": job.to_toml(),
        "folder": os.getcwd(),
        "resume": resume,
        "accept_changes": accept_changes,
    }


def train_worker(config: dict[str, Any]) -> None:
    """Train a job in a worker: `train_loop_per_worker` of a TorchTrainer with a `WeftConfig`.

    Args:
        config: made by `worker_config`.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    if refusal := _train_or_refuse(config):
        raise refusal


def train(
    job: Job | str | Path,
    *,
    num_workers: int,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    max_failures: int = 0,
    resume: str | None = None,
    accept_changes: bool = False,
) -> Result:
    """Train a job with a TorchTrainer, on the cluster to which `ray.init` has connected.

    Args:
        job: job, or the path of a job file.
        num_workers: number of ranks.
        use_gpu: True for one GPU per rank.
        resources_per_worker: resources of each rank by Ray's names, such as {"CPU": 4}.
        max_failures: maximum number of restarts of all ranks; -1: without limit.
        resume: as in `worker_config`.
        accept_changes: as in `worker_config`.

    Raises:
        JobError: the job is invalid; it is refused once, without restarts.
        RankFailure: a rank failed, and no restart was left.
    """
    job = job if isinstance(job, Job) else Job.load(job)
    check_plan(job.plan, num_workers)
    out = Path(job.out).absolute()
    trainer = TorchTrainer(
        _train_or_refuse,
        train_loop_config=worker_config(job, resume=resume, accept_changes=accept_changes),
        torch_config=WeftConfig(),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker=dict(resources_per_worker) if resources_per_worker else None,
        ),
        run_config=RunConfig(
            name=f"{out.name}-{datetime.now():%Y%m%d-%H%M%S-%f}",
            storage_path=str(out.parent / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env={"env_vars": VARIABLES},
            logging_config=LoggingConfig(log_level="WARNING"),  # each report would be a line
        ),
    )
    try:
        result: Any = trainer.fit()  # of the class Result, which the annotation of fit takes for its base
    except TrainingFailedError as error:
        raise _failure(error) from None
    if isinstance(result.return_value, WeftError):
        raise result.return_value
    return result


@contextmanager
def connected(address: str | None, *, cpus: float) -> Iterator[None]:
    """Connection to a cluster of Ray.

    Args:
        address: address of the cluster, as of `ray.init`; None: the one of RAY_ADDRESS, else a cluster on this machine, which
            ends with the block.
        cpus: CPUs that the workers need; a cluster on this machine has at least as many, so that ranks may share cores.

    Raises:
        JobError: there is no cluster.
    """
    try:
        if address is None and "RAY_ADDRESS" not in os.environ:
            cores = max(os.cpu_count() or 1, math.ceil(cpus))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
        else:
            ray.init(address=address)
    except ConnectionError as error:
        raise JobError(
            f"no cluster of Ray is there: {error}",
            where=f"--address {address or os.environ['RAY_ADDRESS']}",
            rule="a running cluster",
            fix="start one with `ray start --head`, or leave --address out for a cluster of this job on this machine",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def checkpoint_folder(checkpoint: ray.train.Checkpoint) -> Path:
    """Checkpoint folder of Weft that a reported checkpoint points to. It may have been removed since, see checkpoint.keep."""
    with checkpoint.as_directory() as folder:
        return Path(json.loads(Path(folder, POINTER).read_text(encoding="utf-8"))["folder"])


def _train_or_refuse(config: dict[str, Any]) -> WeftError | None:
    """Train in a worker; return, not raise, the error of a job that rank 0 refuses before training: Ray would restart it."""
    folder, context = Path(config["folder"]), ray.train.get_context()
    if not folder.is_dir():
        raise JobError(
            f"this node has no folder {folder}",
            where=f"rank {context.get_world_rank()} on {socket.gethostname()}",
            rule="all nodes have the folder in which the job was started, and the run folder, on a shared file system",
            fix="start the job in a folder on a shared file system",
        )
    if dist.is_initialized():
        raise JobError(
            "Ray has joined the ranks before Weft",
            where="TorchTrainer(torch_config=...)",
            rule="Weft sends small messages in host memory besides those of the accelerator",
            fix="TorchTrainer(train_worker, torch_config=WeftConfig(), ...)",
        )
    os.chdir(folder)
    found = started_rank(os.environ)
    assert found, "WeftConfig sets the variables of a rank"
    path = context.get_storage().experiment_fs_path
    started = replace(found, launch_round=LaunchRound((path,), (path,) if found.attempt else ()))
    member = join_node(started)

    def load() -> TrainWork:
        return TrainWork(
            Job.parse(tomllib.loads(config["job"])), accept_changes=config["accept_changes"], choose_zero=choose_zero
        )

    run_rank = partial(train_rank, followers=[Callback(_Reports())])
    return started_rank_call(lambda: inside(load, run_rank, started, member, resume=config["resume"]), started, member)


class _Reports:
    """Callback of every rank that reports to Ray, at most once in the interval in which Ray takes a report, so that training
    does not wait. A report has the numbers of the last step, and under "steps" those of each step since the last report."""

    def __init__(self) -> None:
        name, default = POLL_SECONDS
        self.interval, self.last = float(os.environ.get(name, default)), -float("inf")
        self.steps: list[dict[str, Any]] = []
        self.evaluations: dict[str, float] = {}
        self.checkpoint: Path | None = None

    def on_step(self, metrics: StepMetrics) -> None:
        """Report, if it is time on rank 0. Collective."""
        self.steps.append({name: value for name, value in asdict(metrics).items() if value is not None})
        if broadcast_json(time.monotonic() - self.last >= self.interval):
            self._report()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Keep the loss on held-out rows for the next report."""
        self.evaluations = {"held_out_loss": evaluation.held_out_loss, "evaluated_step": evaluation.step}

    def on_checkpoint(self, folder: Path) -> None:
        """Keep a checkpoint for the next report."""
        self.checkpoint = folder

    def on_end(self, folder: Path) -> None:
        """Report what is left. Collective."""
        if broadcast_json(bool(self.steps or self.checkpoint)):
            self._report()

    def _report(self) -> None:
        numbers = (
            {name: value for name, value in self.steps[-1].items() if not isinstance(value, dict | tuple)}
            if self.steps
            else {}
        )
        metrics = {**numbers, **self.evaluations, "steps": self.steps}
        with tempfile.TemporaryDirectory() if self.checkpoint else nullcontext() as folder:
            if folder is None:
                ray.train.report(metrics)
            else:  # a pointer: Ray would copy the checkpoint to a folder that it manages
                Path(folder, POINTER).write_text(json.dumps({"folder": str(self.checkpoint)}), encoding="utf-8")
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        self.steps, self.checkpoint, self.last = [], None, time.monotonic()


def _failure(error: TrainingFailedError) -> RankFailure:
    """Error of a run whose workers failed for the last time. The watchdog of their node has named the first."""
    workers = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    rank, failure = next(iter(workers.items()), (None, error))
    rank = rank if len(workers) == 1 else None
    reason = (str(failure).strip().splitlines() or [type(failure).__name__])[-1]
    return RankFailure(
        f"{'the run' if rank is None else f'rank {rank}'} failed: {reason}",
        rank=rank,
        where="Ray Train",
        rule="Ray restarts all ranks after a failure, --max-failures times",
        fix="see the watchdog's line and the output of the workers above; --resume auto continues from the newest checkpoint",
    )
