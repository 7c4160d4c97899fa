"""Folders of torch.distributed.checkpoint (DCP), read without running anything that stands in them.

    .metadata          a pickle: names, shapes, formats, and where each chunk of a tensor lies
    __0_0.distcp       of rank 0: one zip of torch.save after the other, each with a small pickle and raw numbers

Both pickles are read by `weft.checkpoint.pickled`, which makes nothing and calls nothing, and may only name what such folders
consist of. Objects that are no tensors (numbers and lists of an optimizer's settings) are pickles too, and stay unread.
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

from weft.checkpoint.pickled import Made, Name, Refused, read_pickle
from weft.checkpoint.shard_file import FORMATS
from weft.errors import CheckpointError

METADATA = ".metadata"
FILE_NAME = re.compile(r"__\d+_\d+\.distcp")
LARGEST_METADATA = 2**30  # bytes; a chunk takes some hundred

_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = {str(dtype): dtype for dtype in FORMATS}
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
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        *_DTYPES,
    ]
)
"""All that `.metadata` may name. Of a path it is the name of the folder at the time of writing, which nobody looks at."""
TENSOR_NAMES = frozenset(["torch._utils._rebuild_tensor_v2", "collections.OrderedDict", *_STORAGES])
"""All that the pickle beside a tensor's numbers may name."""
DAMAGE = (Refused, KeyError, TypeError, ValueError, AttributeError)
"""What goes wrong where a value is not what it should be."""


