"""weft clean"""

from pathlib import Path
from typing import Annotated

import typer


def clean(
    run: Annotated[Path, typer.Argument(help="Run folder, such as runs/first; it is kept.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")] = False,
) -> None:
    """List and remove earlier runs that were moved aside.

    Earlier runs are named RUN.1, RUN.2 and so on, and are removed after confirmation.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from weft.errors import printable
    from weft.training.aside_runs import list_aside, remove_aside

    found = list_aside(run)
    if not found:
        print(printable(f"There are no earlier runs of {run} that were moved aside."))
        return
    table = Table("folder", Column("MiB", justify="right"), "last written", "")
    for folder in found:
        note = f"kept: {folder.refusal}" if folder.refusal else ""
        size = "" if folder.refusal else f"{folder.bytes / 2**20:.1f}"
        table.add_row(escape(printable(folder.path)), size, f"{folder.modified:%Y-%m-%d %H:%M}", escape(note))
    Console(highlight=False).print(table)
    runs = [folder for folder in found if not folder.refusal]
    total = f"{len(runs)} run{'s' * (len(runs) != 1)}, {sum(folder.bytes for folder in runs) / 2**20:.1f} MiB"
    if not runs or not (yes or typer.confirm(f"Remove {total}?")):
        print("Nothing was removed.")
        return
    for folder in runs:
        remove_aside(folder)
    print(f"Removed {total}.")
