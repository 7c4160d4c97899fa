"""Launch of a job with a trainer: check it, start the ranks, and print what training has changed."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft.device.detect import detect, detect_for_launcher
from weft.device.device import Device
from weft.errors import WeftError
from weft.evaluation.harness import HARNESS_ENVIRONMENT
from weft.evaluation.results import HISTORY
from weft.files import replace_file
from weft.integrations.launch import run_on_ranks
from weft.integrations.trainer_checkpoints import newest_complete
from weft.job import Job
from weft.launch.environment import StartedRank
from weft.launch.interrupts import keep_interrupts
from weft.launch.launcher import default_ranks
from weft.launch.node_member import NodeMember
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.rounds import resume_sources, round_of, write_round
from weft.launch.watchdog import Timeouts
from weft.plan import refuse_unequal_rows, resolve_plan
from weft.posttraining.job import TrainerJob
from weft.posttraining.kinds import KINDS
from weft.posttraining.rank import train_rank
from weft.posttraining.report import TIMES, read_history, write_report
from weft.posttraining.resume import check_resume, job_facts
from weft.posttraining.trainers import EXPORT, check_job, generator_device
from weft.precision.dtypes import explain_precision
from weft.training.inside import GatheredRanks, PreparedStart, run_started
from weft.training.metrics import read_task_evaluations
from weft.training.run_folder import HeldFolders, check_writable, make_run_id
from weft.training.shared_folders import shared_folders
from weft.training.startup import describe_device

HANG_SECONDS = 1800.0  # TRL gives no sign of life while it generates


def train_with_trainer(
    job: TrainerJob,
    *,
    ranks: int | None = None,
    resume: str | None = None,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train a job of a trainer of TRL on the devices of this machine, or of several hosts together.

    Invalid input is refused before a rank starts.

    Args:
        job: job to train.
        ranks: number of ranks on this host; default: one per accelerator, or two on CPU.
        resume: checkpoint folder of the trainer, or "auto" for the newest complete one in the run folder, or for the first step
            without one. Default: start a new run, and move an earlier run in its folder aside.
        max_restarts: maximum consecutive restarts, each from the newest complete checkpoint.
        rendezvous: rendezvous of several hosts; None for one host.
        log: function that prints a line.

    Returns:
        Run folder: `job.toml`, `trainer_state.json` with all logs, `checkpoint-N`, and the model in `export`.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    leads, out = rendezvous is None or rendezvous.host == 0, Path(job.out)
    folders, launch_round = Job(out=job.out), round_of(os.environ)
    resume = next(iter(resume_sources(launch_round, out, resume)), None)
    check_writable(folders, new=resume is None, alone=leads)
    device = detect_for_launcher()
    here = ranks or default_ranks(device)
    all_ranks = here * (rendezvous.hosts if rendezvous else 1)
    with HeldFolders(folders) if leads else nullcontext() as held:
        if held:
            _prepare(job, held, all_ranks, here, device, resume, log)
            write_round(out, launch_round)
        checkpoint = resume or ("auto" if max_restarts else "none")
        run_on_ranks(
            [sys.executable, "-u", "-m", "weft.posttraining.rank", str(out), checkpoint],
            job.plan,
            here,
            out / "logs",
            environment={"HF_HUB_OFFLINE": "1"} | HARNESS_ENVIRONMENT,
            hang_timeout=HANG_SECONDS,
            max_restarts=max_restarts,
            rendezvous=rendezvous,
            shared=shared_folders(folders),
        )
    if leads:
        _finish(out, log)
    return out


def train_trainer_started(
    load: Callable[[], TrainerJob], started: StartedRank, member: NodeMember, *, resume: str | None
) -> WeftError | None:
    """Train a job of a trainer of TRL on this rank, which another launcher has started. Collective.

    Args:
        load: reads the job; called on rank 0 alone.
        started: this rank.
        member: connection to the watchdog of this host.
        resume: as in `train_with_trainer`.

    Returns:
        As `run_started`.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    log = partial(print, flush=True)

    def prepare(ranks: GatheredRanks, device: Device, held: ExitStack) -> PreparedStart:
        job = load()
        sources = resume_sources(ranks.launch_round, Path(job.out), resume)
        source = next(iter(sources), None)
        folders = Job(out=job.out)
        check_writable(folders, new=source is None)
        locked = held.enter_context(HeldFolders(folders))
        ranks.share(shared_folders(folders))
        _prepare(job, locked, sum(ranks.by_host), ranks.by_host[0], device, source, log)
        timeouts = Timeouts(other=HANG_SECONDS, hang=HANG_SECONDS)
        return PreparedStart(Path(job.out), sources, timeouts, partial(_finish, Path(job.out), log))

    if detect().type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return run_started(started, member, prepare, train_rank)


