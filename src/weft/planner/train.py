"""Train a job on this machine, or on several hosts, with the choices that it leaves to the planner."""

from collections.abc import Callable
from pathlib import Path

from weft.job import Job
from weft.launch.rendezvous import RendezvousConfig
from weft.planner.zero_stage import choose_zero
from weft.training.run import TrainWork
from weft.training.work import launch_work


def train(
    job: Job,
    *,
    ranks: int | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train a job on the devices of this machine, or of several hosts together.

    Invalid input is refused before a rank starts.

    Args:
        job: job to train.
        ranks: number of ranks on this host; default: one per accelerator, or two on CPU.
        resume: checkpoint folder to resume from, or "auto" for the newest valid checkpoint in the run folder, or for the first
            step if there is none. Default: start a new run, and move an earlier run in its folder aside.
        accept_changes: allow a resumed run to change optimizer, schedule, configuration or tokens.
        max_restarts: maximum consecutive restarts without progress; a failed job restarts from its newest valid checkpoint. A
            rank that fails twice in a row, or a lost host, is excluded if the plan fits fewer data ranks.
        rendezvous: rendezvous of several hosts; None for one host. All hosts call this function with the same job and the same
            run folder, on a shared file system. Host 0 leads: only its `resume` and `max_restarts` apply.
        log: function that prints a progress line; the ranks print to the terminal themselves.

    Returns:
        Run folder.

    Raises:
        WeftError: a subclass, see `weft.errors`; `Stopped` after a signal, when the ranks have ended.
    """
    work = TrainWork(job, accept_changes=accept_changes, log=log, choose_zero=choose_zero)
    return launch_work(work, ranks=ranks, resume=resume, max_restarts=max_restarts, rendezvous=rendezvous)
