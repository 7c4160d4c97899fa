"""Token cache: content-addressed folders, written to a scratch folder, sealed by a manifest, and renamed into place."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, StringConstraints, ValidationError

from weft.data.packing import best_fit_order
from weft.data.sealed import read_sealed, write_sealed
from weft.data.shards import TokenSpan, open_array
from weft.errors import DataError
from weft.lock import WITHOUT_LOCKS, Lock, take_lock
from weft.plan import Table

VERSION = 4
"""Version of the way in which documents become tokens; a cache has no others."""
SHARD_TOKENS = 64 * 2**20
MANIFEST = "manifest.json"
MAX_CUT_SHIFT = 0.25  # fraction of the smaller split by which a cut may move to fall between documents

# Name of a scratch folder's lock file.
SCRATCH = re.compile(r"(\.(?:tokens|tokenizer|documents|records)-[0-9a-f]{24}-[0-9a-f]{16})\.lock")

Size = Annotated[int, Field(ge=0)]


class StoredFile(Table):
    """Size and digest of a file of a token store."""

    bytes: Size
    digest: str
    """BLAKE2b digest."""


@dataclass
class ChatCounts:
    """Counts of a set of chats."""

    chats: Size = 0
    """Chats in the store."""
    targets: Size = 0
    """Tokens with a loss."""
    truncated: Size = 0
    """Chats that lost their last tokens."""
    dropped: Size = 0
    """Chats that were left out because they are too long."""
    stops: bool = False
    """A turn of the assistant ends with a special token that has a loss."""
    unread: list[str] = field(default_factory=list)
    """Fields of records and messages that have no effect, as the chat template does not read them."""


class StoreManifest(Table):
    """Manifest of a token store."""

    format: Literal[2] = 2
    vocab_size: Annotated[int, Field(ge=1)]
    """Entries of the tokenizer."""
    end_of_text: Size
    """Id that ends each document."""
    tokens: Size
    documents: Size
    files: dict[Annotated[str, StringConstraints(pattern=r"^(tokens|starts)-\d{5,}\.npy$")], StoredFile]
    """Files by name."""
    leading: str = ""
    """Special tokens with which each document begins, as text; empty: none."""
    chats: ChatCounts | None = None
    """Counts of chats, whose documents are not cut; None: text."""


def cache_key(kind: str, *settings: object) -> str:
    """Name of a cache folder: its kind, and a digest of all settings that determine its content."""
    return f"{kind}-{hashlib.blake2b(json.dumps([VERSION, *settings]).encode(), digest_size=12).hexdigest()}"


@contextmanager
def build_folder(folder: Path, *, estimate: int) -> Iterator[Path]:
    """Context manager: a scratch folder that is renamed to `folder` if the block succeeds, and removed otherwise.

    If two launchers build the same folder at once, the first rename wins; the contents are identical.

    Args:
        folder: final folder.
        estimate: estimated bytes; a disk with less free space is refused before any work.

    Raises:
        DataError: the disk is too small or gets full, or the folder cannot be written.
    """
    with scratch_folder(folder, estimate=estimate) as scratch:
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


@contextmanager
def scratch_folder(folder: Path, *, estimate: int) -> Iterator[Path]:
    """Context manager: a scratch folder next to `folder`, which is removed at the end of the block.

    A lock file next to the scratch folder is locked while the block runs; `remove_stale_scratch` uses it to detect scratch
    folders of killed launchers. Arguments and errors as for `build_folder`.
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
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = sum(path.stat().st_size for path in scratch.iterdir()) if scratch.is_dir() else 0
            raise _no_space(folder, f"more than {max(written, estimate)} bytes", free) from None
        rule, fix = "tokens are cached in data.cache", "set data.cache to a writable folder"
        raise DataError(f"cannot write the token cache: {error}", where=str(folder), rule=rule, fix=fix) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if lock:
            lock_file.unlink(missing_ok=True)
            lock.release()


