"""Check of output files before a command starts its work."""

import os
import tempfile
from pathlib import Path

from weft.errors import JobError


def check_outputs(**options: Path | None) -> None:
    """Refuse output files that cannot be written.

    Args:
        options: output file by option name; None for an option that is not set.

    Raises:
        JobError: the file is a folder, or its folder does not exist or cannot be written.
    """
    for option, path in options.items():
        if path is None:
            continue
        problem = f"{path} is a folder" if path.is_dir() else ""
        if not path.parent.is_dir():
            problem = f"there is no folder {path.parent}"
        elif not problem and path.exists():
            problem = "" if os.access(path, os.W_OK) else f"{path} cannot be written"
        elif not problem:
            try:
                with tempfile.TemporaryFile(dir=path.parent):
                    pass
            except OSError as error:
                problem = f"{path.parent} cannot be written: {error.strerror}"
        if problem:
            raise JobError(
                problem,
                where=f"--{option} {path}",
                rule=f"--{option} is a file in an existing folder",
                fix="create the folder, or name another file",
            )
