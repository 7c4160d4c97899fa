"""Score the planner on published runs: `python -m benchmarks.published runs.csv [--out page.html]`."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import run_app
from weft.cli.outputs import check_outputs

from .published import read_runs
from .scatter import write_scatter
from .validate import judge, print_scores

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="CSV file of published runs, one metric per line.")],
    out: Annotated[Path | None, typer.Option(help="HTML page with a scatter chart, predicted over measured.")] = None,
) -> None:
    """Compare the planner's predictions with published runs, by source."""
    check_outputs(out=out)
    runs, refused = read_runs(file)
    print_scores(runs, refused)
    if out:
        write_scatter(judge(runs)[0], out)
        print(out)


def main() -> None:
    """Run the command and print Weft's errors without a traceback."""
    run_app(app)


if __name__ == "__main__":
    main()
