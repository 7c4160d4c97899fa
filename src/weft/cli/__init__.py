"""The weft command: one small file a command, no logic."""

import sys

from rich.console import Console

from weft.cli.app import app
from weft.errors import WeftError


def main() -> None:
    """Run a command; an error of Weft is printed once, and decides the exit code."""
    try:
        app()
    except WeftError as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {type(error).__name__}", highlight=False)
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
