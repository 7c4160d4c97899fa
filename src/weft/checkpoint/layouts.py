"""Where the slices of tensors are: the files that hold them, as arrays in memory and as runs of numbers in a manifest.

A tensor that is sharded over a mesh has a slice in each of thousands of files, at regular places: the numbers of the files, and
the first rows of their slices, grow by constant steps. A layout stores such numbers as runs (first, step, count), and many
tensors have the same layout, so that the description of 22 million slices on 10,240 ranks takes a few megabytes.

The ranks describe what they write as `RankTable`s, which `merge_tables` joins.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from weft.plan import Table

MAX_PARTS = 2**20  # slices of a tensor: 10,240 ranks with a hundred each
MAX_NUMBER = 2**62

Size = Annotated[int, Field(ge=0)]
Run = tuple[Size, int, Annotated[int, Field(ge=1)]]
"""First number, step, and count of numbers that grow by the step."""
Runs = tuple[Run, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a slice."""


class Parts(NamedTuple):
    """Slices that tile a tensor."""

    files: np.ndarray
    """Number of the file of each slice, int64 [slices]."""
    offsets: np.ndarray
    """Index of its first element in the full tensor, int64 [slices, dims]."""
    shapes: np.ndarray
    """Its shape, int64 [slices, dims]."""

    @classmethod
    def whole(cls, file: int, shape: Sequence[int]) -> "Parts":
        """A tensor that one file holds."""
        sizes = np.array([shape], np.int64).reshape(1, len(shape))
        return cls(np.array([file]), np.zeros_like(sizes), sizes)

    def chosen(self, index: np.ndarray) -> "Parts":
        """Some of the slices."""
        return Parts(*(column[index] for column in self))

    def intersect(self, offset: Sequence[int], shape: Sequence[int]) -> "tuple[Parts, np.ndarray, np.ndarray]":
        """Slices that intersect a requested one, and the first and last + 1 global index of each intersection."""
        begin = np.array(offset, np.int64)
        lows = np.maximum(self.offsets, begin)
        highs = np.minimum(self.offsets + self.shapes, begin + np.array(shape, np.int64))
        found = np.flatnonzero((lows < highs).all(1))
        return self.chosen(found), lows[found], highs[found]


class Layout(Table):
    """Parts of a tensor, as runs of numbers."""

    files: Runs
    """Numbers of the files."""
    offsets: tuple[Runs, ...]
    """Indices of the first elements along each dim."""
    shapes: tuple[Runs, ...]
    """Sizes along each dim."""

    @classmethod
    def of(cls, parts: Parts) -> "Layout":
        """Layout of some parts, which it sorts by offset."""
        dims = parts.offsets.shape[1]
        order = np.lexsort((parts.files, *(parts.offsets[:, dim] for dim in reversed(range(dims)))))
        files, offsets, shapes = parts.chosen(order)
        columns = [[to_runs(table[:, dim]) for dim in range(dims)] for table in (offsets, shapes)]
        return cls(files=to_runs(files), offsets=tuple(columns[0]), shapes=tuple(columns[1]))

    def parts(self) -> Parts:
        """Arrays of the layout.

        Raises:
            ValueError: the numbers are too many or too large, or some are missing.
        """
        files = from_runs(self.files)
        tables = []
        for columns in (self.offsets, self.shapes):
            numbers = [from_runs(runs) for runs in columns]
            if len(columns) != len(self.offsets) or any(len(column) != len(files) for column in numbers):
                raise ValueError("a layout has other numbers of files, offsets and sizes")
            tables.append(np.stack(numbers, 1) if numbers else np.zeros((len(files), 0), np.int64))
        return Parts(files, *tables)


def to_runs(numbers: np.ndarray) -> Runs:
    """Runs of a sequence of numbers, int64 [n]; the inverse of `from_runs`."""
    steps = np.diff(numbers)
    changes = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    runs, start = [], 0
    while start < len(numbers):
        if start == len(numbers) - 1:
            count, step = 1, 0
        else:
            count = int(changes[np.searchsorted(changes, start, "right")]) - start + 1
            step = int(steps[start])
        runs.append((int(numbers[start]), step, count))
        start += count
    return tuple(runs)


def from_runs(runs: Iterable[Run]) -> np.ndarray:
    """Numbers of some runs, int64 [n].

    Raises:
        ValueError: the numbers are too many, negative or too large.
    """
    runs, total = list(runs), 0
    for first, step, count in runs:
        total += count
        if total > MAX_PARTS or not 0 <= first + step * (count - 1) < MAX_NUMBER or first >= MAX_NUMBER:
            raise ValueError(f"a run of {count} numbers from {first} by {step} is refused")
    return np.concatenate([np.zeros(0, np.int64), *(first + step * np.arange(n) for first, step, n in runs)])


