"""weft train"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from weft.cli.options import (
    AcceptChanges,
    Endpoint,
    HostIndex,
    HostRange,
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
    from weft.posttraining.job import TrainerJob


def train(
    job: Annotated[Optional[Path], typer.Argument(help="Job as TOML; default: the built-in first run.")] = None,  # noqa: UP045
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    resume: ResumeOption = None,
    accept_changes: AcceptChanges = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum consecutive restarts without progress.")] = 0,
    out: OutOption = None,
    nnodes: HostRange = "1",
    node_rank: HostIndex = 0,
    rdzv_endpoint: Endpoint = None,
    token_file: TokenFile = None,
    interface: Interface = None,
) -> None:
    """Train a model; write metrics, report and export."""
    from weft.launch.rendezvous import parse_hosts, parse_rendezvous

    min_hosts, hosts = parse_hosts(nnodes)
    if hosts > 1:  # torch prints a stack trace for each lost connection of its store; the watchdog names lost hosts
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would slow down all other processes
    # For numpy: ranks are forked from this process, which must have no second thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from weft.errors import JobError, Stopped
    from weft.job import read_toml
    from weft.launch.environment import check_options, started_rank
    from weft.posttraining.job import TrainerJob

    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    started, unread = started_rank(os.environ, hosts), None
    try:
        tables = read_toml(recipe)
    except JobError as error:
        if not started:
            raise
        tables, unread = {}, error  # rank 0 refuses it for all ranks
    parse = partial(_parse, tables, recipe, set_, out, accept_changes)
    if started:

        def load() -> "Job | TrainerJob":
            check_options(started, nproc_per_node, max_restarts, rdzv_endpoint)
            if unread:
                raise unread
            return parse()

        _train_inside(started, interface, load, "trainer" in tables, resume, accept_changes)
    chosen = parse()
    _check_inputs(chosen, resume, hosts, node_rank, nproc_per_node)
    rendezvous = parse_rendezvous(node_rank, hosts, rdzv_endpoint, token_file, interface, min_hosts)
    launch: dict[str, Any] = {"ranks": nproc_per_node, "resume": resume, "max_restarts": max_restarts}
    launch["rendezvous"] = rendezvous
    if isinstance(chosen, TrainerJob):
        from weft.posttraining.run import TrainerWork
        from weft.training.work import launch_work

        launch_work(TrainerWork(chosen), **launch)
        return

    import transformers

    from weft.planner.train import train as train_job

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        train_job(chosen, accept_changes=accept_changes, **launch)
    except Stopped:
        if node_rank == 0:
            end_run(chosen, sys.argv)
        raise
    if node_rank == 0:
        end_run(chosen, sys.argv)


def with_out(settings: list[str], out: Path | None) -> list[str]:
    """Settings of the command line, with that of the run folder."""
    return [*settings, *([f"out={json.dumps(str(out), ensure_ascii=False)}"] if out else [])]


def _parse(
    tables: dict[str, Any], recipe: Path, settings: list[str], out: Path | None, accept_changes: bool
) -> "Job | TrainerJob":
    """Create a job from the tables of its file, and the settings and the run folder of the command line.

    Raises:
        JobError: the job is invalid.
    """
    from weft.errors import JobError
    from weft.job import Job
    from weft.posttraining.job import TrainerJob

    if "trainer" not in tables:
        return Job.parse(tables, with_out(settings, out), where=str(recipe))
    if accept_changes:
        raise JobError(
            "--accept-changes for a job with a trainer",
            where="weft train",
            rule="a trainer of TRL keeps its rows and its optimizer; other changed options are printed, and take effect",
            fix="leave --accept-changes out",
        )
    return TrainerJob.parse(tables, with_out(settings, out), where=str(recipe))


def _check_inputs(
    job: "Job | TrainerJob", resume: str | None, hosts: int, host: int, ranks_per_host: int | None
) -> None:
    """Refuse a job before torch and Transformers are imported, which takes seconds."""
    from weft.inputs import ranks_on_cpu
    from weft.job import Job
    from weft.plan import check_plan
    from weft.posttraining.inputs import check_inputs as check_trainer_inputs
    from weft.training.inputs import check_inputs
    from weft.training.run_folder import check_writable

    if isinstance(job, Job):
        check_writable(job, new=resume is None, alone=hosts == 1)
        if host == 0:
            check_inputs(job, resume)
    elif host == 0:
        check_trainer_inputs(job, resume)
    if job.plan and hosts == 1 and (ranks := ranks_per_host or ranks_on_cpu()):
        check_plan(job.plan, ranks)


def _train_inside(
    started: "StartedRank",
    interface: str | None,
    load: Callable[[], Any],
    has_trainer: bool,
    resume: str | None,
    accept_changes: bool,
) -> NoReturn:
    """Train as a rank that another launcher has started; ends the process. Rank 0 alone loads the job."""
    from weft.launch.environment import missing_environment
    from weft.launch.node_member import join_node

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(missing_environment(started, os.environ, interface))
    member = join_node(started)  # the watchdog starts before torch is imported, which takes seconds

    from weft.launch.rank_entry import started_rank_main
    from weft.training.inside import inside
    from weft.training.work import Work

    work_of: Callable[[Any], Work]
    if has_trainer:
        from weft.posttraining.rank import train_rank
        from weft.posttraining.run import TrainerWork

        work_of = TrainerWork
    else:
        from weft.planner.zero_stage import choose_zero
        from weft.training.rank import train_rank
        from weft.training.run import TrainWork

        end = partial(end_run, command=["weft", *sys.argv[1:]])
        work_of = partial(TrainWork, accept_changes=accept_changes, end=end, choose_zero=choose_zero)

    def main() -> None:
        if refusal := inside(lambda: work_of(load()), train_rank, started, member, resume=resume):
            raise refusal

    started_rank_main(main, started, member)


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
