"""weft run"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import HUB_OFFLINE, Endpoint, HostIndex, Hosts, Interface, Ranks, TokenFile

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script; all that follows are its own arguments.")],
    plan: Annotated[str, typer.Option(help="Plan as TOML; auto: the planner chooses, and writes LOG_DIR/plan.toml.")],
    nproc_per_node: Ranks = None,
    log_dir: Annotated[Path, typer.Option(help="Folder for the output of all ranks but rank 0.")] = Path("weft-logs"),
    hang_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a script without any progress is ended.")
    ] = 1800.0,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum consecutive restarts of the script.")] = 0,
    nnodes: Hosts = 1,
    node_rank: HostIndex = 0,
    rdzv_endpoint: Endpoint = None,
    token_file: TokenFile = None,
    interface: Interface = None,
) -> None:
    """Run a script of Trainer, TRL or accelerate under a plan."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would slow down all other processes
    from weft.errors import JobError
    from weft.job import read_plan
    from weft.launch.rendezvous import parse_rendezvous

    if not script.is_file():
        raise JobError(
            f"there is no script {script}",
            where="weft run",
            rule="the first argument is a Python file; options of weft run come before it",
            fix="weft run --plan plan.toml train.py [arguments of train.py]",
        )
    chosen = None if plan == "auto" else read_plan(plan)
    if chosen and nproc_per_node and nnodes == 1:
        chosen.resolve(nproc_per_node)
    rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)

    from weft.integrations.launch import run_on_ranks  # after the checks above, because it imports torch

    with tempfile.TemporaryDirectory(prefix="weft-run-") as folder:
        of_ranks = f"auto:{log_dir.absolute()}"
        if chosen:
            of_ranks = str(Path(folder, "plan.json"))
            Path(of_ranks).write_text(chosen.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-u", "-m", "weft.integrations.rank", of_ranks, str(script), *context.args]
        run_on_ranks(
            command,
            chosen,
            nproc_per_node,
            log_dir,
            environment={HUB_OFFLINE: context.obj[HUB_OFFLINE]},
            hang_timeout=hang_timeout,
            max_restarts=max_restarts,
            rendezvous=rendezvous,
        )
