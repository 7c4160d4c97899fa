"""weft run"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from weft.cli.options import HUB_OFFLINE, Endpoint, HostIndex, Hosts, Interface, Ranks, TokenFile

if TYPE_CHECKING:
    from weft.launch.environment import StartedRank
    from weft.plan import Plan

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
    from weft.inputs import ranks_on_cpu
    from weft.job import read_plan
    from weft.launch.environment import check_options, started_rank
    from weft.launch.rendezvous import parse_rendezvous
    from weft.plan import check_plan

    if not script.is_file():
        raise JobError(
            f"there is no script {script}",
            where="weft run",
            rule="the first argument is a Python file; options of weft run come before it",
            fix="weft run --plan plan.toml train.py [arguments of train.py]",
        )
    chosen = None if plan == "auto" else read_plan(plan)
    if started := started_rank(os.environ, nnodes):
        os.environ[HUB_OFFLINE] = context.obj[HUB_OFFLINE]
        check = partial(check_options, started, nproc_per_node, max_restarts, rdzv_endpoint)
        _run_as_rank(started, check, chosen, script, context.args, log_dir, hang_timeout, interface)
    if chosen and nnodes == 1 and (ranks := nproc_per_node or ranks_on_cpu()):
        check_plan(chosen, ranks)
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


def _run_as_rank(
    started: "StartedRank",
    check: Callable[[], None],
    plan: "Plan | None",
    script: Path,
    arguments: Sequence[str],
    log_dir: Path,
    hang_timeout: float,
    interface: str | None,
) -> NoReturn:
    """Run the script as a rank that another launcher has started; ends the process."""
    from weft.launch.environment import missing_environment
    from weft.launch.node_member import join_node

    os.environ.update(missing_environment(started, os.environ, interface))
    member = join_node(started)  # the watchdog starts before torch is imported, which takes seconds

    from weft.integrations.auto_plan import AutoPlan
    from weft.integrations.rank import run_rank
    from weft.launch.rank_entry import started_rank_main
    from weft.launch.watchdog import Timeouts
    from weft.plan import check_plan

    def main() -> None:
        check()
        if plan:
            check_plan(plan, started.world_size)
        member.configure(log_dir, Timeouts(other=hang_timeout, hang=hang_timeout))
        run_rank(plan or AutoPlan(log_dir.absolute()), script, arguments)

    started_rank_main(main, started, member)