def remove_stale_scratch(cache: Path) -> list[Path]:
    """Remove scratch folders of launchers that have ended; a running launcher holds the lock of its scratch folder.

    Args:
        cache: data.cache; it need not exist.

    Returns:
        Removed folders. Folders that cannot be locked or removed are kept, for example on a file system without locks.
    """
    removed = []
    for lock_file in sorted(cache.glob(".*.lock")):
        name = SCRATCH.fullmatch(lock_file.name)
        try:
            lock = take_lock(lock_file) if name else None
        except OSError:  # a lock file of another user, or a file system without locks
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
    """Lock for a scratch folder; None on a file system without locks."""
    try:
        return take_lock(path)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            path.unlink(missing_ok=True)
            return None
        raise


def write_store(
    folder: Path,
    parts: Iterable[tuple[Sequence[int] | np.ndarray, int | None]],
    *,
    shuffle: bool,
    vocab_size: int,
    end_of_text: int,
    leading: str = "",
    shard_tokens: int = SHARD_TOKENS,
    chats: ChatCounts | None = None,
    capacity: int = 0,
) -> None:
    """Write documents as one stream of tokens, cut into shards, each with an index of document starts.

    Args:
        folder: existing, empty folder.
        parts: (ids, digest) of each document in one or more parts; the last part has the 64-bit digest, the others None.
        shuffle: order documents by digest instead of by input order.
        vocab_size: entries of the tokenizer.
        end_of_text: id that ends each document.
        leading: special tokens with which each document begins, as text.
        shard_tokens: maximum tokens per shard.
        chats: counts of chats, complete after the last part; chats stay whole, and shuffled chats are ordered so that rows are
            well filled. None: text.
        capacity: maximum tokens of a row of chats.
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
        if shuffle and chats:
            order = order[best_fit_order(np.asarray(lengths)[order], capacity)]
        begins, lengths_ordered = (ends - lengths)[order], np.asarray(lengths)[order]
        edges = _shard_edges(lengths_ordered, shard_tokens, whole=chats is not None)
        for shard, (low, high) in enumerate(pairwise(edges)):
            chunks, starts = _cut(source, begins, lengths_ordered, low, high)
            for name, dtype, count, data in (
                (f"tokens-{shard:05d}.npy", "<i4", high - low, chunks),
                (f"starts-{shard:05d}.npy", "<i8", len(starts), iter([starts])),
            ):
                files[name] = _write_array(folder / name, dtype, count, data)
    staged.unlink()
    manifest = StoreManifest(
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        leading=leading,
        tokens=num_tokens,
        documents=len(lengths),
        files=files,
        chats=chats,
    )
    write_sealed(folder / MANIFEST, manifest.model_dump())


def read_store(folder: Path) -> StoreManifest:
    """Read the manifest of a token store and verify every file.

    Raises:
        DataError: a file is missing, truncated or damaged.
    """
    rule, fix = "a cached file matches its manifest", f"delete the folder {folder}; it will be created again"
    try:
        manifest = StoreManifest.model_validate(read_sealed(folder / MANIFEST))
    except ValidationError as error:
        what = f"the manifest is damaged: {error.error_count()} of its fields are invalid or missing"
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
            what = f"{path} is damaged: the digest of its {has_bytes} bytes does not match the manifest"
            raise DataError(what, where=str(path), rule=rule, fix=fix)
    return manifest


def split_store(
    folder: Path, manifest: StoreManifest, held_out: float
) -> tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]:
    """Split the stream into a train split and a held-out split, which is the last fraction `held_out` of the tokens.

    The cut is moved to the nearest document boundary if that changes neither split by more than a quarter; otherwise the cut
    is inside a document. A chat is never cut.

    Returns:
        Token ranges of the train split and of the held-out split.
    """
    shards, num_tokens, heads, whole = [], 0, [], manifest.chats is not None
    for name in sorted(name for name in manifest.files if name.startswith("tokens-")):
        starts = open_array(folder / name.replace("tokens", "starts"), ndim=1, dtypes=["int64"])
        heads.append(starts + num_tokens)
        size = len(open_array(folder / name, ndim=1, dtypes=["int32"]))
        shards.append((folder / name, num_tokens, size))
        num_tokens += size
    cut = round(num_tokens * (1 - held_out))
    if held_out and whole and manifest.documents == 1:
        cut = num_tokens
    elif held_out and manifest.documents > 1:
        boundaries = np.concatenate(heads)[1:]
        nearest = int(boundaries[np.argmin(np.abs(boundaries - cut))])
        if whole or abs(nearest - cut) <= MAX_CUT_SHIFT * min(cut, num_tokens - cut):
            cut = nearest

    def spans(low: int, high: int) -> tuple[TokenSpan, ...]:
        return tuple(
            TokenSpan(str(path), str(path.with_name(path.name.replace("tokens", "starts"))), first, last, whole)
            for path, begin, size in shards
            if (first := max(low - begin, 0)) < (last := min(high - begin, size))
        )

    return spans(0, cut), spans(cut, num_tokens)


def repeat_chats(spans: Sequence[TokenSpan], times: float) -> tuple[list[TokenSpan], int]:
    """Spans of an epoch that has each chat several times; of a fraction, the first chats.

    Args:
        spans: token ranges of a split of chats.
        times: number of times; the number of chats is rounded.

    Returns:
        The spans, and the number of their chats.
    """
    begins = [_starts_inside(span) for span in spans]
    total = sum(map(len, begins))
    count = int(times * total + 0.5)
    repeated = list(spans) * (count // max(total, 1))
    rest = count % max(total, 1)
    for span, starts in zip(spans, begins, strict=True):
        if 0 < rest < len(starts):
            repeated.append(replace(span, last=int(starts[rest])))
        elif rest > 0:
            repeated.append(span)
        rest -= len(starts)
    return repeated, count


def _starts_inside(span: TokenSpan) -> np.ndarray:
    """Indices of the first tokens of the chats of a span."""
    starts = open_array(str(span.starts), ndim=1, dtypes=["int64"])
    return starts[np.searchsorted(starts, span.first) : np.searchsorted(starts, span.last)]


def _shard_edges(lengths: np.ndarray, shard_tokens: int, *, whole: bool) -> list[int]:
    """Token indices at which shards begin, and of the end; between documents if they stay whole."""
    ends = np.cumsum(lengths)
    edges, num_tokens = [0], int(ends[-1])
    while edges[-1] < num_tokens:
        edge = min(edges[-1] + shard_tokens, num_tokens)
        last = int(np.searchsorted(ends, edge, side="right")) - 1  # last document that ends in the shard
        edges.append(int(ends[last]) if whole and last >= 0 and ends[last] > edges[-1] else edge)
    return edges


def _cut(
    source: np.ndarray, begins: np.ndarray, lengths: np.ndarray, low: int, high: int
) -> tuple[Iterator[np.ndarray], np.ndarray]:
    """Tokens [low, high) of the ordered stream, document by document, and the index of the first token of each document.

    A document that continues from the previous shard counts as starting at index 0.
    """
    ends = np.cumsum(lengths)
    heads = ends - lengths
    inside = slice(int(np.searchsorted(ends, low, "right")), int(np.searchsorted(heads, high, "left")))
    first, last = np.maximum(heads[inside], low), np.minimum(ends[inside], high)
    begin = begins[inside] + (first - heads[inside])
    chunks = (source[b : b + n] for b, n in zip(begin.tolist(), (last - first).tolist(), strict=True))
    return chunks, first - low


def _write_array(path: Path, dtype: str, count: int, chunks: Iterator[np.ndarray]) -> StoredFile:
    """Write an .npy file with plain writes: on a full disk, a write raises an error, but a memory map kills the process."""
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
        f"not enough space for the token cache: it needs {needed}, {free} bytes are free",
        where=str(folder.parent),
        rule="a token takes 4 bytes, and another 4 bytes while documents are being ordered",
        fix="free some space, or set data.cache to a folder on a larger disk",
    )
