"""weft validate"""

from pathlib import Path
from typing import Annotated

import typer


def validate(
    file: Annotated[Path, typer.Argument(help="Published runs as CSV, one metric a line.")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write, with every prediction against what was measured.")
    ] = None,
) -> None:
    """Compare the planner's predictions with published runs.

    Show how far off they are, source by source.
    """
    from weft.cli.outputs import check_outputs

    check_outputs(out=out)

    from weft.planner.published import read_runs
    from weft.planner.validate import judge, print_scores

    runs, refused = read_runs(file)
    print_scores(runs, refused)
    if out:
        from weft.observe.scatter import write_scatter

        write_scatter(judge(runs)[0], out)
        print(out)
