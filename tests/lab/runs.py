"""Whole runs on ranks of the pool: what `weft train` does, without the seconds in which processes start."""

import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from tests.lab.pool import run_ranks
from weft.data import Prepared
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.train import loop
from weft.train import run as run_module
from weft.train.session import Session, open_session

Trouble = Callable[[Session], None]
"""Makes something of a rank go wrong. At module level, so that it can be sent by name."""


def train_in_the_pool(
    job: Job,
    ranks: int,
    *,
    resume: str | None = None,
    accept_changes: bool = False,
    trouble: Trouble | None = None,
) -> tuple[Path, list[str]]:
    """Train a job; its run folder, and what each rank printed."""
    printed: list[str] = []
    with mock.patch.object(run_module, "launch", partial(_in_the_pool, printed, trouble)):
        out = run_module.train(job, ranks=ranks, resume=resume, accept_changes=accept_changes, say=lambda text: None)
        return out, printed


def _in_the_pool(
    printed: list[str], trouble: Trouble | None, argv: list[str], *, ranks: int, log_dir: Path, **_: Any
) -> None:
    """Takes the place of `launch`."""
    out, *resume = argv[argv.index("weft.train.rank") + 1 :]
    prepared = Prepared.from_json((Path(out) / "prepared.json").read_text())
    job = Job.load(Path(out) / "job.toml")
    printed += run_ranks(ranks, run_rank, job, prepared, Path(out), resume, trouble, timeout=180)


def run_rank(
    rank: int, world_size: int, job: Job, prepared: Prepared, out: Path, resume: list[str], trouble: Trouble | None
) -> str:
    """What `weft.train.rank` does, in a group that exists already; what it printed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch("weft.train.session.connect", return_value=(rank, world_size, rank)),
        redirect_stdout(StringIO()) as text,
    ):
        session = open_session(job, prepared, out, resume)
        if trouble:
            trouble(session)
        loop.train(session, out, Heartbeat.open())
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return text.getvalue()
