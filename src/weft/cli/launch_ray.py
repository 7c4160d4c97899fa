"""weft launch ray"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import AcceptChanges, OutOption, ResumeOption, SetOption
from weft.cli.train import end_run, with_out

NOISE = "Reporting training result|State API may be temporarily unavailable"
"""Lines of Ray about every report, and every second about the dashboard that a cluster of this machine lacks."""


def ray(
    job: Annotated[Path, typer.Argument(help="Job as TOML.")],
    num_workers: Annotated[int, typer.Option(min=1, help="Number of workers; each is a rank.")],
    use_gpu: Annotated[bool, typer.Option("--use-gpu", help="One GPU per worker.")] = False,
    resources_per_worker: Annotated[
        list[str], typer.Option(help="Resource of each worker by Ray's name, NAME=AMOUNT such as CPU=4; repeatable.")
    ] = [],  # noqa: B006
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster; auto: the one of this machine. Default: RAY_ADDRESS, else a cluster of this job."
        ),
    ] = None,
    max_failures: Annotated[int, typer.Option(min=-1, help="Maximum restarts of all ranks; -1: unlimited.")] = 0,
    set_: SetOption = [],  # noqa: B006
    resume: ResumeOption = None,
    accept_changes: AcceptChanges = False,
    out: OutOption = None,
) -> None:
    """Train a job in workers of Ray Train, on a cluster of Ray or on this machine."""
    from weft.errors import JobError
    from weft.job import Job
    from weft.own_code import import_extra
    from weft.plan import check_plan
    from weft.training.inputs import check_inputs

    chosen = Job.load(job, with_out(set_, out))
    check_plan(chosen.plan, num_workers)
    if not (address or "").startswith("ray://"):  # else the files are on the hosts of the cluster
        check_inputs(chosen, resume)
    resources = {}
    for text in resources_per_worker:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            raise JobError(
                f"--resources-per-worker {text}",
                where="weft launch ray",
                rule="NAME=AMOUNT, with a name of Ray's resources and a number",
                fix="--resources-per-worker CPU=4 --resources-per-worker memory=8e9",
            ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", NOISE)  # read when Ray is imported
    import_extra("ray.train", "ray", "weft launch ray", "Ray Train starts the workers")
    from weft.integrations.ray import connected, train

    with connected(address, cpus=num_workers * resources.get("CPU", 1)):
        train(
            chosen,
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker=resources,
            max_failures=max_failures,
            resume=resume,
            accept_changes=accept_changes,
        )
    end_run(chosen, sys.argv)
