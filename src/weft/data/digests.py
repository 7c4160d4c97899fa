"""Digests of the contents of source files, made once: a file that has not changed since is not read again."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weft.data.corpus import unreadable
from weft.data.sealed import read_sealed, write_sealed
from weft.plan import Table

CHUNK = 2**24
FOLDER = "sources"  # of the cache
SETTLED_NS = 2 * 10**9  # a file system may not tell apart two changes that are closer than that


class _Record(Table):
    """What is remembered of the files of a source: state, digest and measure of each."""

    files: list[tuple[list[int], str, int | None]]


@dataclass(frozen=True)
class Contents:
    """What is known of the contents of a file."""

    digest: str
    """BLAKE3."""
    measure: int | None
    """What the caller counts in it; None if nothing."""


def digest_files(files: Sequence[Path], cache: Path, measure: Callable[[Path], int] | None = None) -> list[Contents]:
    """The digest of each file: of its bytes, or remembered since it was read.

    A file is taken for unchanged while its device, inode, size, and times of change (mtime and ctime, in nanoseconds) are
    the same. Programs may set mtime back, but not ctime. The record is kept in a folder of the cache; without a place for it,
    or with a damaged one, files are read again.

    Args:
        files: of one source.
        cache: data.cache.
        measure: counts something in a file that is worth remembering too.

    Raises:
        DataError: a file cannot be read.
    """
    name = blake3("\0".join(str(path.absolute()) for path in files).encode("utf-8", "surrogateescape")).hexdigest()
    record = cache / FOLDER / f"{name[:24]}.json"
    known = _read_record(record)
    found, kept = [], {}
    for path in files:
        try:
            before = _state(path)
            contents = known.get(before)
            if contents is None or (measure is None) != (contents.measure is None):
                contents = Contents(_digest(path), measure(path) if measure else None)
            if before == _state(path) and max(before[3:]) < time.time_ns() - SETTLED_NS:
                kept[before] = contents
        except OSError as error:
            raise unreadable(path, error) from None
        found.append(contents)
    if kept != known:
        _write_record(record, kept)
    return found


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(path: Path) -> str:
    digest, buffer = blake3(max_threads=blake3.AUTO), bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def _read_record(path: Path) -> dict[tuple[int, ...], Contents]:
    try:
        files = _Record.model_validate(read_sealed(path)).files
    except (OSError, ValueError):
        return {}
    return {tuple(state): Contents(digest, measure) for state, digest, measure in files}


def _write_record(path: Path, files: dict[tuple[int, ...], Contents]) -> None:
    table = {"files": [[state, contents.digest, contents.measure] for state, contents in files.items()]}
    with suppress(OSError):  # a cache that cannot be written costs time alone
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(descriptor)
        try:
            write_sealed(Path(scratch), table)
            os.replace(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)
