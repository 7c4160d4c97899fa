"""weft report"""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Rewrite report.html of a run from its files."""
    from weft.job import has_trainer
    from weft.training.run_folder import check_run

    check_run(run)
    if has_trainer(run / "job.toml"):
        from weft.posttraining.report import write_report as write_report_of_trainer

        print(write_report_of_trainer(run))
        return
    from weft.observe.report import write_report

    print(write_report(run))
