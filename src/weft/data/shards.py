"""Files of tokens as memory maps: all that a rank needs to read them, and nothing of how they are made."""

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
class Span:
    """Tokens [first, last) of one file, counted over the flattened array."""

    tokens: str
    """Path of an .npy: int32 [tokens], a stream of documents; or integers [rows, seq_len + 1] if `starts` is None."""
    starts: str | None
    """Path of an .npy: int64 [documents], where in the file each document starts; None: rows without documents."""
    first: int
    last: int


def open_array(path: str | Path, *, ndim: int, dtypes: Sequence[str]) -> np.ndarray:
    """Map an .npy file into memory. The map is private: writing to it changes neither the file nor other ranks.

    Raises:
        DataError: the file is missing, no .npy, truncated or too long, or has another rank, dtype or memory order.
    """
    where = str(path)
    try:
        with open(path, "rb") as file:
            shape, fortran_order, dtype = HEADER_READERS[np.lib.format.read_magic(file)](file)
            offset = file.tell()
            has_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        rule, fix = "tokens are in an .npy file that can be read", "name such a file in data.path"
        raise DataError(f"cannot read {path}: {error.strerror}", where=where, rule=rule, fix=fix) from None
    except (ValueError, KeyError) as error:
        rule, fix = "tokens are in an .npy file", "write it with numpy.save"
        raise DataError(f"{path} is not an .npy file: {error}", where=where, rule=rule, fix=fix) from None
    expected_bytes = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if dtype not in [np.dtype(name).newbyteorder("<") for name in dtypes]:
        rule, fix = f"its dtype is one of {', '.join(dtypes)}", f'save it as array.astype("{dtypes[0]}")'
        raise DataError(f"{path} holds {dtype}", where=where, rule=rule, fix=fix)
    if len(shape) != ndim or fortran_order:
        order = "column" if fortran_order else "row"
        rule = f"it has {ndim} dimension{'s' if ndim > 1 else ''}, in row-major order"
        what = f"{path} has the shape {list(shape)} in {order}-major order"
        raise DataError(what, where=where, rule=rule, fix="write numpy.ascontiguousarray of an array of that shape")
    if has_bytes != expected_bytes:
        raise DataError(
            f"{path} is {'truncated' if has_bytes < expected_bytes else 'too long'}: "
            f"expected {expected_bytes} bytes, has {has_bytes}",
            where=f"{path}, byte {min(has_bytes, expected_bytes)}",
            rule="an .npy file is as long as the shape in its header says",
            fix="copy or write the file again",
        )
    if expected_bytes == offset:  # the operating system maps no empty file
        return np.empty(shape, dtype)
    # "c" is copy on write: torch wants writable memory, and the file must never change.
    return np.memmap(path, dtype, mode="c", offset=offset, shape=shape)
