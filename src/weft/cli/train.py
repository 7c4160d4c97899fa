"""weft train"""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Optional

import typer


def train(
    job: Annotated[Optional[Path], typer.Argument(help="Job as TOML; without it the first run is trained.")] = None,  # noqa: UP045
    set_: Annotated[list[str], typer.Option("--set", help="A dotted key of the job, key=value; may be repeated.")] = [],  # noqa: B006
    ranks: Annotated[Optional[int], typer.Option(help="Processes; default one an accelerator, two on CPU.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="Output folder, instead of the job's.")] = None,  # noqa: UP045
) -> None:
    """Train a model, write metrics, a report and a Hugging Face folder."""
    from weft.job import Job
    from weft.observe.report import write_report
    from weft.observe.summary import print_summary
    from weft.train.run import train as train_job

    assignments = [*set_, *([f'out="{out}"'] if out else [])]
    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    run = train_job(Job.load(recipe, assignments), ranks=ranks)
    print_summary(run, write_report(run))