class Chunk(NamedTuple):
    """A box of a tensor, and where it lies."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


class Stored(NamedTuple):
    """A tensor of a folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Folder:
    """A DCP folder. Everything its metadata says is checked when it is opened; tensors are read one at a time.

    Args:
        path: the folder.

    Raises:
        CheckpointError: it is damaged, or holds what Weft does not read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self.objects: list[str] = []
        """Names of what are no tensors."""
        try:
            file = path / METADATA
            if file.stat().st_size > LARGEST_METADATA:
                raise Refused(f"{file.stat().st_size} bytes are more than any metadata has")
            metadata = _state(read_pickle(file.read_bytes(), METADATA_NAMES), "metadata.Metadata")
            places = {_index(key): _place(value) for key, value in metadata["storage_data"].items()}
            for name, entry in metadata["state_dict_metadata"].items():
                if type(name) is not str:
                    raise Refused("a name that is no text")
                if isinstance(entry, Made) and entry.name.endswith("metadata.BytesStorageMetadata"):
                    self.objects.append(name)
                else:
                    self.tensors[name] = _stored(name, _state(entry, "metadata.TensorStorageMetadata"), places)
            for stored in self.tensors.values():
                for chunk in stored.chunks:
                    self._check_file(chunk)
        except (*DAMAGE, OSError) as error:
            raise self._refused(f"{METADATA} is refused: {_words(error)}") from None

    def read(self, name: str) -> Tensor:
        """A tensor, whole, on the host.

        Raises:
            CheckpointError: a chunk of it is damaged, or is not what the metadata says.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            box = tuple(slice(o, o + size) for o, size in zip(chunk.offset, chunk.shape, strict=True))
            try:
                with (self.path / chunk.file).open("rb") as file:
                    file.seek(chunk.start)
                    whole[box] = read_tensor(file.read(chunk.length), stored.dtype, chunk.shape)
            except (*DAMAGE, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
                raise self._refused(f"{name} in {chunk.file} is refused: {_words(error)}") from None
        return whole

    def _check_file(self, chunk: Chunk) -> None:
        file = self.path / chunk.file
        if not FILE_NAME.fullmatch(chunk.file):
            raise Refused(f"a file named {chunk.file!r}; files are named __N_N.distcp")
        if file.is_symlink() or not file.is_file():
            raise Refused(f"{chunk.file} is missing")
        if min(chunk.start, chunk.length) < 0 or chunk.start + chunk.length > file.stat().st_size:
            raise Refused(f"{chunk.file} ends before byte {chunk.start + chunk.length}")

    def _refused(self, problem: str) -> CheckpointError:
        return CheckpointError(
            problem,
            where=str(self.path),
            rule="a DCP folder is read as torch.distributed.checkpoint.save writes it, and nothing in it is executed",
            fix="save it again with torch.distributed.checkpoint.save, on a disk with room",
        )


def _words(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def _what(value: Any) -> str:
    """A short name of a value; never its contents, which may be endless."""
    return value.name if isinstance(value, Made) else value.text if isinstance(value, Name) else type(value).__name__


def _state(made: Any, ending: str) -> Any:
    """What an object was filled with, if it is of a class."""
    if not (isinstance(made, Made) and made.name == f"{_CHECKPOINT}.{ending}"):
        raise Refused(f"{_what(made)} stands where a {ending} should")
    return made.state


def _numbers(value: Any) -> tuple[int, ...]:
    """Of a torch.Size or a tuple."""
    if isinstance(value, Made) and value.name == "torch.Size":
        value = value.arguments[0] if value.arguments else ()
    if not (isinstance(value, tuple) and all(type(number) is int and 0 <= number < 2**63 for number in value)):
        raise Refused(f"{_what(value)} stands where a size should")
    return value


def _index(key: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _state(key, "metadata.MetadataIndex")
    offset = fields.get("offset")
    if type(fields["fqn"]) is not str:
        raise Refused("a name that is no text")
    return fields["fqn"], None if offset is None else _numbers(offset)


def _place(value: Any) -> tuple[str, int, int]:
    fields = _state(value, "filesystem._StorageInfo")
    if fields.get("transform_descriptors"):
        raise Refused("chunks are compressed or otherwise transformed")
    place = fields["relative_path"], fields["offset"], fields["length"]
    if [type(part) for part in place] != [str, int, int]:
        raise Refused("the place of a chunk is not a file and two numbers")
    return place


def _stored(name: str, fields: Any, places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]) -> Stored:
    properties = _state(fields["properties"], "metadata.TensorProperties")
    dtype = _what(properties[0])
    if dtype not in _DTYPES:
        raise Refused(f"{name} has the format {dtype}")
    shape, chunks = _numbers(fields["size"]), []
    for made in fields["chunks"]:
        chunk = _state(made, "metadata.ChunkStorageMetadata")
        offset, size = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        if math.prod(size):
            chunks.append(Chunk(offset, size, *places[name, offset]))
    for chunk in chunks:  # before room is made for it
        if math.prod(chunk.shape) * _DTYPES[dtype].itemsize > chunk.length:
            raise Refused(f"{chunk.length} bytes are too few for a chunk of {name} of shape {chunk.shape}")
    _check_cover(name, shape, chunks)
    return Stored(_DTYPES[dtype], shape, chunks)


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """That chunks lie inside of a tensor, do not overlap, and together are the whole."""
    inside = all(
        len(chunk.offset) == len(chunk.shape) == len(shape)
        and all(o + size <= whole for o, size, whole in zip(chunk.offset, chunk.shape, shape, strict=True))
        for chunk in chunks
    )
    if not inside or sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise Refused(f"the chunks of {name} do not make up a tensor of shape {shape}")
    lows = np.array([chunk.offset for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(shape))
    highs = lows + np.array([chunk.shape for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(shape))
    overlaps = (np.maximum(lows[:, None], lows) < np.minimum(highs[:, None], highs)).all(-1)
    if int(overlaps.sum()) != len(chunks):
        raise Refused(f"chunks of {name} overlap")


def read_tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor out of what torch.save wrote of it; numbers are taken as they lie in the zip.

    Args:
        raw: the whole zip, uncompressed inside: data.pkl says how the numbers of data/0 make up the tensor.
        dtype, shape: what it must be.

    Raises:
        Refused: it is something else.
        zipfile.BadZipFile: its bytes are damaged.
    """
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        files = {file.filename.partition("/")[2]: file for file in archive.infolist()}
        if any(file.compress_type != zipfile.ZIP_STORED for file in files.values()):
            raise Refused("it is compressed")
        if "byteorder" in files and archive.read(files["byteorder"]) != b"little":
            raise Refused("its bytes are in another order")
        made = read_pickle(archive.read(files["data.pkl"]), TENSOR_NAMES)
        if not (isinstance(made, Made) and made.name == "torch._utils._rebuild_tensor_v2"):
            raise Refused(f"{_what(made)} stands where a tensor should")
        storage, start, size, strides = made.arguments[:4]
        _, kind, key, _, _ = storage.arguments
        if (_STORAGES.get(kind.text), _numbers(size)) != (dtype, shape):
            raise Refused(f"it is a {kind.text} of shape {_numbers(size)}, not {dtype} of shape {shape}")
        numbers = torch.frombuffer(bytearray(archive.read(files[f"data/{key}"])), dtype=dtype)
    (start,), strides = _numbers((start,)), _numbers(strides)
    last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if last >= len(numbers):
        raise Refused(f"it has {len(numbers)} numbers, number {last} is wanted")
    return numbers.as_strided(shape, strides, start)
