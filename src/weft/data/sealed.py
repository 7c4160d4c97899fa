"""JSON files of the token cache with an embedded digest that detects damage."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from blake3 import blake3

MAX_BYTES = 2**26  # an entry takes about a hundred bytes per source file or shard


def write_sealed(path: Path, table: dict[str, Any]) -> None:
    """Write a table with its BLAKE3 digest. The digest detects damage and edits; it does not prove who wrote the file."""
    path.write_text(json.dumps({**table, "blake3": _digest(table)}, indent=1), encoding="utf-8")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a table written by `write_sealed`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, too large, not a JSON object, or does not match its digest.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a fifo must not block
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, at most {MAX_BYTES} are allowed")
        raw = file.read(MAX_BYTES)
    try:
        table = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it is not a JSON object")
    if table.pop("blake3", None) != _digest(table):
        raise ValueError("its contents do not match its digest")
    return table


def _digest(table: dict[str, Any]) -> str:
    return blake3(json.dumps(table, sort_keys=True).encode()).hexdigest()
