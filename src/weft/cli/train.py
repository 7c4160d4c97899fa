"""weft train"""

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from weft.cli.options import Endpoint, HostIndex, Hosts, Interface, Ranks, SetOption, TokenFile

if TYPE_CHECKING:
    from weft.job import Job
    from weft.launch.rendezvous import RendezvousConfig
    from weft.posttraining.job import TrainerJob


def train(
    job: Annotated[Optional[Path], typer.Argument(help="Job as TOML; default: the built-in first run.")] = None,  # noqa: UP045
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    resume: Annotated[
        str | None, typer.Option(help="Checkpoint folder to resume from; auto: newest good checkpoint of the run.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume although optimizer, schedule, configuration or tokens changed."),
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum consecutive restarts without progress.")] = 0,
    out: Annotated[Optional[Path], typer.Option(help="Run folder, instead of out in the job.")] = None,  # noqa: UP045
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
    from weft.job import Job, has_trainer
    from weft.launch.rendezvous import parse_rendezvous
    from weft.posttraining.job import TrainerJob
    from weft.training.run_folder import check_writable

    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    if has_trainer(recipe):
        trainer_job = TrainerJob.load(recipe, [*set_, *([f"out={json.dumps(str(out))}"] if out else [])])
        rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)
        _train_with_trainer(trainer_job, nproc_per_node, resume, accept_changes, max_restarts, rendezvous)
        return
    chosen = Job.load(recipe, set_)
    if out:
        chosen = chosen.model_copy(update={"out": str(out)})
    check_writable(chosen, new=resume is None, leads=node_rank == 0)
    if nproc_per_node and nnodes == 1:
        chosen.plan.resolve(nproc_per_node)
    rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)

    import transformers  # after the checks above, because importing torch and Transformers takes seconds

    from weft.errors import Stopped
    from weft.observe.summary import print_end
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
            _profile(chosen)
            print_end(chosen, _report(Path(chosen.out)), sys.argv)
        raise
    if node_rank == 0:
        _profile(chosen)
        print_end(chosen, _report(Path(chosen.out)), sys.argv)


def _train_with_trainer(
    job: "TrainerJob",
    ranks: int | None,
    resume: str | None,
    accept_changes: bool,
    max_restarts: int,
    rendezvous: "RendezvousConfig | None",
) -> None:
    """Train a job with a trainer of TRL."""
    from weft.errors import JobError
    from weft.posttraining.run import train_with_trainer

    if accept_changes:
        raise JobError(
            "--accept-changes for a job with a trainer",
            where="weft train",
            rule="a trainer of TRL resumes with the options that the job has now, without a comparison",
            fix="leave --accept-changes out",
        )
    train_with_trainer(job, ranks=ranks, resume=resume, max_restarts=max_restarts, rendezvous=rendezvous)


def _profile(job: "Job") -> None:
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


def _report(out: Path) -> Path | None:
    """Write the report; None if writing fails, which does not fail the run."""
    from weft.errors import WeftError
    from weft.observe.report import write_report

    try:
        return write_report(out)
    except (OSError, WeftError) as error:
        print(f"the report cannot be written: {error}\nwrite it later with `weft report {out}`", flush=True)
        return None
