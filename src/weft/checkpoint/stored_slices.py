"""Slices of the weights of a Hugging Face folder, read by each rank from the files, without the rest of the model.

Transformers stores some weights under other names than the model gives them, and a stack of experts as matrices. Where the rows
of a weight are stored is found once for all, as in `anatomy/stored_rows.py`: the library converts the indices of the rows of
all weights as if they were weights. A weight of one dim has an element in a row.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.anatomy.stored_rows import as_stored
from weft.checkpoint.packed_folder import read_rows
from weft.checkpoint.weight_files import PACKED, StoredTensor
from weft.errors import CheckpointError

MANY_PARTS = 16
"""Parts of a stored tensor above which its rows are read at once, and then chosen, if their mean distance is less than this."""
MAX_MAPPED = 2**26
"""Bytes of rows after which files are opened anew: the pages of a mapped file count as memory of the process until then."""


class RowSpan(NamedTuple):
    """Consecutive rows of a weight that are consecutive rows of a stored tensor."""

    key: str
    """Name of the stored tensor."""
    first: int
    """First row in the weight."""
    stored: int
    """First row in the stored tensor."""
    rows: int


class StoredLayout(NamedTuple):
    """Places of the weights of a model in the files of a folder."""

    spans: dict[str, list[RowSpan]]
    """Spans of each weight and saved buffer, by its name in the unmodified model, in the order of its rows."""
    files: dict[str, str]
    """Path of the file of each stored tensor."""

    def dump(self) -> Any:
        """Values for JSON."""
        return [{name: [tuple(span) for span in spans] for name, spans in self.spans.items()}, self.files]

    @classmethod
    def parse(cls, dumped: Any) -> "StoredLayout":
        """Inverse of `dump`."""
        return cls({name: [RowSpan(*span) for span in spans] for name, spans in dumped[0].items()}, dumped[1])


def find_layout(model: Any, stored: Mapping[str, StoredTensor]) -> StoredLayout | None:
    """Find the rows of each weight and saved buffer of a model in a folder; None if some are not found.

    They are not found if the folder lacks them, or has them in other columns, for example transposed.

    Args:
        model: unmodified model of Transformers, on any device.
        stored: tensors of the folder.
    """
    ties: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    weights: dict[str, Tensor] = {name: x for name, x in model.state_dict().items() if name not in ties}
    starts = np.cumsum([0, *(_rows(weight) for weight in weights.values())])
    indices = {
        name: torch.arange(start, start + _rows(weight)).view(
            weight.shape if weight.ndim < 2 else (*weight.shape[:-1], 1)
        )
        for start, (name, weight) in zip(starts.tolist(), weights.items(), strict=False)
    }
    spans: dict[str, list[RowSpan]] = {name: [] for name in weights}
    names = list(weights)
    for name, rows in as_stored(model, indices).items():
        key = stored_name(name, model, stored)
        if key is None:
            return None
        flat = rows.flatten().numpy()
        owners = np.searchsorted(starts, flat, "right") - 1
        for first, last in _consecutive(flat, owners):
            owner = names[owners[first]]
            columns = weights[owner].shape[-1:] if weights[owner].ndim > 1 else None
            if stored[key].shape != (tuple(rows.shape) if columns is None else (*rows.shape[:-1], *columns)):
                return None
            spans[owner].append(RowSpan(key, int(flat[first] - starts[owners[first]]), first, last - first))
    for name, parts in spans.items():
        parts.sort(key=lambda span: span.first)
        ends = [0, *(span.first + span.rows for span in parts)]
        if [*(span.first for span in parts), _rows(weights[name])] != ends:
            return None
    spans |= {name: spans[first] for name, first in ties.items() if first in spans}
    return StoredLayout(spans, {key: str(tensor.file) for key, tensor in stored.items()})


def stored_name(name: str, model: Any, stored: Mapping[str, StoredTensor]) -> str | None:
    """Name of a stored tensor in a folder, which may have been saved without or with the prefix of the base model."""
    prefix = f"{model.base_model_prefix}."
    return next((key for key in (name, name.removeprefix(prefix), prefix + name) if key in stored), None)


def _consecutive(numbers: np.ndarray, owners: np.ndarray) -> list[tuple[int, int]]:
    """First index, and index after the last, of each part in which numbers count up by one, and have the same owner."""
    cuts = (np.flatnonzero((np.diff(numbers) != 1) | (np.diff(owners) != 0)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(numbers)], strict=True)) if len(numbers) else []


def _rows(weight: Tensor) -> int:
    return math.prod(weight.shape[:-1]) if weight.ndim > 1 else weight.numel()


class SliceReader(ExitStack):
    """Reads slices of weights; a context manager, which keeps files open.

    A rank that reads a few columns of many rows touches the pages of whole rows: of a Llama under tp = 8 and ZeRO-3 almost
    four times the bytes of its shards.
    """

    def __init__(self, layout: StoredLayout):
        super().__init__()
        self.layout = layout
        self._open: dict[str, Any] = {}
        self._mapped = 0

    def read(
        self, name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Read a slice of a weight.

        Args:
            name: name of the weight in the model.
            shape: shape of the weight.
            offset, size: first index and number along each dim of the slice.
            dtype: dtype of the result.

        Returns:
            Tensor of the given size.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if self._mapped > MAX_MAPPED:
            self._open.clear()
            self.close()
            self._mapped = 0
        leading = len(shape) - 1 if len(shape) > 1 else len(shape)
        columns = slice(offset[-1], offset[-1] + size[-1]) if len(shape) > 1 else None
        rows = np.arange(math.prod(shape[:leading])).reshape(shape[:leading])
        chosen = rows[
            tuple(slice(start, start + length) for start, length in zip(offset[:leading], size, strict=False))
        ]
        result = torch.empty(chosen.size, size[-1] if columns else 1, dtype=dtype)
        self._mapped += chosen.size * (shape[-1] if columns else 1) * dtype.itemsize
        for key, parts in self._parts(name, chosen.ravel()).items():
            first, last = parts[:, 0].min(), (parts[:, 0] + parts[:, 2]).max()
            if len(parts) > MANY_PARTS and last - first < MANY_PARTS * len(parts):
                whole = self._rows(key, int(first), int(last), columns)
                stored, place = (np.concatenate([np.arange(p[at], p[at] + p[2]) for p in parts]) for at in (0, 1))
                result[torch.from_numpy(place)] = whole[torch.from_numpy(stored - first)].to(dtype)
                continue
            for start, place, count in parts.tolist():
                result[place : place + count] = self._rows(key, start, start + count, columns)
        return result.view(tuple(size))

    def _parts(self, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of stored tensors that rows of a weight are in: first stored row, place among the rows, and number of rows."""
        spans = self.layout.spans[name]
        owners = np.searchsorted([span.first for span in spans], rows, "right") - 1
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for place, end in _consecutive(rows, owners):
            span = spans[owners[place]]
            parts.setdefault(span.key, []).append((span.stored + int(rows[place]) - span.first, place, end - place))
        return {key: np.array(found) for key, found in parts.items()}

    def _opened(self, path: str) -> Any:
        if path not in self._open:
            self._open[path] = self.enter_context(safe_open(path, "pt"))
        return self._open[path]

    def _rows(self, key: str, first: int, last: int, columns: slice | None) -> Tensor:
        """Rows of a stored tensor as a matrix."""
        path = self.layout.files[key]
        try:
            if f"{key}{PACKED}" in self.layout.files:
                rows = read_rows(lambda name: self._opened(self.layout.files[name]).get_slice(name), key, first, last)
                return rows if columns is None else rows[:, columns]
            return _matrix(self._opened(path), key, first, last, columns)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{key} cannot be read: {error}",
                where=path,
                rule="a model folder has config.json and *.safetensors files written by save_pretrained",
                fix="copy or download the folder again",
            ) from None


def _matrix(file: Any, key: str, first: int, last: int, columns: slice | None) -> Tensor:
    """Rows of a tensor in an opened file, [rows, columns]; see `SliceReader`."""
    stored = file.get_slice(key)
    shape = stored.get_shape()
    if columns is None:
        result: Tensor = stored[first:last] if len(shape) == 1 else file.get_tensor(key).flatten()[first:last]
        return result[:, None]
    if len(shape) == 1:
        return stored[columns][None]
    if len(shape) == 2:
        return stored[first:last, columns]
    if len(shape) > 3:
        return file.get_tensor(key).flatten(0, -2)[first:last, columns]
    found, height = [], shape[1]
    while first < last:
        matrix, row = divmod(first, height)
        count = min(last - first, height - row)
        found.append(stored[matrix : matrix + 1, row : row + count, columns][0])
        first += count
    return torch.cat(found)
