"""The secret that a run's checkpoints are signed with, so that one which somebody else has put there does not load.

A digest shows that a file is as it was written, not who wrote it: whoever can write into the folder can make a checkpoint whose
digests are right. With a key the manifest's own digest is BLAKE3's keyed mode, and it holds the digests of all files.
"""

import os
import re
import stat
from pathlib import Path

from weft.errors import CheckpointError

KEY = re.compile("[0-9a-fA-F]{64}")
MOST_BYTES = 4096


def read_key(path: str) -> bytes | None:
    """The key in a file that only its owner may read: 64 hexadecimal digits. None where the path is empty.

    Raises:
        CheckpointError: it cannot be read, others may read it, or it holds something else. The message never shows it.
    """
    if not path:
        return None
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            text = file.read(MOST_BYTES).decode("ascii", "replace").strip() if stat.S_ISREG(status.st_mode) else ""
    except OSError as error:
        raise CheckpointError(
            f"the key file cannot be read: {error.strerror}",
            where=path,
            rule="checkpoint.key_file is there on every host",
            fix="make one with `openssl rand -hex 32`, and chmod 600",
        ) from None
    if status.st_mode & 0o077:
        raise CheckpointError(
            f"the key file has mode {stat.S_IMODE(status.st_mode):03o}: others may read or change it",
            where=path,
            rule="only the owner may read a key",
            fix=f"chmod 600 {path}, and make a new key if others use this host",
        )
    if not KEY.fullmatch(text):
        raise CheckpointError(
            "the key file holds no key",
            where=path,
            rule="64 hexadecimal digits",
            fix="make one with `openssl rand -hex 32`",
        )
    return bytes.fromhex(text)
