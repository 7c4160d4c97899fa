"""Tables of the token cache as JSON files with a digest of themselves. Whatever else is in such a file is a ValueError."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from blake3 import blake3

MOST_BYTES = 2**26  # read of one file: a hundred bytes a source file or shard


def write_sealed(path: Path, table: dict[str, Any]) -> None:
    """Write a table and the BLAKE3 digest of it. It shows damage and edits; it does not prove who wrote it."""
    path.write_text(json.dumps({**table, "blake3": _digest(table)}, indent=1), encoding="utf-8")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, too large, no table, or not what was written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo without a writer would wait
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, {MOST_BYTES} are the most")
        raw = file.read(MOST_BYTES)
    try:
        table = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it is not a table")
    if table.pop("blake3", None) != _digest(table):
        raise ValueError("its contents do not match its digest")
    return table


def _digest(table: dict[str, Any]) -> str:
    return blake3(json.dumps(table, sort_keys=True).encode()).hexdigest()
