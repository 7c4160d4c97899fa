"""Turn-taking of systems: each is a separate job whose ranks stay alive, and only one system computes at a time."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from peers.systems import Step
from peers.watch import action_seconds, communication_share, sent_bytes
from peers.workload import Workload
from transformers.utils.logging import disable_progress_bar

from weft.errors import RankFailure

# Environment of every rank, set before the fork server starts, because OpenMP reads it once.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "6"}
# Imported once by the fork server instead of by every rank; modules that are not installed are skipped.
PRELOADED = [
    "peers.axes",
    "peers.pipeline",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "accelerate",
]

Watch = Literal["", "share", "bytes", "actions"]


@dataclass(frozen=True)
class Job:
    """One system on a number of ranks."""

    name: str
    workload: Workload
    ranks: int
    build: Callable[[], Step]
    """Builder, called in every rank; must be picklable: a module-level function or a `functools.partial` of one."""


@dataclass(frozen=True)
class System:
    """Running system, whose ranks sleep until they get a turn."""

    job: Job
    ranks: list[BaseProcess]
    connections: list[Connection]
    folder: TemporaryDirectory[str]
    """Folder of the rendezvous file; removed with this object."""

    @property
    def name(self) -> str:
        return self.job.name


class Order(NamedTuple):
    """Next task of a rank."""

    steps: int
    watch: Watch = ""
    """Profile to record, which disturbs the time; see `peers.watch`."""


@dataclass(frozen=True)
class Turn:
    """Result of one turn."""

    losses: list[float]
    """Loss of each step, mean over all tokens of the global batch."""
    seconds: float
    """Seconds of all steps, on the slowest rank."""
    core_seconds: float
    """CPU seconds of all ranks and steps; hardly affected by other work on the same cores."""
    watched: list[Any]
    """Profile of each rank, as ordered; share and bytes are recorded on rank 0 alone."""
    tokens_per_second: float


def start(job: Job) -> System:
    """Start the ranks of a system, which build the model; wait with `wait_built`.

    The ranks are forked by a server process that has imported `PRELOADED` once, with `ENVIRONMENT` set.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # A file as rendezvous: a free port may be taken by a connection of another system a moment later.
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    rendezvous = os.path.join(folder.name, "rendezvous")
    ranks: list[BaseProcess] = []
    connections = []
    for rank in range(job.ranks):
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_rank_main, args=(job, rank, rendezvous, child_end), daemon=True)
        process.start()
        child_end.close()
        ranks.append(process)
        connections.append(parent_end)
    return System(job, ranks, connections, folder)


def wait_built(system: System) -> None:
    """Wait until every rank has its model.

    Raises:
        RankFailure: a rank ended; its traceback is on the terminal.
    """
    _answers(system)


def take_turn(system: System, steps: int, watch: Watch = "") -> Turn:
    """Run training steps of one system while all other systems sleep.

    Raises:
        RankFailure: a rank ended; its traceback is on the terminal.
    """
    for connection in system.connections:
        connection.send(Order(steps, watch))
    answers = _answers(system)
    losses = [sum(of_ranks) / len(answers) for of_ranks in zip(*(answer.losses for answer in answers), strict=True)]
    seconds = max(answer.seconds for answer in answers)
    core_seconds = sum(answer.core_seconds for answer in answers)
    watched = [answer.watched for answer in answers]
    return Turn(losses, seconds, core_seconds, watched, steps * system.job.workload.tokens / seconds)


def stop(system: System) -> None:
    """End the ranks of a system."""
    for connection in system.connections:
        connection.send(Order(0))
    for rank in system.ranks:
        rank.join()


class Answer(NamedTuple):
    """Result of a turn on one rank."""

    losses: list[float]
    seconds: float
    core_seconds: float
    watched: Any


def _answers(system: System) -> list[Answer]:
    try:
        return [connection.recv() for connection in system.connections]
    except EOFError:
        raise RankFailure(
            f"a rank of {system.name} ended", fix="see its traceback above; --systems chooses which systems run"
        ) from None


def _rank_main(job: Job, rank: int, rendezvous: str, turns: Connection) -> None:
    """Build the system on one rank, then run the steps of each turn; an order of 0 steps ends the rank."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    os.environ.update({key: str(value) for key, value in variables.items()})  # read by some systems
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=job.ranks)
    with open(os.devnull, "w") as null, redirect_stdout(null):  # DeepSpeed prints its compilations
        train_step = job.build()
    turns.send(Answer([], 0.0, 0.0, None))
    done = 0
    with suppress(EOFError):  # the parent process has ended
        while (order := turns.recv()).steps:
            turns.send(_run(job, train_step, order, done))
            done += order.steps
    dist.destroy_process_group()


def _run(job: Job, train_step: Step, order: Order, first: int) -> Answer:
    losses: list[float] = []

    def run() -> None:
        losses.extend(train_step(job.workload.rows_of(step)) for step in range(first, first + order.steps))

    watched = None
    dist.barrier()
    started, computed = time.perf_counter(), time.process_time()
    if order.watch == "share" and dist.get_rank() == 0:
        watched = communication_share(run)
    elif order.watch == "bytes" and dist.get_rank() == 0:
        watched = sent_bytes(run)
    elif order.watch == "actions":
        watched = action_seconds(run)
    else:
        run()
    return Answer(losses, time.perf_counter() - started, time.process_time() - computed, watched)
