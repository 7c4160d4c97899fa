"""weft train"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

from weft.cli.options import (
    AcceptChanges,
    Endpoint,
    HostIndex,
    Hosts,
    Interface,
    OutOption,
    Ranks,
    ResumeOption,
    SetOption,
    TokenFile,
)

if TYPE_CHECKING:
    from weft.job import Job
    from weft.launch.environment import StartedRank
    from weft.launch.node_member import NodeMember
    from weft.launch.rendezvous import RendezvousConfig
    from weft.posttraining.job import TrainerJob


def train(
    job: Annotated[Optional[Path], typer.Argument(help="Job as TOML; default: the built-in first run.")] = None,  # noqa: UP045
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    resume: ResumeOption = None,
    accept_changes: AcceptChanges = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum consecutive restarts without progress.")] = 0,
    out: OutOption = None,
    nnodes: Hosts = 1,
    node_rank: HostIndex = 0,
    rdzv_endpoint: Endpoint = None,
    token_file: TokenFile = None,
    interface: Interface = None,
) -> None:
    """Train a model; write metrics, report and export."""
    if nnodes > 1:  # torch prints a stack trace for each lost connection of its store; the watchdog names lost hosts
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would slow down all other processes
    # For numpy: ranks are forked from this process, which must have no second thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from weft.inputs import ranks_on_cpu
    from weft.job import has_trainer
    from weft.launch.environment import check_options, started_rank
    from weft.launch.rendezvous import parse_rendezvous
    from weft.plan import check_plan
    from weft.posttraining.inputs import check_inputs as check_trainer_inputs
    from weft.training.inputs import check_inputs
    from weft.training.run_folder import check_writable

    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    if started := started_rank(os.environ, nnodes):
        check = partial(check_options, started, nproc_per_node, max_restarts, rdzv_endpoint)
        if has_trainer(recipe):
            _train_trainer_as_rank(
                started, check, partial(_load_trainer, recipe, set_, out), resume, accept_changes, interface
            )
        _train_as_rank(started, check, partial(load_job, recipe, set_, out), resume, accept_changes, interface)
    if has_trainer(recipe):
        trainer_job = _load_trainer(recipe, set_, out)
        if node_rank == 0:
            check_trainer_inputs(trainer_job, resume)
        if trainer_job.plan and nnodes == 1 and (ranks := nproc_per_node or ranks_on_cpu()):
            check_plan(trainer_job.plan, ranks)
        rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)
        _train_with_trainer(trainer_job, nproc_per_node, resume, accept_changes, max_restarts, rendezvous)
        return
    chosen = load_job(recipe, set_, out)
    check_writable(chosen, new=resume is None, alone=nnodes == 1)
    if node_rank == 0:
        check_inputs(chosen, resume)
    if nnodes == 1 and (ranks := nproc_per_node or ranks_on_cpu()):
        check_plan(chosen.plan, ranks)
    rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)

    import transformers  # after the checks above, because importing torch and Transformers takes seconds

    from weft.errors import Stopped
    from weft.training.run import train as train_job

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    try:
        train_job(
            chosen,
            ranks=nproc_per_node,
            resume=resume,
            accept_changes=accept_changes,
            max_restarts=max_restarts,
            rendezvous=rendezvous,
        )
    except Stopped:
        if node_rank == 0:
            end_run(chosen, sys.argv)
        raise
    if node_rank == 0:
        end_run(chosen, sys.argv)


def load_job(recipe: Path, settings: list[str], out: Path | None) -> "Job":
    """Read a job with the settings and the run folder of the command line.

    Raises:
        JobError: the job is invalid.
    """
    from weft.job import Job

    job = Job.load(recipe, settings)
    return job.model_copy(update={"out": str(out)}) if out else job


def _load_trainer(recipe: Path, settings: list[str], out: Path | None) -> "TrainerJob":
    from weft.posttraining.job import TrainerJob

    return TrainerJob.load(recipe, [*settings, *([f"out={json.dumps(str(out))}"] if out else [])])


def _join(started: "StartedRank", interface: str | None) -> "NodeMember":
    """Complete the environment of a rank, and connect it to the watchdog of its host, which starts before torch is imported."""
    from weft.launch.environment import missing_environment
    from weft.launch.node_member import join_node

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(missing_environment(started, os.environ, interface))
    return join_node(started)


def _train_as_rank(
    started: "StartedRank",
    check: Callable[[], None],
    load: "Callable[[], Job]",
    resume: str | None,
    accept_changes: bool,
    interface: str | None,
) -> NoReturn:
    """Train as a rank that another launcher has started; ends the process."""
    member = _join(started, interface)

    from weft.launch.rank_entry import started_rank_main
    from weft.training.inside import train_started

    def checked() -> "Job":
        check()
        return load()

    def main() -> None:
        refusal = train_started(
            checked,
            started,
            member,
            resume=resume,
            accept_changes=accept_changes,
            end=partial(end_run, command=["weft", *sys.argv[1:]]),
        )
        if refusal:
            raise refusal

    started_rank_main(main, started, member)


def _train_trainer_as_rank(
    started: "StartedRank",
    check: Callable[[], None],
    load: "Callable[[], TrainerJob]",
    resume: str | None,
    accept_changes: bool,
    interface: str | None,
) -> NoReturn:
    """Train with a trainer of TRL as a rank that another launcher has started; ends the process."""
    member = _join(started, interface)

    from weft.launch.rank_entry import started_rank_main
    from weft.posttraining.run import train_trainer_started

    def checked() -> "TrainerJob":
        check()
        _check_accept_changes(accept_changes)
        return load()

    def main() -> None:
        if refusal := train_trainer_started(checked, started, member, resume=resume):
            raise refusal

    started_rank_main(main, started, member)


def _train_with_trainer(
    job: "TrainerJob",
    ranks: int | None,
    resume: str | None,
    accept_changes: bool,
    max_restarts: int,
    rendezvous: "RendezvousConfig | None",
) -> None:
    """Train a job with a trainer of TRL."""
    from weft.posttraining.run import train_with_trainer

    _check_accept_changes(accept_changes)
    train_with_trainer(job, ranks=ranks, resume=resume, max_restarts=max_restarts, rendezvous=rendezvous)


def _check_accept_changes(accept_changes: bool) -> None:
    from weft.errors import JobError

    if accept_changes:
        raise JobError(
            "--accept-changes for a job with a trainer",
            where="weft train",
            rule="a trainer of TRL keeps its rows and its optimizer; other changed options are printed, and take effect",
            fix="leave --accept-changes out",
        )


def end_run(job: "Job", command: list[str]) -> None:
    """Write profile and report of a run, and print its end.

    Args:
        job: job of the run.
        command: command line, for the command that resumes the run.
    """
    from weft.errors import WeftError
    from weft.observe.summary import print_end

    try_profile(job)
    report = try_report(Path(job.out))
    try:
        print_end(job, report, command)
    except (
        OSError,
        WeftError,
    ) as error:  # of metrics or a checkpoint that cannot be read now: the run has ended in order
        print(f"the summary cannot be printed: {error}", flush=True)


def try_profile(job: "Job") -> None:
    """Write trace and page of the profile of a run, if it has one; a failure does not fail the run."""
    from weft.errors import WeftError
    from weft.observe.profile.profile import PAGE, write_profile
    from weft.training.profiler import FOLDER

    folder = Path(job.out) / FOLDER
    if not job.train.profile_steps or not folder.is_dir():
        return
    try:
        write_profile(folder)
        print(f"profile           {folder / PAGE}", flush=True)
    except (OSError, WeftError) as error:
        print(f"the profile cannot be written: {error}\nwrite it later with `weft profile {job.out}`", flush=True)


def try_report(out: Path) -> Path | None:
    """Write the report; None if writing fails, which does not fail the run."""
    from weft.errors import WeftError
    from weft.observe.report import write_report

    try:
        return write_report(out)
    except (OSError, WeftError) as error:
        print(f"the report cannot be written: {error}\nwrite it later with `weft report {out}`", flush=True)
        return None
