"""The token cache: folders named by content, each written beside its place, sealed by a manifest, and renamed."""

import errno
import hashlib
import os
import re
import secrets
import shutil
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, StringConstraints, ValidationError

from weft.data.sealed import read_sealed, write_sealed
from weft.data.shards import Span, open_array
from weft.errors import DataError
from weft.lock import WITHOUT_LOCKS, Lock, take_lock
from weft.plan import Table

SHARD_TOKENS = 64 * 2**20
MANIFEST = "manifest.json"
BOUNDARY_REACH = 0.25  # share of the smaller split by which a cut may move to fall between documents

SCRATCH = re.compile(r"(\.(?:tokens|tokenizer)-[0-9a-f]{24}-[0-9a-f]{16})\.lock")  # the lock of a scratch folder

Size = Annotated[int, Field(ge=0)]


class StoredFile(Table):
    """A file of a store."""

    bytes: Size
    digest: str
    """BLAKE2b."""


class Manifest(Table):
    """What a store says about itself."""

    format: Literal[2] = 2
    vocab_size: Annotated[int, Field(ge=1)]
    """Entries of the tokenizer."""
    end_of_text: Size
    """Id that ends each document."""
    tokens: Size
    documents: Size
    files: dict[Annotated[str, StringConstraints(pattern=r"^(tokens|starts)-\d{5,}\.npy$")], StoredFile]
    """By their names."""


