"""Files of a run folder: replaced in one rename, and written without following links. Imports no torch."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from weft.errors import UnreadableError

KEPT_CHARACTERS = 2**16
"""Characters that are read of a file with identities."""


def read_identities(path: Path, what: str, rule: str) -> str:
    """Text of a small file by which a run knows its folder; "" if it is missing or no text.

    Args:
        path: file of a run folder.
        what: what is not known without the file, for the message.
        rule: rule of the message.

    Raises:
        UnreadableError: the file cannot be read at the moment.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(KEPT_CHARACTERS)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        raise UnreadableError(
            f"{what}: {error.strerror}",
            where=str(path),
            rule=rule,
            fix="mount the disk, or mend its permissions, and run the same command again",
        ) from None


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
