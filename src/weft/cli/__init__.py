"""The weft command line: one small file per command, without logic."""

import sys

import typer

from weft.cli.app import app
from weft.errors import Stopped, WeftError


def main() -> None:
    """Entry point of the weft command."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command; print an error of Weft once and exit with its code. A signal is not an error."""
    try:
        app()
    except Stopped as stopped:
        print(f"weft: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except WeftError as error:
        from rich.console import Console

        Console(stderr=True).print(f"[bold red]error:[/bold red] {type(error).__name__}", highlight=False)
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
