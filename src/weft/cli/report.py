"""weft report"""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Write report.html of a run again from its files."""
    from weft.observe.report import write_report

    print(write_report(run))
