"""The weft command line: one small file per command, without logic."""

import sys

import typer

from weft.cli.app import app
from weft.errors import RankFailure, Stopped, WeftError
from weft.launch.log import print_error
from weft.launch.output import keep_output


def main() -> None:
    """Entry point of the weft command."""
    keep_output()
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command; print an error of Weft once and exit with its code. A signal is not an error."""
    try:
        app()
    except Stopped as stopped:
        print(f"weft: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except WeftError as error:
        if not (isinstance(error, RankFailure) and error.is_told):
            print_error(error)
        sys.exit(error.exit_code)
