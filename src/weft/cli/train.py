"""weft train"""

import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Optional

import typer


def train(
    job: Annotated[Optional[Path], typer.Argument(help="Job as TOML; without it the first run is trained.")] = None,  # noqa: UP045
    set_: Annotated[list[str], typer.Option("--set", help="A dotted key of the job, key=value; may be repeated.")] = [],  # noqa: B006
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes; default one an accelerator, two on CPU.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from the newest good checkpoint; or its folder.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with another optimizer, schedule, configuration or other tokens."),
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of a failed job that get it no further.")] = 0,
    out: Annotated[Optional[Path], typer.Option(help="Output folder, instead of the job's.")] = None,  # noqa: UP045
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts of the job; each runs this command.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this host, from 0.")] = 0,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="ADDRESS:PORT of host 0, where several hosts meet.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Secret of the job; default the variable WEFT_TOKEN.")] = None,
    interface: Annotated[str | None, typer.Option(help="Of this host; default the one that leads to host 0.")] = None,
) -> None:
    """Train a model; write metrics, report and export."""
    if nnodes > 1:  # torch prints a stack for each lost connection of its store; the watchdog says who is lost
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait in a spin hold up whatever else runs here
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # numpy's; without a second thread nproc_per_node are forks of this process
    from weft.job import Job
    from weft.launch.rendezvous import parse_rendezvous
    from weft.train.run_folder import check_writable

    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    chosen = Job.load(recipe, set_)
    if out:
        chosen = chosen.model_copy(update={"out": str(out)})
    check_writable(chosen, new=resume is None, leads=node_rank == 0)
    if nproc_per_node and nnodes == 1:
        chosen.plan.resolve(nproc_per_node)
    rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)

    import transformers  # torch and Transformers take seconds: what is refused above is refused without them

    from weft.errors import Stopped
    from weft.observe.summary import print_end
    from weft.train.run import train as train_job

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
            print_end(chosen, _report(Path(chosen.out)), sys.argv)
        raise
    if node_rank == 0:
        print_end(chosen, _report(Path(chosen.out)), sys.argv)


def _report(out: Path) -> Path | None:
    """Write the report; None if that cannot be, which is no reason to call a run a failure."""
    from weft.errors import WeftError
    from weft.observe.report import write_report

    try:
        return write_report(out)
    except (OSError, WeftError) as error:
        print(f"the report cannot be written: {error}\n`weft report {out}` writes it later", flush=True)
        return None
