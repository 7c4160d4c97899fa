"""Complete runs on ranks of the pool: `weft train` without the seconds in which processes start."""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial, partialmethod
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.lab.parity import logits_of
from tests.lab.pool import run_ranks, start_ranks
from weft.backends import hierarchical
from weft.data import Prepared, Rows, evaluation_batches
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.planner import train as train_module
from weft.training import loop, work
from weft.training import run as run_module
from weft.training.metrics import StepMetrics, read_metrics
from weft.training.session import Session, open_session

Fault = Callable[[Session], None]
"""Fault injected into a rank's session; a function at module level, so that it can be pickled."""
Probe = Callable[[Session], Any]
"""Reads facts from a rank's session after its last step, for example dtypes or counts; at module level, results are pickled."""


@dataclass
class ObservedRun:
    """A run of `weft train` and what was seen of it."""

    folder: Path
    screen: list[str]
    """Lines of the launcher: startup screen and notes."""
    printed: list[str]
    """Output of each rank."""
    facts: list[Any]
    """Result of the probe on each rank; empty for a run that ended earlier."""

    @property
    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        return [row.loss for row in self.metrics]


def train_in_the_pool(
    job: Job,
    ranks: int,
    *,
    resume: str | None = None,
    accept_changes: bool = False,
    fault: Fault | None = None,
) -> tuple[Path, list[str]]:
    """Train a job; return its run folder and the output of each rank."""
    run = observe(job, ranks, resume=resume, accept_changes=accept_changes, fault=fault)
    return run.folder, run.printed


def observe(
    job: Job,
    ranks: int,
    *,
    resume: str | None = None,
    accept_changes: bool = False,
    fault: Fault | None = None,
    probe: Probe | None = None,
    hosts: int = 1,
) -> ObservedRun:
    """Train a job as `weft train` does; return what was seen.

    Args:
        job: job to train.
        ranks: number of ranks.
        resume: as of `weft.planner.train.train`.
        accept_changes: as of `weft.planner.train.train`.
        fault: changes the session of a rank before its first step.
        probe: reads facts from the session of a rank after its last step.
        hosts: hosts that the ranks take themselves to be on, in equal parts; the launcher knows them too.
    """
    run = ObservedRun(Path(), [], [], [])
    start_ranks(ranks)  # a rank that is forked while the launcher holds its locks would inherit them, and keep them
    with (
        mock.patch.object(work, "launch", partial(_in_the_pool, run, fault, probe, hosts)),
        mock.patch.object(work, "early_forkserver", return_value=nullcontext()),
        mock.patch.object(
            run_module.TrainWork, "prepare", partialmethod(_prepare, hosts, run_module.TrainWork.prepare)
        ),
    ):
        run.folder = train_module.train(
            job, ranks=ranks, resume=resume, accept_changes=accept_changes, log=run.screen.append
        )
    return run


def _prepare(
    own: Any, hosts: int, prepare: Callable[..., Any], folders: Any, ranks_by_host: list[int], *rest: Any
) -> Any:
    """Replacement of `TrainWork.prepare`."""
    return prepare(own, folders, [sum(ranks_by_host) // hosts] * hosts, *rest)


def _in_the_pool(
    run: ObservedRun,
    fault: Fault | None,
    probe: Probe | None,
    hosts: int,
    argv: list[str],
    *,
    ranks: int,
    log_dir: Path,
    **_: Any,
) -> None:
    """Replacement of `launch`."""
    out, *resume = argv[argv.index("weft.training.rank") + 1 :]
    prepared = Prepared.from_json((Path(out) / "prepared.json").read_text())
    job = Job.load(Path(out) / "job.toml")
    arguments = job, prepared, Path(out), resume, fault, probe, hosts
    for printed, facts in run_ranks(ranks, run_rank, *arguments, timeout=180):
        run.printed.append(printed)
        run.facts.append(facts)


def run_rank(
    rank: int,
    world_size: int,
    job: Job,
    prepared: Prepared,
    out: Path,
    resume: list[str],
    fault: Fault | None,
    probe: Probe | None = None,
    hosts: int = 1,
) -> tuple[str, Any]:
    """Run `weft.training.rank` in an existing process group; return its output and the result of the probe."""
    host = [f"host {rank * hosts // world_size}"] if hosts > 1 else hierarchical.host_id()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with (
        mock.patch("weft.training.session.connect", return_value=(rank, world_size, rank)),
        mock.patch.object(hierarchical, "host_id", return_value=host),
        redirect_stdout(StringIO()) as text,
    ):
        session = open_session(job, prepared, out, resume)
        if fault:
            fault(session)
        loop.train(session, out, Heartbeat.open(), time.time())
        facts = probe(session) if probe else None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    return text.getvalue(), facts


def plain_held_out_loss(run: Path, folder: Path) -> float:
    """Held-out loss of a model folder on the rows of a run, by Transformers, each document alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prepared = Prepared.from_json((run / "prepared.json").read_text())
    job = Job.load(run / "job.toml")
    rows = Rows(prepared.held_out, seq_len=job.data.seq_len, packing=job.data.packing, shuffle=False, seed=0)
    total = count = 0.0
    for batch in evaluation_batches(rows, micro_batch=1, data_rank=0, data_ranks=1, max_rows=job.train.evaluate_rows):
        with torch.no_grad():
            logits = logits_of(model, batch).float()
        total += F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").item()
        count += int((batch.targets != -100).sum())
    return total / count
