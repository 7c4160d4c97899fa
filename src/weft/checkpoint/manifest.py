"""What a checkpoint says about itself: `manifest.json`, the last file of a folder to be written and the first to be read.

    step-00000100/
        shard-00000.safetensors     what rank 0 wrote
        shard-00001.safetensors
        manifest.json

The manifest names every file with its size and BLAKE3 digest, and every tensor with its shape, format and the files its parts
lie in. Its own last line is the digest of all bytes before it, with a key (`key`) if the run has one. Nothing is read from a
folder before its manifest is whole, and no byte that is read is ever executed.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from blake3 import blake3
from pydantic import Field, ValidationError

from weft.checkpoint.boxes import find_fault
from weft.errors import CheckpointError
from weft.plan import Table
from weft.precision.scaling import LossScale

NAME = "manifest.json"
PLAIN, KEYED = "blake3", "keyed_blake3"
"""Names of the digest in its last line."""
SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")
FOLDER_NAME = re.compile(r"step-(\d{8,})")
LARGEST_MANIFEST = 2**30  # bytes; a rank has some hundred bytes a tensor
CHUNK = 2**23
THREADS = min(8, os.cpu_count() or 1)  # reading and hashing free Python's lock
FORMAT_BYTES = {
    **dict.fromkeys(("F64", "I64", "C64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, by the names that safetensors gives to formats."""

Size = Annotated[int, Field(ge=0)]


class File(Table):
    """One file of a checkpoint."""

    bytes: Size
    blake3: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Part(Table):
    """A box of a tensor and where it lies."""

    file: str
    key: str
    """Its name in the file."""
    offset: tuple[Size, ...]
    """Of its first element in the whole tensor."""
    shape: tuple[Size, ...]


class Entry(Table):
    """One tensor of the checkpoint, by its global shape."""

    format: str
    shape: tuple[Size, ...]
    parts: tuple[Part, ...]
    """Boxes that do not overlap and together are the tensor."""


class Position(Table):
    """Where training stands, apart from tensors."""

    step: Size
    """Optimizer steps that are done."""
    next_batch: Size
    """Number of the global batch that the next step takes; batch n has the rows n * global_batch and so on."""
    loss_scale: LossScale
    """Of the next step."""
    skipped: tuple[Size, ...] = ()
    """Steps whose update was left out, because of a number that was not finite or a spike."""
    left_out: tuple[tuple[Size, Size], ...] = ()
    """Batches (first, one after the last) that training went back before, and left out."""
    watch: dict[str, Any] | None = None
    """State of the watch for spikes."""


class Manifest(Table):
    """The whole of `manifest.json`."""

    format: Literal["weft-checkpoint"] = "weft-checkpoint"
    version: Literal[1] = 1
    position: Position
    world_size: Annotated[int, Field(ge=1)]
    job: dict[str, Any]
    """The job with its plan resolved."""
    data: str = ""
    """`identity` of the prepared tokens; empty where nothing has been trained."""
    run: str = ""
    """Identity of the run that it was made by."""
    versions: dict[str, str]
    """Of the libraries that wrote it."""
    files: dict[str, File]
    tensors: dict[str, Entry]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def file_name(number: int) -> str:
    """Of a file: that of a rank with this number, where ranks wrote it."""
    return f"shard-{number:05d}.safetensors"


def library_versions() -> dict[str, str]:
    """What a manifest says of who wrote it."""
    return {name: version(name) for name in ("weft-train", "torch", "transformers", "safetensors")}


def write_manifest(manifest: Manifest, folder: Path, key: bytes | None = None) -> None:
    """Write `manifest.json` and wait until it, and the names of all files, are on the disk.

    Args:
        key: of `read_key`; who reads it needs the same.
    """
    path, digest = folder / NAME, _hasher(key)
    with path.open("wb") as file:
        for text in _dump(manifest):
            digest.update(text.encode())
            file.write(text.encode())
        file.write(_last_line(digest.hexdigest(), key))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _dump(manifest: Manifest) -> Iterator[str]:
    """The JSON in pieces: encoding millions of parts at once would hold up the training thread."""
    fields = manifest.model_dump(mode="json", exclude={"tensors"})
    for name, value in fields.items():
        yield f'{"{" if name == "format" else ","}\n"{name}": {json.dumps(value)}'
    yield ',\n"tensors": {'
    for number, (name, entry) in enumerate(manifest.tensors.items()):
        yield f"{',' if number else ''}\n{json.dumps(name)}: {entry.model_dump_json()}"
    yield "},\n"


def _hasher(key: bytes | None) -> Any:
    return blake3(key=key) if key else blake3()


def _last_line(digest: str, key: bytes | None) -> bytes:
    return f'"{KEYED if key else PLAIN}": "{digest}"}}\n'.encode()