def _prepare(
    job: TrainerJob,
    held: HeldFolders,
    all_ranks: int,
    here: int,
    device: Device,
    resume: str | None,
    log: Callable[[str], None],
) -> None:
    """Check a job, prepare its run folder, and print the startup screen; on host 0.

    Args:
        job: job.
        held: locked folders of the run.
        all_ranks: number of ranks of all hosts.
        here: number of ranks of this host.
        device: device of this host.
        resume: source to resume from; None for a new run.
        log: function that prints a line.
    """
    out = Path(job.out)
    with keep_interrupts():
        rows = check_job(job, all_ranks, resume)
        if job.trainer.generator == "process":
            generator_device(device, here)
        if folder := newest_complete(out) if resume == "auto" else resume:
            check_resume(job_facts(job), folder)  # the ranks print what it returns
    if resume is None and (aside := held.move_aside()):
        log(f"the earlier run in {out} is now {aside}; `weft clean {out}` removes runs moved aside")
    make_run_id(out)
    replace_file(out / "job.toml", job.to_toml())
    if plan := job.plan:
        refuse_unequal_rows(plan, "trainer of TRL")
        plan = resolve_plan(plan, all_ranks, native_bf16=device.supports("bf16"))
    log(f"device      {describe_device(device, all_ranks, plan)}")
    if plan:
        log(f"precision   {explain_precision(plan.precision, device)}")
    log(f"model       {job.model.path}, adapter {job.adapter.kind}")
    log(f"data        {rows}")
    experimental = ", which may change it in any version" * (KINDS[job.trainer.kind].module != "trl")
    log(f"trainer     {job.trainer.kind} of TRL {version('trl')}{experimental}")


def _finish(out: Path, log: Callable[[str], None]) -> None:
    """Print what training has changed, and write the report."""
    for line in changes(out):
        log(line)
    try:
        log(f"report      {write_report(out)}")
    except OSError as error:  # the model is saved, and a report can be written later
        log(f"report      not written: {error}; write it later with `weft report {out}`")


def changes(out: Path) -> list[str]:
    """Lines about a finished run: the first and the last evaluation of metrics and of tasks, and the folder of the model."""
    history: list[dict[str, Any]] = read_history(out)
    evaluations = [row for row in history if "eval_loss" in row or "eval_reward" in row]
    lines = []
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        names = [name for name in last if name.startswith("eval_") and not name.endswith(TIMES) and name in first]
        lines.append(f"evaluation  after step {first['step']} -> after step {last['step']}")
        lines += _changes([(name.removeprefix("eval_"), first[name], last[name]) for name in names])
    tasks = read_task_evaluations(out / HISTORY) if (out / HISTORY).is_file() else []
    if len(tasks) == 1:
        lines.append(f"tasks       after step {tasks[0].step}: {tasks[0].text()}")
    elif tasks:
        before, after = tasks[0].values(), tasks[-1].values()
        lines.append(f"tasks       after step {tasks[0].step} -> after step {tasks[-1].step}")
        lines += _changes([(name, before[name], value) for name, value in after.items() if name in before])
    return [*lines, f"model       {out / EXPORT}"]


def _changes(values: list[tuple[str, float, float]]) -> list[str]:
    """Lines of values by name, (name, first value, last value)."""
    width = max((len(name) for name, _, _ in values), default=0) + 2
    return [f"  {name:<{width}}{first:.4g} -> {last:.4g}" for name, first, last in values]
