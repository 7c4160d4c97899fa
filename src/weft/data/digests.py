"""Cached digests of source files: an unchanged file is not read again."""

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
FOLDER = "sources"  # folder of the records in the cache
SETTLED_NS = 2 * 10**9  # two changes within this time may get the same timestamp


class _Record(Table):
    """Cached state, digest and measure of each file of a source."""

    files: list[tuple[list[int], str, int | None]]


@dataclass(frozen=True)
class FileDigest:
    """Digest of a file, and a value computed from its content."""

    digest: str
    """BLAKE3 digest."""
    measure: int | None
    """Result of the caller's `measure` function; None without one."""


def digest_files(files: Sequence[Path], cache: Path, measure: Callable[[Path], int] | None = None) -> list[FileDigest]:
    """Digest of each file, computed from its bytes or taken from the cache.

    A file counts as unchanged if its device, inode, size, mtime and ctime (in nanoseconds) are the same. A program can set
    mtime back, but not ctime. The record is stored in the cache; if it is damaged or cannot be written, files are read again.

    Args:
        files: files of one source.
        cache: data.cache.
        measure: function of a file whose result is cached with the digest.

    Raises:
        DataError: a file cannot be read.
    """
    name = blake3("\0".join(str(path.absolute()) for path in files).encode("utf-8", "surrogateescape")).hexdigest()
    record = cache / FOLDER / f"{name[:24]}.json"
    known = _read_record(record)
    digests, kept = [], {}
    for path in files:
        try:
            before = _state(path)
            contents = known.get(before)
            if contents is None or (measure is None) != (contents.measure is None):
                contents = FileDigest(digest_file(path), measure(path) if measure else None)
            if before == _state(path) and max(before[3:]) < time.time_ns() - SETTLED_NS:
                kept[before] = contents
        except OSError as error:
            raise unreadable(path, error) from None
        digests.append(contents)
    if kept != known:
        _write_record(record, kept)
    return digests


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest_file(path: Path) -> str:
    digest, buffer = blake3(max_threads=blake3.AUTO), bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def _read_record(path: Path) -> dict[tuple[int, ...], FileDigest]:
    try:
        files = _Record.model_validate(read_sealed(path)).files
    except (OSError, ValueError):
        return {}
    return {tuple(state): FileDigest(digest, measure) for state, digest, measure in files}


def _write_record(path: Path, files: dict[tuple[int, ...], FileDigest]) -> None:
    table = {"files": [[state, contents.digest, contents.measure] for state, contents in files.items()]}
    with suppress(OSError):  # without a record, files are only read again
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(descriptor)
        try:
            write_sealed(Path(scratch), table)
            os.replace(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)
