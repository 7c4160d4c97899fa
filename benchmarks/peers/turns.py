"""Systems that take turns: each is a job of its own with all its ranks alive, and only one of them computes at a time."""

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

# Of every rank, set before the server that the ranks come out of starts: OpenMP reads it once.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "KINETO_LOG_LEVEL": "6"}
# Imported once, in place of once in every rank; what is not installed is passed over.
PRELOADED = [
    "peers.axes",
    "peers.pipeline",
    "torch._dynamo",  # a first optimizer asks for it
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "accelerate",
]

Watch = Literal["", "share", "bytes", "actions"]


@dataclass(frozen=True)
class Job:
    """One system on some ranks."""

    name: str
    workload: Workload
    ranks: int
    build: Callable[[], Step]
    """Called in every rank, so it must be a function that pickle knows, or a `functools.partial` of one."""


@dataclass(frozen=True)
class System:
    """One system at work: its ranks sleep until they are given a turn."""

    job: Job
    ranks: list[BaseProcess]
    connections: list[Connection]
    folder: TemporaryDirectory[str]
    """Where its ranks meet; it goes with this object."""

    @property
    def name(self) -> str:
        return self.job.name


class Order(NamedTuple):
    """What a rank is told to do next."""

    steps: int
    watch: Watch = ""
    """What else to find out, which disturbs the time: see `peers.watch`."""


@dataclass(frozen=True)
class Turn:
    """What one turn gave."""

    losses: list[float]
    """Of each step, the mean over all tokens of the global batch."""
    seconds: float
    """Of all steps, on the rank that took longest."""
    core_seconds: float
    """That all ranks computed, of all steps: what others do on the same cores hardly changes it."""
    watched: list[Any]
    """What each rank found out, as ordered; of share and bytes, only rank 0."""
    tokens_per_second: float


def start(job: Job) -> System:
    """Start the ranks of a system and let them build the model; wait with `wait_built`.

    The ranks come out of a server process that has imported `PRELOADED` once, with `ENVIRONMENT` set.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Ranks meet in a file: a port that is free now may be one of another system's connections a moment later.
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    rendezvous = os.path.join(folder.name, "rendezvous")
    ranks: list[BaseProcess] = []
    connections = []
    for rank in range(job.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(job, rank, rendezvous, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append(process)
        connections.append(ours)
    return System(job, ranks, connections, folder)


def wait_built(system: System) -> None:
    """Wait until every rank has its model.

    Raises:
        RankFailure: a rank ended; its traceback is on the terminal.
    """
    _answers(system)


def take_turn(system: System, steps: int, watch: Watch = "") -> Turn:
    """Let a system run some training steps while all others sleep.

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
    """What a rank has to say of a turn."""

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
    """Build the system, then run as many steps as each turn says; 0 ends."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({key: str(value) for key, value in place.items()})  # some peers look there
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=job.ranks)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # DeepSpeed tells of what it compiles
        train_step = job.build()
    turns.send(Answer([], 0.0, 0.0, None))
    done = 0
    with suppress(EOFError):  # the one who gives the turns is gone
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
