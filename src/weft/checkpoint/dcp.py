"""Reader for folders of torch.distributed.checkpoint (DCP) that executes none of their content.

    .metadata          pickle with names, shapes, dtypes, and the file and offset of each chunk of a tensor
    __0_0.distcp       file of rank 0: concatenated zip archives of torch.save, each with a small pickle and raw elements

Both kinds of pickles are read by `weft.checkpoint.pickled`, which imports and calls nothing. They may only contain the names
listed here. Objects other than tensors (optimizer settings, for example) are also pickled, and are not read.
"""

import io
import math
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint.boxes import find_tiling_error
from weft.checkpoint.pickled import GlobalName, ObjectStub, RejectedError, read_pickle
from weft.checkpoint.shard_file import SAFETENSORS_DTYPES
from weft.errors import CheckpointError

METADATA = ".metadata"
FILE_NAME = re.compile(r"__\d+_\d+\.distcp")
MAX_METADATA_BYTES = 2**30  # a chunk takes a few hundred bytes

_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = {str(dtype): dtype for dtype in SAFETENSORS_DTYPES}
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
METADATA_NAMES = frozenset(
    [
        *(f"{_CHECKPOINT}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_CHECKPOINT}.metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        *(f"{_CHECKPOINT}.metadata.{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        f"{_CHECKPOINT}.filesystem._StorageInfo",
        *(f"{_CHECKPOINT}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
        *(f"{_CHECKPOINT}.planner.{name}" for name in ("TensorWriteData", "BytesIOWriteData")),
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        *_DTYPES,
    ]
)
"""Names allowed in `.metadata`. Megatron-Core stores the plans of all ranks in it, and torch the path of the folder: both are
ignored."""
TENSOR_NAMES = frozenset(["torch._utils._rebuild_tensor_v2", "collections.OrderedDict", *_STORAGES])
"""Names allowed in the pickle of a tensor."""
DAMAGE = (RejectedError, KeyError, TypeError, ValueError, AttributeError)
"""Exceptions that a value of an unexpected type or shape raises."""


class Chunk(NamedTuple):
    """Part of a tensor and its location in a file."""

    offset: tuple[int, ...]
    """Index of its first element in the full tensor."""
    shape: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    length: int
    """Size in bytes."""


class StoredTensor(NamedTuple):
    """Tensor of a DCP folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


class DcpFolder:
    """DCP folder, opened for reading. All metadata is checked on opening; tensors are read one at a time.

    Args:
        path: path of the folder.

    Raises:
        CheckpointError: the folder is damaged, or has content that Weft cannot read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: list[str] = []
        """Names of entries that are not tensors."""
        try:
            file = path / METADATA
            if file.stat().st_size > MAX_METADATA_BYTES:
                raise RejectedError(f"it has {file.stat().st_size} bytes, at most {MAX_METADATA_BYTES} are allowed")
            metadata = _state(read_pickle(file.read_bytes(), METADATA_NAMES), "metadata.Metadata")
            locations = {_chunk_index(key): _location(value) for key, value in metadata["storage_data"].items()}
            for name, entry in metadata["state_dict_metadata"].items():
                if type(name) is not str:
                    raise RejectedError("a name is not a string")
                if isinstance(entry, ObjectStub) and entry.name.endswith("metadata.BytesStorageMetadata"):
                    self.objects.append(name)
                else:
                    self.tensors[name] = _stored(name, _state(entry, "metadata.TensorStorageMetadata"), locations)
            for stored in self.tensors.values():
                for chunk in stored.chunks:
                    self._check_file(chunk)
        except (*DAMAGE, OSError) as error:
            raise self._error(f"{METADATA} is refused: {_message(error)}") from None

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a tensor into host memory.

        Args:
            index: index along the first dimensions: reads `tensor[index]`, from the chunks that hold it. By default the full
                tensor.

        Raises:
            CheckpointError: a chunk is damaged, or differs from the metadata in shape or dtype.
        """
        stored = self.tensors[name]
        axes = len(index)
        full = torch.empty(stored.shape[axes:], dtype=stored.dtype)
        for chunk in stored.chunks:
            inside = tuple(at - o for at, o in zip(index, chunk.offset[:axes], strict=True))
            if not all(0 <= at < size for at, size in zip(inside, chunk.shape[:axes], strict=True)):
                continue
            box = tuple(slice(o, o + size) for o, size in zip(chunk.offset[axes:], chunk.shape[axes:], strict=True))
            try:
                with (self.path / chunk.file).open("rb") as file:
                    file.seek(chunk.start)
                    full[box] = read_tensor(file.read(chunk.length), stored.dtype, chunk.shape)[inside]
            except (*DAMAGE, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
                raise self._error(f"{name} in {chunk.file} is refused: {_message(error)}") from None
        return full

    def _check_file(self, chunk: Chunk) -> None:
        file = self.path / chunk.file
        if not FILE_NAME.fullmatch(chunk.file):
            raise RejectedError(f"{chunk.file!r} is no valid file name; files are named __N_N.distcp")
        if file.is_symlink() or not file.is_file():
            raise RejectedError(f"{chunk.file} is missing")
        if min(chunk.start, chunk.length) < 0 or chunk.start + chunk.length > file.stat().st_size:
            raise RejectedError(f"{chunk.file} ends before byte {chunk.start + chunk.length}")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            problem,
            where=str(self.path),
            rule="a DCP folder is one that torch.distributed.checkpoint.save wrote; nothing in it is executed",
            fix="save it again with torch.distributed.checkpoint.save, on a disk with enough space",
        )


def _message(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _type_name(value: Any) -> str:
    """Type of a value for messages, without its content, which may be very large."""
    return (
        value.name
        if isinstance(value, ObjectStub)
        else value.text
        if isinstance(value, GlobalName)
        else type(value).__name__
    )


def _state(stub: Any, class_name: str) -> Any:
    """State of a pickled object, which must be of the given class."""
    if not (isinstance(stub, ObjectStub) and stub.name == f"{_CHECKPOINT}.{class_name}"):
        raise RejectedError(f"found {_type_name(stub)}, expected a {class_name}")
    return stub.state


def _sizes(value: Any) -> tuple[int, ...]:
    """Integers of a torch.Size or a tuple."""
    if isinstance(value, ObjectStub) and value.name == "torch.Size":
        value = value.arguments[0] if value.arguments else ()
    if not (isinstance(value, tuple) and all(type(size) is int and 0 <= size < 2**63 for size in value)):
        raise RejectedError(f"found {_type_name(value)}, expected a tuple of sizes from 0 to 2^63 - 1")
    return value


def _chunk_index(key: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _state(key, "metadata.MetadataIndex")
    offset = fields.get("offset")
    if type(fields["fqn"]) is not str:
        raise RejectedError("a name is not a string")
    return fields["fqn"], None if offset is None else _sizes(offset)


def _location(value: Any) -> tuple[str, int, int]:
    """File, first byte and number of bytes of a chunk."""
    fields = _state(value, "filesystem._StorageInfo")
    if fields.get("transform_descriptors"):
        raise RejectedError("chunks are compressed or otherwise transformed")
    location = fields["relative_path"], fields["offset"], fields["length"]
    if [type(part) for part in location] != [str, int, int]:
        raise RejectedError("the location of a chunk is not a file name and two integers")
    return location


def _stored(
    name: str, fields: Any, locations: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
) -> StoredTensor:
    properties = _state(fields["properties"], "metadata.TensorProperties")
    dtype = _type_name(properties[0])
    if dtype not in _DTYPES:
        raise RejectedError(f"{name} has the unsupported dtype {dtype}")
    shape, chunks = _sizes(fields["size"]), []
    for stub in fields["chunks"]:
        chunk = _state(stub, "metadata.ChunkStorageMetadata")
        offset, size = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if math.prod(size):
            chunks.append(Chunk(offset, size, *locations[name, offset]))
    for chunk in chunks:  # before memory is allocated for it
        if math.prod(chunk.shape) * _DTYPES[dtype].itemsize > chunk.length:
            raise RejectedError(f"{chunk.length} bytes are too few for a chunk of {name} of shape {chunk.shape}")
    inside = all(
        len(chunk.offset) == len(chunk.shape) == len(shape)
        and all(0 <= o <= o + size <= full for o, size, full in zip(chunk.offset, chunk.shape, shape, strict=True))
        for chunk in chunks
    )
    problem: str | None = "are not inside"
    if inside:
        rows = (len(chunks), len(shape))
        lows, sizes = (
            np.array([getattr(chunk, field) for chunk in chunks], np.int64).reshape(rows)
            for field in ("offset", "shape")
        )
        problem = find_tiling_error(lows, lows + sizes, shape)
    if problem:
        raise RejectedError(f"the chunks of {name} do not make up a tensor of shape {shape}: they {problem}")
    return StoredTensor(_DTYPES[dtype], shape, chunks)


def read_tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Tensor from the zip archive that torch.save wrote, with its elements taken from the archive as raw bytes.

    Args:
        raw: the zip archive, without compression. data.pkl describes the tensor (offset, sizes and strides), data/0 has the
            elements of its storage.
        dtype: expected dtype.
        shape: expected shape.

    Raises:
        RejectedError: the archive does not hold a tensor of this dtype and shape.
        zipfile.BadZipFile: the archive is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        files = {file.filename.partition("/")[2]: file for file in archive.infolist()}
        if any(file.compress_type != zipfile.ZIP_STORED for file in files.values()):
            raise RejectedError("its zip archive is compressed")
        if "byteorder" in files and archive.read(files["byteorder"]) != b"little":
            raise RejectedError("it is not little-endian")
        stub = read_pickle(archive.read(files["data.pkl"]), TENSOR_NAMES)
        if not (isinstance(stub, ObjectStub) and stub.name == "torch._utils._rebuild_tensor_v2"):
            raise RejectedError(f"found {_type_name(stub)}, expected a tensor")
        storage, start, size, strides = stub.arguments[:4]
        _, storage_type, key, _, _ = storage.arguments
        if (_STORAGES.get(storage_type.text), _sizes(size)) != (dtype, shape):
            raise RejectedError(f"it is a {storage_type.text} of shape {_sizes(size)}, not {dtype} of shape {shape}")
        elements = torch.frombuffer(bytearray(archive.read(files[f"data/{key}"])), dtype=dtype)
    (start,), strides = _sizes((start,)), _sizes(strides)
    last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if last >= len(elements):
        raise RejectedError(f"its storage has {len(elements)} elements, but its strides reach index {last}")
    return elements.as_strided(shape, strides, start)
