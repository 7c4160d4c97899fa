"""Lines and errors for the user, on stderr. Imports no torch."""

import os
import sys
from pathlib import Path

from weft.errors import WeftError, printable
from weft.files import open_file


def log(line: str) -> None:
    """Print a line, replacing the current line of a terminal, which may contain a progress bar."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}weft: {printable(line)}", file=sys.stderr, flush=True)


def open_log(path: Path) -> int:
    """Descriptor of an empty file for the output of another process; the null device, with a line, if it cannot be written."""
    try:
        return open_file(path, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        log(f"{path} cannot be written: {error.strerror}; this output will be lost")
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def print_error(error: WeftError) -> None:
    """Print an error of Weft, as all commands do."""
    from rich.console import Console

    Console(stderr=True).print(f"[bold red]error:[/bold red] {type(error).__name__}", highlight=False)
    print(error, file=sys.stderr, flush=True)
