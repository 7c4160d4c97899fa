"""Secret key that signs the checkpoints of a run, so that checkpoints written by anyone else are refused.

A plain digest detects damage but does not prove who wrote a file: anyone with write access to the folder can create a
checkpoint with correct digests. With a key, the manifest is signed with BLAKE3 in keyed mode, and the manifest contains the
digests of all files.
"""

import os
import re
import stat
from pathlib import Path

from weft.errors import CheckpointError

KEY = re.compile("[0-9a-fA-F]{64}")
MAX_BYTES = 4096


def read_key(path: str) -> bytes | None:
    """Read the key, 64 hexadecimal digits, from a file that only its owner can access; None if the path is empty.

    Raises:
        CheckpointError: the file cannot be read, other users can access it, or it does not hold a key. The message never
            shows the content of the file.
    """
    if not path:
        return None
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            text = file.read(MAX_BYTES).decode("ascii", "replace").strip() if stat.S_ISREG(status.st_mode) else ""
    except OSError as error:
        raise CheckpointError(
            f"the key file cannot be read: {error.strerror}",
            where=path,
            rule="checkpoint.key_file exists on every host",
            fix="create a key with `openssl rand -hex 32`, and chmod 600 its file",
        ) from None
    if status.st_mode & 0o077:
        raise CheckpointError(
            f"the key file has mode {stat.S_IMODE(status.st_mode):03o}: other users can read or change it",
            where=path,
            rule="only the owner can access the key file",
            fix=f"chmod 600 {path}, and create a new key if other users have access to this host",
        )
    if not KEY.fullmatch(text):
        raise CheckpointError(
            "the key file holds no key",
            where=path,
            rule="a key is 64 hexadecimal digits",
            fix="create a key with `openssl rand -hex 32`",
        )
    return bytes.fromhex(text)
