"""weft report"""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Rewrite report.html of a run from its files."""
    from weft.observe.report import write_report

    print(write_report(run))