@contextmanager
def building(folder: Path, *, estimate: int) -> Iterator[Path]:
    """A scratch folder that becomes `folder` when the block ends well and vanishes otherwise.

    Of two launchers that build the same folder at once, the first rename wins; the bytes are the same. A lock beside the
    scratch folder is held while the block runs: what a killed launcher left is told by it, see `remove_leftovers`.

    Args:
        folder: where the contents will be.
        estimate: bytes that are probably needed; refused before any work if the disk has less.

    Raises:
        DataError: the disk is too small or gets full, or the folder cannot be written.
    """
    scratch, lock, free = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}"), None, 0
    lock_file = folder.with_name(f"{scratch.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < estimate:
            raise _no_space(folder, f"about {estimate} bytes", free)
        lock = _lock_scratch(lock_file)
        scratch.mkdir(mode=0o700)
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = sum(path.stat().st_size for path in scratch.iterdir()) if scratch.is_dir() else 0
            raise _no_space(folder, f"more than {max(written, estimate)} bytes", free) from None
        rule, fix = "tokens are kept below data.cache", "set data.cache to a folder that can be written"
        raise DataError(f"cannot make the token cache: {error}", where=str(folder), rule=rule, fix=fix) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if lock:
            lock_file.unlink(missing_ok=True)
            lock.release()


def remove_leftovers(cache: Path) -> list[Path]:
    """Remove the scratch folders of launchers that are gone; those of living ones are held by their locks.

    Args:
        cache: data.cache; it need not exist.

    Returns:
        What was removed. What cannot be removed stays, as on a file system without locks.
    """
    removed = []
    for lock_file in sorted(cache.glob(".*.lock")):
        name = SCRATCH.fullmatch(lock_file.name)
        try:
            lock = take_lock(lock_file) if name else None
        except OSError:  # of another user, or no locks
            continue
        if name and lock:
            scratch = cache / name[1]
            if scratch.is_dir() and not scratch.is_symlink():
                shutil.rmtree(scratch, ignore_errors=True)
                removed.append(scratch)
            if not os.path.lexists(scratch):
                lock_file.unlink(missing_ok=True)
            lock.release()
    return removed


def _lock_scratch(path: Path) -> Lock | None:
    """The lock of a scratch folder; None on a file system without locks."""
    try:
        return take_lock(path)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            path.unlink(missing_ok=True)
            return None
        raise


def write_store(
    folder: Path,
    parts: Iterable[tuple[list[int], int | None]],
    *,
    shuffle: bool,
    vocab_size: int,
    end_of_text: int,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write documents as one stream of tokens, cut into shards, each with an index of document starts.

    Args:
        folder: an existing, empty folder.
        parts: ids of each document in one or several parts; the last one carries the document's 64-bit digest.
        shuffle: order documents by digest, else as they come.
        vocab_size: entries of the tokenizer.
        end_of_text: id that ends each document.
        shard_tokens: tokens of a shard, at most.
    """
    staged = folder / "staged"
    lengths, digests, length = array("q"), array("Q"), 0
    with staged.open("wb") as file:
        for ids, digest in parts:
            file.write(np.asarray(ids, np.int32).data)
            length += len(ids)
            if digest is not None:
                lengths.append(length)
                digests.append(digest)
                length = 0
    files, num_tokens = {}, sum(lengths)
    if num_tokens:
        source = np.memmap(staged, np.int32, mode="r")
        ends = np.cumsum(lengths)
        order = np.argsort(np.asarray(digests), kind="stable") if shuffle else np.arange(len(lengths))
        begins, lengths_ordered = (ends - lengths)[order], np.asarray(lengths)[order]
        for shard, low in enumerate(range(0, num_tokens, shard_tokens)):
            high = min(low + shard_tokens, num_tokens)
            chunks, starts = _cut(source, begins, lengths_ordered, low, high)
            for name, dtype, count, data in (
                (f"tokens-{shard:05d}.npy", "<i4", high - low, chunks),
                (f"starts-{shard:05d}.npy", "<i8", len(starts), iter([starts])),
            ):
                files[name] = _write_array(folder / name, dtype, count, data)
    staged.unlink()
    manifest = Manifest(
        vocab_size=vocab_size, end_of_text=end_of_text, tokens=num_tokens, documents=len(lengths), files=files
    )
    write_sealed(folder / MANIFEST, manifest.model_dump())


def read_store(folder: Path) -> Manifest:
    """The manifest of a store, after every file was compared with it.

    Raises:
        DataError: a file is missing, truncated or damaged.
    """
    rule, fix = "a cached file is exactly what its manifest says", f"delete the folder {folder}; it is made again"
    try:
        manifest = Manifest.model_validate(read_sealed(folder / MANIFEST))
    except ValidationError as error:
        what = f"the manifest is damaged: {error.error_count()} of its fields are wrong or missing"
        raise DataError(what, where=str(folder / MANIFEST), rule=rule, fix=fix) from None
    except (OSError, ValueError) as error:
        raise DataError(f"the manifest is damaged: {error}", where=str(folder / MANIFEST), rule=rule, fix=fix) from None
    for name, entry in manifest.files.items():
        path = folder / name
        has_bytes = path.stat().st_size if path.is_file() else 0
        if has_bytes != entry.bytes:
            what = f"{path} is damaged: expected {entry.bytes} bytes, has {has_bytes}"
            where = f"{path}, byte {min(has_bytes, entry.bytes)}"
            raise DataError(what, where=where, rule=rule, fix=fix)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
        if digest != entry.digest:
            what = f"{path} is damaged: its {has_bytes} bytes have another digest than when they were written"
            raise DataError(what, where=str(path), rule=rule, fix=fix)
    return manifest


def split_store(folder: Path, manifest: Manifest, held_out: float) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Cut the stream into a train split and a held-out split: the last `held_out` share of the tokens.

    The cut is the document boundary nearest to that share, if it changes neither split by more than a quarter; else the cut
    falls inside a document.
    """
    shards, num_tokens, heads = [], 0, []
    for name in sorted(name for name in manifest.files if name.startswith("tokens-")):
        starts = open_array(folder / name.replace("tokens", "starts"), ndim=1, dtypes=["int64"])
        heads.append(starts + num_tokens)
        size = len(open_array(folder / name, ndim=1, dtypes=["int32"]))
        shards.append((folder / name, num_tokens, size))
        num_tokens += size
    cut = round(num_tokens * (1 - held_out))
    if held_out and manifest.documents > 1:
        boundaries = np.concatenate(heads)[1:]
        nearest = int(boundaries[np.argmin(np.abs(boundaries - cut))])
        if abs(nearest - cut) <= BOUNDARY_REACH * min(cut, num_tokens - cut):
            cut = nearest

    def spans(low: int, high: int) -> tuple[Span, ...]:
        return tuple(
            Span(str(path), str(path.with_name(path.name.replace("tokens", "starts"))), first, last)
            for path, begin, size in shards
            if (first := max(low - begin, 0)) < (last := min(high - begin, size))
        )

    return spans(0, cut), spans(cut, num_tokens)


def _cut(
    source: np.ndarray, begins: np.ndarray, lengths: np.ndarray, low: int, high: int
) -> tuple[Iterator[np.ndarray], np.ndarray]:
    """Tokens [low, high) of the ordered stream, document by document, and where in them each document starts.

    A document that goes on from the shard before starts again at 0.
    """
    ends = np.cumsum(lengths)
    heads = ends - lengths
    inside = slice(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(heads, high, "left")))
    first, last = np.maximum(heads[inside], low), np.minimum(ends[inside], high)
    begin = begins[inside] + (first - heads[inside])
    chunks = (source[b : b + n] for b, n in zip(begin.tolist(), (last - first).tolist(), strict=True))
    return chunks, first - low


def _write_array(path: Path, dtype: str, count: int, chunks: Iterator[np.ndarray]) -> StoredFile:
    """Write an .npy with plain writes: a full disk is an error of a write, but kills a process that uses a map."""
    with path.open("wb+") as file:
        header = {"descr": dtype, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk, dtype).data)
        num_bytes = file.tell()
        file.seek(0)
        return StoredFile(bytes=num_bytes, digest=hashlib.file_digest(file, "blake2b").hexdigest())


def _no_space(folder: Path, needed: str, free: int) -> DataError:
    return DataError(
        f"no space for the token cache: it needs {needed}, {free} bytes are free",
        where=str(folder.parent),
        rule="a token takes 4 bytes, and as much again while documents are put in order",
        fix="free some space, or set data.cache to a folder on a larger disk",
    )
