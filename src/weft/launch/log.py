"""Lines and errors for the user, on stderr. Imports no torch."""

import sys

from weft.errors import WeftError


def log(line: str) -> None:
    """Print a line, replacing the current line of a terminal, which may contain a progress bar."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}weft: {line}", file=sys.stderr, flush=True)


def print_error(error: WeftError) -> None:
    """Print an error of Weft, as all commands do."""
    from rich.console import Console

    Console(stderr=True).print(f"[bold red]error:[/bold red] {type(error).__name__}", highlight=False)
    print(error, file=sys.stderr, flush=True)
