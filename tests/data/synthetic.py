"""Small token stores and row files for the data tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from weft.data import Rows, TokenSpan
from weft.data.store import read_store, split_store, write_store


def documents_of(lengths: Iterable[int]) -> list[list[int]]:
    """Documents of given lengths with consecutive token ids, all distinct."""
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
) -> tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...]]:
    """Write documents as a token store and split it; documents are ordered by digest if digests are given."""
    folder.mkdir(parents=True)
    parts = zip(documents, digests or range(len(documents)), strict=True)
    write_store(folder, parts, shuffle=digests is not None, vocab_size=2**31, end_of_text=0, shard_tokens=shard_tokens)
    return split_store(folder, read_store(folder), held_out)


def rows_of(
    spans: Sequence[TokenSpan], seq_len: int, *, packing: bool = True, shuffle: bool = False, seed: int = 0
) -> Rows:
    return Rows(spans, seq_len=seq_len, packing=packing, shuffle=shuffle, seed=seed)


def saved_rows(path: Path, num_rows: int, seq_len: int, dtype: str = "int32") -> tuple[TokenSpan, ...]:
    """.npy file of rows with consecutive token ids."""
    array = np.arange(num_rows * (seq_len + 1), dtype=dtype).reshape(num_rows, seq_len + 1)
    np.save(path, array)
    return (TokenSpan(str(path), None, 0, array.size),)