def read_manifest(folder: Path, key: bytes | None = None) -> Manifest:
    """Read and check `manifest.json`: its digest, its fields, and that its parts make up its tensors.

    Args:
        key: that it was written with. With a key, a manifest without one is refused.

    Raises:
        CheckpointError: the folder has none, or it is damaged or refused.
    """
    path = folder / NAME
    if folder.is_symlink():
        raise _damaged(path, "its folder is a link")
    try:
        raw = _read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            rule=f"a checkpoint is a folder with a {NAME}, which is written last",
            fix="`weft checkpoint ls` lists the checkpoints of a run",
        ) from None
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}") from None
    last = raw[raw.rstrip().rfind(b"\n") + 1 :]
    body, is_keyed = raw[: -len(last)], last.startswith(f'"{KEYED}"'.encode())
    if is_keyed and not key:
        raise _damaged(path, "it was written with a key, which checkpoint.key_file or --key-file must name")
    if key and not is_keyed:
        raise _damaged(path, "it was written without the key of checkpoint.key_file: anybody may have written it")
    digest = _hasher(key)
    digest.update(body)
    if last != _last_line(digest.hexdigest(), key):
        raise _damaged(
            path, "its bytes do not match the digest in its last line" + (", made with this key" if key else "")
        )
    try:
        fields = json.loads(raw)
        del fields[KEYED if key else PLAIN]
        manifest = Manifest.model_validate(fields)
    except (ValueError, TypeError, RecursionError, ValidationError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    _check_position(path, manifest.position)
    for name in manifest.files:
        if not SHARD_NAME.fullmatch(name):
            raise _damaged(path, f"a file named {name!r}; files are named shard-NNNNN.safetensors")
    held: Counter[str] = Counter()
    for name, entry in manifest.tensors.items():
        _check_entry(path, name, entry, manifest.files)
        for part in entry.parts:
            held[part.file] += math.prod(part.shape) * FORMAT_BYTES[entry.format]
    for name, size in held.items():  # before anybody makes room for it
        if size > manifest.files[name].bytes:
            raise _damaged(
                path, f"{size} bytes of tensors cannot lie in {name}, which has {manifest.files[name].bytes}"
            )
    return manifest


def _read_regular(path: Path) -> bytes:
    """A file as it is, but no link, and nothing that could keep a reader waiting or that does not fit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path, "it is not a regular file")
        if status.st_size > LARGEST_MANIFEST:
            raise _damaged(path, f"{status.st_size} bytes are more than any manifest has")
        return file.read(LARGEST_MANIFEST)


def _check_position(path: Path, position: Position) -> None:
    named, scale = FOLDER_NAME.fullmatch(path.parent.name), position.loss_scale.value
    if named and int(named[1]) != position.step:
        raise _damaged(path, f"it is of step {position.step}, its folder is named after step {int(named[1])}")
    if not 0 < scale < math.inf:
        raise _damaged(path, f"its loss scale is {scale}")


def _check_entry(path: Path, name: str, entry: Entry, files: dict[str, File]) -> None:
    if entry.format not in FORMAT_BYTES:
        raise _damaged(path, f"{name} has the format {entry.format!r}, which is not known")
    for part in entry.parts:
        if part.file not in files:
            raise _damaged(path, f"{name} lies in {part.file!r}, which is not among its files")
        inside = len(part.offset) == len(part.shape) == len(entry.shape) and all(
            offset + size <= whole for offset, size, whole in zip(part.offset, part.shape, entry.shape, strict=True)
        )
        if not inside:
            raise _damaged(path, f"a part of {name} at {part.offset}, {part.shape}, is not inside {entry.shape}")
    if len(entry.parts) == 1:  # as most have: it is inside, so that its size decides
        found, wanted = math.prod(entry.parts[0].shape), math.prod(entry.shape)
        fault = f"have {found} numbers of {wanted}" if found != wanted else None
    elif max(entry.shape, default=0) >= 2**62:
        fault = "are larger than any tensor"
    else:
        lows = np.array([part.offset for part in entry.parts], np.int64).reshape(len(entry.parts), len(entry.shape))
        sizes = np.array([part.shape for part in entry.parts], np.int64).reshape(lows.shape)
        fault = find_fault(lows, lows + sizes, entry.shape)
    if fault:
        raise _damaged(path, f"the parts of {name} {fault}")


def verify_file(folder: Path, name: str, file: File) -> str | None:
    """What is wrong with a file of a checkpoint; None if its size and digest are those of the manifest."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != file.bytes:
        return f"{name} has {size} bytes, {file.bytes} were written"
    try:
        with path.open("rb") as content:
            found = hashlib.file_digest(content, blake3).hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == file.blake3 else f"{name} has the digest {found[:16]}..., {file.blake3[:16]}... was written"


def verify_names(folder: Path, manifest: Manifest) -> str | None:
    """What is in a folder and not in its manifest; None if nothing."""
    strange = sorted({path.name for path in folder.iterdir()} - manifest.files.keys() - {NAME})
    return f"{strange[0]} is not part of the checkpoint" if strange else None


def verify_folder(folder: Path, key: bytes | None = None) -> Manifest:
    """Check every byte of a checkpoint, in this process alone, several files at once.

    Args:
        key: as of `read_manifest`.

    Raises:
        CheckpointError: with the first file, in the order of the manifest, that is not as it was written.
    """
    manifest = read_manifest(folder, key)
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda item: verify_file(folder, *item), manifest.files.items())
        problems = [verify_names(folder, manifest), *found]
    for problem in problems:
        if problem:
            raise refused(folder, problem)
    return manifest


def refused(folder: Path, problem: str) -> CheckpointError:
    """The error of a checkpoint that does not verify."""
    return CheckpointError(
        problem,
        where=str(folder),
        rule="every file of a checkpoint has the size and the digest of its manifest, and no other file is there",
        fix="use another step: --resume auto takes the newest that verifies",
    )


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest is refused: {problem}",
        where=str(path),
        rule="a manifest is read as it was written, and names nothing outside of its folder",
        fix="use another step: --resume auto takes the newest that verifies",
    )
