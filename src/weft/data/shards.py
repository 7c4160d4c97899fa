"""Memory-mapped token files, as ranks read them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import DataError

STREAM_TYPES = ("int32",)
ROW_TYPES = ("int32", "int64", "uint16")
HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class TokenSpan:
    """Token range [first, last) of one file, as indices of the flattened array."""

    tokens: str
    """Path of an .npy file: int32 [tokens], a stream of documents; or integers [rows, seq_len + 1] if `starts` is None. In
    chats, a token without loss is stored as the bitwise complement of its id, a negative number."""
    starts: str | None
    """Path of an .npy file with the index of the first token of each document, int64 [documents]; None: ready rows."""
    first: int
    last: int
    whole: bool = False
    """Documents are not cut: each is whole in a row, as chats are."""


def open_array(path: str | Path, *, ndim: int, dtypes: Sequence[str]) -> np.ndarray:
    """Memory-map an .npy file. The map is private: writes change neither the file nor the maps of other ranks.

    Args:
        path: path of the file.
        ndim: required number of dims.
        dtypes: allowed dtypes, little-endian.

    Raises:
        DataError: the file is missing, not an .npy file, truncated or too long, or has another ndim, dtype or memory order.
    """
    where = str(path)
    try:
        with open(path, "rb") as file:
            shape, fortran_order, dtype = HEADER_READERS[np.lib.format.read_magic(file)](file)
            offset = file.tell()
            has_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        rule, fix = "tokens are in a readable .npy file", "set data.path to such a file"
        raise DataError(f"cannot read {path}: {error.strerror}", where=where, rule=rule, fix=fix) from None
    except (ValueError, KeyError) as error:
        rule, fix = "tokens are in an .npy file", "write it with numpy.save"
        raise DataError(f"{path} is not an .npy file: {error}", where=where, rule=rule, fix=fix) from None
    expected_bytes = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if dtype not in [np.dtype(name).newbyteorder("<") for name in dtypes]:
        rule, fix = f"the dtype is one of {', '.join(dtypes)}", f'save it as array.astype("{dtypes[0]}")'
        raise DataError(f"{path} holds {dtype}", where=where, rule=rule, fix=fix)
    if len(shape) != ndim or fortran_order:
        order = "column" if fortran_order else "row"
        rule = f"the array has {ndim} dimension{'s' if ndim > 1 else ''}, in row-major order"
        what = f"{path} has the shape {list(shape)} in {order}-major order"
        raise DataError(what, where=where, rule=rule, fix="reshape the array and save numpy.ascontiguousarray of it")
    if has_bytes != expected_bytes:
        raise DataError(
            f"{path} is {'truncated' if has_bytes < expected_bytes else 'too long'}: "
            f"expected {expected_bytes} bytes, has {has_bytes}",
            where=f"{path}, byte {min(has_bytes, expected_bytes)}",
            rule="the size of an .npy file matches the shape in its header",
            fix="copy or write the file again",
        )
    if expected_bytes == offset:  # the operating system cannot map an empty range
        return np.empty(shape, dtype)
    # "c" is copy-on-write: torch needs writable memory, and the file must never change.
    return np.memmap(path, dtype, mode="c", offset=offset, shape=shape)