class RankTable(NamedTuple):
    """What a rank writes. Ranks that hold parts of the same tensors share the names, and most parts of a rank are alike."""

    names: str
    """JSON text of (name, dtype, full shape) of each tensor that the rank holds."""
    boxes: list[list[Box]]
    """Different lists of slices that the rank writes of a tensor; of many it writes none."""
    kinds: np.ndarray
    """Index in `boxes` for each of the names, int32."""
    own: list[tuple[str, str, tuple[int, ...]]]
    """(name, dtype, shape) of each tensor that the rank alone has."""

    @classmethod
    def of(
        cls,
        held: Iterable[tuple[str, str, tuple[int, ...]]],
        written: Mapping[str, list[Box]],
        own: list[tuple[str, str, tuple[int, ...]]],
    ) -> "RankTable":
        """Table of a rank.

        Args:
            held: name, dtype and full shape of each tensor of which the rank holds slices.
            written: offset and shape of the slices that it writes, by name of the tensor.
            own: name, dtype and shape of each tensor that the rank alone has, and writes whole.
        """
        names = list(dict.fromkeys(held))
        found: dict[tuple[Box, ...], int] = {}
        kinds = [found.setdefault(tuple(written.get(name, ())), len(found)) for name, _, _ in names]
        return cls(json.dumps(names), [list(boxes) for boxes in found], np.array(kinds, np.int32), own)

    def dump(self) -> str:
        """Text for another rank, with a digest in place of the names."""
        kinds = base64.b64encode(zlib.compress(self.kinds.astype("<i4").tobytes(), 1)).decode()
        return json.dumps([digest_of(self.names), self.boxes, kinds, self.own])

    @classmethod
    def parse(cls, text: str, names: str) -> "RankTable":
        """Inverse of `dump`, given the names."""
        _, boxes, kinds, own = json.loads(text)
        own = [(name, dtype, tuple(shape)) for name, dtype, shape in own]
        boxes = [[(tuple(offset), tuple(shape)) for offset, shape in each] for each in boxes]
        return cls(names, boxes, np.frombuffer(zlib.decompress(base64.b64decode(kinds)), "<i4"), own)


def digest_of(text: str) -> str:
    """Digest by which ranks name a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class MergedTensor(NamedTuple):
    """Tensor of which ranks write parts."""

    dtype: str
    shape: tuple[int, ...]
    layout: int
    """Index of its layout."""


class Merged(NamedTuple):
    """Tables of all ranks."""

    tensors: dict[str, MergedTensor]
    layouts: list[Layout]
    own: dict[str, tuple[str, tuple[int, ...], int]]
    """Dtype, shape and rank of each tensor that a rank alone has."""


def merge_tables(tables: Sequence[RankTable]) -> Merged:
    """Merge the tables of all ranks, by rank.

    Tensors with the same slices on the same ranks are found by comparing columns of numbers, so that the time grows with the
    number of different layouts, not with that of slices.
    """
    boxes = _Boxes()
    ranks_of: dict[str, list[int]] = {}  # by names
    kinds: list[np.ndarray] = []
    for rank, table in enumerate(tables):
        kinds.append(np.array([boxes.number(tuple(each)) for each in table.boxes], np.int32)[table.kinds])
        ranks_of.setdefault(table.names, []).append(rank)
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    found: dict[str, list[_Column]] = {}
    for names, ranks in ranks_of.items():
        columns: dict[bytes, _Column] = {}
        numbers, group = np.ascontiguousarray(np.stack([kinds[rank] for rank in ranks]).T), np.array(ranks)
        for (name, dtype, shape), row in zip(json.loads(names), numbers, strict=True):
            digest = hashlib.blake2b(row.data, digest_size=16).digest()
            found.setdefault(name, []).append(columns.setdefault(digest, _Column(group, row)))
            facts[name] = dtype, tuple(shape)
    index_of: dict[tuple[int, ...], int] = {}
    layouts: list[Layout] = []
    tensors = {}
    for name, own_columns in found.items():
        dims = len(facts[name][1])
        key = dims, *map(id, own_columns)
        if key not in index_of:
            index_of[key] = len(layouts)
            parts = [boxes.expand(column, dims) for column in own_columns]
            layouts.append(Layout.of(Parts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))))
        tensors[name] = MergedTensor(*facts[name], index_of[key])
    own = {name: (dtype, shape, rank) for rank, table in enumerate(tables) for name, dtype, shape in table.own}
    return Merged(tensors, layouts, own)


class _Column(NamedTuple):
    """What some ranks write of a tensor."""

    ranks: np.ndarray
    numbers: np.ndarray
    """Number of the list of boxes of each rank in `_Boxes`."""


class _Boxes:
    """Numbers of lists of boxes, and their boxes as arrays."""

    def __init__(self) -> None:
        self.found: dict[tuple[Box, ...], int] = {}
        self.tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def number(self, boxes: tuple[Box, ...]) -> int:
        """Number of a list of boxes."""
        return self.found.setdefault(boxes, len(self.found))

    def expand(self, column: _Column, dims: int) -> Parts:
        """Parts of a tensor of this number of dims that the ranks of a column write. Called after the last `number`."""
        if dims not in self.tables:
            own = [[box for box in boxes if len(box[0]) == dims] for boxes in self.found]
            counts = np.array([len(boxes) for boxes in own])
            flat = np.array([box for boxes in own for box in boxes], np.int64).reshape(counts.sum(), 2, dims)
            self.tables[dims] = counts, np.cumsum(counts) - counts, flat
        counts, starts, flat = self.tables[dims]
        repeats = counts[column.numbers]
        before = np.cumsum(repeats) - repeats
        chosen = flat[np.repeat(starts[column.numbers] - before, repeats) + np.arange(repeats.sum())]
        return Parts(np.repeat(column.ranks, repeats), chosen[:, 0], chosen[:, 1])


def slice_key(name: str, offset: Sequence[int], shape: Sequence[int], full_shape: Sequence[int]) -> str:
    """Key of a slice in its file. It includes the offset, because a file may hold several slices of one tensor."""
    return name if tuple(shape) == tuple(full_shape) else f"{name}@{','.join(map(str, offset))}"
