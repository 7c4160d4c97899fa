"""Small token stores and text files for the tests of this room."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from weft.data import Rows, Span
from weft.data.store import read_store, split_store, write_store


def documents_of(lengths: Iterable[int]) -> list[list[int]]:
    """Documents of given lengths whose tokens are all different and count up."""
    documents, token = [], 1
    for length in lengths:
        documents.append(list(range(token, token + length)))
        token += length
    return documents


def stored(
    folder: Path,
    documents: Sequence[list[int]],
    *,
    held_out: float = 0.0,
    shard_tokens: int = 2**20,
    digests: Sequence[int] | None = None,
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Write documents as a store and cut it; ordered by digest where digests are given."""
    folder.mkdir(parents=True)
    parts = zip(documents, digests or range(len(documents)), strict=True)
    write_store(folder, parts, shuffle=digests is not None, vocab_size=2**31, end_of_text=0, shard_tokens=shard_tokens)
    return split_store(folder, read_store(folder), held_out)


def rows_of(spans: Sequence[Span], seq_len: int, *, packing: bool = True, shuffle: bool = False, seed: int = 0) -> Rows:
    return Rows(spans, seq_len=seq_len, packing=packing, shuffle=shuffle, seed=seed)


def saved_rows(path: Path, num_rows: int, seq_len: int, dtype: str = "int32") -> tuple[Span, ...]:
    """An .npy of rows whose tokens count up."""
    array = np.arange(num_rows * (seq_len + 1), dtype=dtype).reshape(num_rows, seq_len + 1)
    np.save(path, array)
    return (Span(str(path), None, 0, array.size),)
