"""Files of a run folder: replaced in one rename, and written without following links. Imports no torch."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a new file, which then gets its name in one rename; what had this name, also a link, is replaced.

    Args:
        path: final name.
        content: bytes, or text for UTF-8.

    Raises:
        OSError: the file cannot be written; what had its name is unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(_open(draft, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def open_file(path: Path, flags: int) -> int:
    """Descriptor of a file for writing, created if missing; a link is not followed.

    Args:
        path: name of the file.
        flags: as for os.open.

    Raises:
        OSError: the file cannot be opened, is a link, or is not regular, so that a write could have other effects.
    """
    descriptor = _open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they are missing; the folder itself must not be a link.

    Raises:
        OSError: the folder cannot be created, or is a link.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    path.mkdir(parents=True, exist_ok=True)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
