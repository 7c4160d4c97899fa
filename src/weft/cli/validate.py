"""weft validate"""

from pathlib import Path
from typing import Annotated

import typer


def validate(
    file: Annotated[Path, typer.Argument(help="Published runs as CSV, one metric a line.")],
) -> None:
    """Predict runs that others have measured, and show how far off the planner is, source by source."""
    from weft.planner.published import read_runs
    from weft.planner.validate import print_scores

    print_scores(*read_runs(file))
