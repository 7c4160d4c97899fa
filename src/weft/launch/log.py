"""Lines for the user about a running job, on stderr. Imports no torch."""

import sys


def log(line: str) -> None:
    """Print a line, replacing the current line of a terminal, which may contain a progress bar."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}weft: {line}", file=sys.stderr, flush=True)
