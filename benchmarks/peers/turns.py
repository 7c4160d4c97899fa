"""Systems that take turns: each is a job of its own with all its ranks alive, and only one of them computes at a time."""

import logging
import os
import socket
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from peers.systems import BUILDERS
from peers.workload import GLOBAL_BATCH, RANKS, SEQ_LEN, rows_of

from weft.errors import RankFailure

# Of every rank, set before the server that the ranks come out of starts: OpenMP reads it once.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}


@dataclass(frozen=True)
class System:
    """One system at work: its ranks sleep until they are given a turn."""

    name: str
    ranks: list[BaseProcess]
    connections: list[Connection]


@dataclass(frozen=True)
class Turn:
    """What one turn gave."""

    losses: list[float]
    """Of each step, the mean over all tokens of the global batch."""
    tokens_per_second: float


def start(name: str, zero: int, dtype: str) -> System:
    """Start the ranks of a system and let them build the model; wait with `wait_built`.

    The ranks come out of a server process that has imported torch and Transformers once, with `ENVIRONMENT` set.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "peers.systems"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks: list[BaseProcess] = []
    connections = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(name, zero, dtype, rank, port, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append(process)
        connections.append(ours)
    return System(name, ranks, connections)


def wait_built(system: System) -> None:
    """Wait until every rank has its model.

    Raises:
        RankFailure: a rank ended; its traceback is on the terminal.
    """
    _answers(system)


def take_turn(system: System, steps: int) -> Turn:
    """Let a system run some training steps while all others sleep.

    Raises:
        RankFailure: a rank ended; its traceback is on the terminal.
    """
    for connection in system.connections:
        connection.send(steps)
    answers = _answers(system)
    losses = [sum(of_ranks) / RANKS for of_ranks in zip(*(losses for losses, _ in answers), strict=True)]
    return Turn(losses, steps * GLOBAL_BATCH * SEQ_LEN / max(seconds for _, seconds in answers))


def stop(system: System) -> None:
    """End the ranks of a system."""
    for connection in system.connections:
        connection.send(0)
    for rank in system.ranks:
        rank.join()


def _answers(system: System) -> list[tuple[list[float], float]]:
    try:
        return [connection.recv() for connection in system.connections]
    except EOFError:
        raise RankFailure(
            f"a rank of {system.name} ended", fix="see its traceback above; --systems chooses which systems run"
        ) from None


def _rank_main(name: str, zero: int, dtype: str, rank: int, port: int, turns: Connection) -> None:
    """Build the system, then run as many steps as each turn says; 0 ends."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # DeepSpeed tells of what it compiles
        train_step = BUILDERS[name](zero, dtype)
    turns.send(([], 0.0))
    done = 0
    while steps := turns.recv():
        dist.barrier()
        started = time.perf_counter()
        losses = [train_step(rows_of(step, rank)) for step in range(done, done + steps)]
        turns.send((losses, time.perf_counter() - started))
        done += steps
    dist.destroy_process_group()
