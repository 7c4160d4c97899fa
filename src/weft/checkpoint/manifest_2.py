"""Manifests of version 2, which listed each slice of each tensor; Weft 0.1 and earlier wrote them."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from weft.checkpoint.layouts import Layout, Parts, Size, slice_key
from weft.plan import Table


class SliceEntry(Table):
    """Slice of a tensor and its location."""

    file: Annotated[str, Field(pattern=r"^shard-\d{5,}\.safetensors$")]
    key: str
    offset: tuple[Size, ...]
    shape: tuple[Size, ...]


class TensorEntry2(Table):
    """Tensor of a checkpoint."""

    dtype: str
    shape: tuple[Size, ...]
    parts: tuple[SliceEntry, ...]


def upgrade(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of version 3 from those of version 2.

    Raises:
        ValueError: the fields are invalid.
    """
    tensors: dict[str, Any] = {}
    layouts: list[Layout] = []
    for name, entry in TypeAdapter(dict[str, TensorEntry2]).validate_python(fields.get("tensors")).items():
        for part in entry.parts:
            if len(part.offset) != len(entry.shape) or len(part.shape) != len(entry.shape):
                raise ValueError(f"a slice of {name} has other dims than the tensor")
            if part.key != slice_key(name, part.offset, part.shape, entry.shape):
                raise ValueError(f"{part.key!r} is no key of a slice of {name}")
        count = len(entry.parts), len(entry.shape)
        parts = Parts(
            np.array([int(part.file[6:-12]) for part in entry.parts], np.int64),
            np.array([part.offset for part in entry.parts], np.int64).reshape(count),
            np.array([part.shape for part in entry.parts], np.int64).reshape(count),
        )
        tensors[name] = {"dtype": entry.dtype, "shape": entry.shape, "layout": len(layouts)}
        layouts.append(Layout.of(parts))
    return fields | {"version": 3, "tensors": tensors, "layouts": layouts}
