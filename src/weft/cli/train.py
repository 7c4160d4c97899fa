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
    import transformers

    from weft.cluster.launch import Stopped
    from weft.job import Job
    from weft.observe.report import write_report
    from weft.observe.summary import print_summary
    from weft.train.run import train as train_job

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    assignments = [*set_, *([f'out="{out}"'] if out else [])]
    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    chosen = Job.load(recipe, assignments)
    try:
        run = train_job(chosen, ranks=ranks)
    except Stopped:
        write_report(Path(chosen.out))
        raise
    print_summary(run, write_report(run))
