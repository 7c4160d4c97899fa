"""Manifest of a checkpoint: `manifest.json`, written last and read first.

    step-00000100/
        shard-00000.safetensors     written by rank 0
        shard-00001.safetensors     written by rank 1
        manifest.json

The manifest lists every file with its size and BLAKE3 digest, and every tensor with its shape, dtype and slices (`layouts`).
Its last line is the digest of all bytes before it, keyed if the run has a key (`weft.checkpoint.key`). No file of a checkpoint
is read before its manifest is verified, and no content is ever executed.
"""

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from blake3 import blake3
from pydantic import Field, ValidationError

from weft.checkpoint.boxes import find_tiling_error
from weft.checkpoint.layouts import Layout, Parts, Size
from weft.checkpoint.manifest_2 import upgrade
from weft.errors import CheckpointError, UnreadableError
from weft.object_store import FileEntry
from weft.own_code import package_version
from weft.plan import Table
from weft.precision.scaling import LossScale

NAME = "manifest.json"
PLAIN, KEYED = "blake3", "keyed_blake3"
"""JSON keys of the digest in the last line of the manifest, without and with a key."""
SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")
FOLDER_NAME = re.compile(r"step-(\d{8,})")
MAX_MANIFEST_BYTES = 2**30  # version 2 had a few hundred bytes for each tensor of each rank
THREADS = min(8, os.cpu_count() or 1)  # reading and hashing release the GIL
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "C64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes per element, by the dtype names of safetensors."""


class TensorEntry(Table):
    """Tensor of a checkpoint: whole in one file, or in the parts of a layout."""

    dtype: str
    """Dtype name of safetensors, such as F32."""
    shape: tuple[Size, ...]
    """Global shape."""
    file: Size | None = None
    """Number of the file that holds it."""
    layout: Size | None = None
    """Index of its layout."""


class Position(Table):
    """Training progress apart from tensors."""

    step: Size
    """Completed optimizer steps."""
    next_batch: Size
    """Index of the global batch of the next step; batch n starts at row n * global_batch_size."""
    loss_scale: LossScale
    """Loss scale of the next step."""
    rows_per_rank: tuple[Size, ...] = ()
    """Rows of each data rank from the next step on, if plan.parallel.rebalance has changed them."""
    skipped: tuple[Size, ...] = ()
    """Steps whose update was skipped because of a non-finite gradient or a loss spike."""
    excluded_batches: tuple[tuple[Size, Size], ...] = ()
    """Ranges (first, last + 1) of batches that were excluded by going back to an earlier checkpoint after a spike."""
    watch: dict[str, Any] | None = None
    """State of the spike detector."""
    parameter_groups: tuple[dict[str, Any], ...] = ()
    """Settings of the optimizer's parameter groups, such as learning rates, when the checkpoint was saved."""
    experts: dict[str, Any] | None = None
    """Homes of experts and their loads, where experts move to other ranks (`weft.parallel.experts.relocation`)."""
    extra: dict[str, Any] | None = None
    """Values that a custom training loop has saved."""


class Manifest(Table):
    """Content of `manifest.json`."""

    format: Literal["weft-checkpoint"] = "weft-checkpoint"
    version: Literal[3] = 3
    position: Position
    world_size: Annotated[int, Field(ge=1)]
    job: dict[str, Any]
    """Job with its plan resolved."""
    data: str = ""
    """`identity` of the prepared tokens; empty for a converted checkpoint."""
    run: str = ""
    """Id of the run that wrote the checkpoint."""
    code: dict[str, str] = {}  # noqa: RUF012  (pydantic copies it)
    """Digest of the file of each function of the user that determines updates, by key of the job."""
    versions: dict[str, str]
    """Versions of the libraries that wrote the checkpoint."""
    hosts: dict[str, str] = {}  # noqa: RUF012  (pydantic copies it)
    """Host that wrote each file, by name of the file; empty where all hosts share the folder."""
    files: dict[str, FileEntry]
    """Files by name."""
    tensors: dict[str, TensorEntry]
    """Tensors by name."""
    layouts: tuple[Layout, ...] = ()
    """Files, offsets and shapes of the slices of tensors; many tensors have the same layout."""

    def parts(self, name: str) -> Parts:
        """Slices of a tensor.

        Raises:
            ValueError: its layout is invalid.
        """
        entry = self.tensors[name]
        if entry.layout is None:
            return Parts.whole(entry.file or 0, entry.shape)
        return self.layouts[entry.layout].parts()

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files.values())


def file_name(index: int) -> str:
    """Name of a checkpoint file: the file of rank `index`, or the `index`-th file of a conversion."""
    return f"shard-{index:05d}.safetensors"


def library_versions() -> dict[str, str]:
    """Versions of Weft, PyTorch, Transformers and safetensors, recorded in each manifest."""
    return {
        "weft-train": package_version(),
        **{name: version(name) for name in ("torch", "transformers", "safetensors")},
    }


def write_manifest(manifest: Manifest, folder: Path, key: bytes | None = None) -> None:
    """Write `manifest.json` and flush it, and the folder's file names, to the disk.

    Args:
        manifest: content of the file.
        folder: checkpoint folder.
        key: key from `read_key` to sign the manifest; the same key is needed to read it.
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
    """Yield the JSON text in pieces: encoding millions of slices in one call would hold the GIL and block training."""
    fields = manifest.model_dump(mode="json", exclude={"tensors", "layouts"})
    for name, value in fields.items():
        yield f'{"{" if name == "format" else ","}\n"{name}": {json.dumps(value)}'
    yield ',\n"tensors": {'
    for index, (name, entry) in enumerate(manifest.tensors.items()):
        yield f"{',' if index else ''}\n{json.dumps(name)}: {entry.model_dump_json(exclude_none=True)}"
    yield '},\n"layouts": ['
    for index, layout in enumerate(manifest.layouts):
        yield f"{',' if index else ''}\n{layout.model_dump_json()}"
    yield "],\n"


def _hasher(key: bytes | None) -> Any:
    return blake3(key=key) if key else blake3()


def _last_line(digest: str, key: bytes | None) -> bytes:
    return f'"{KEYED if key else PLAIN}": "{digest}"}}\n'.encode()


def read_manifest(folder: Path, key: bytes | None = None, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Read and verify `manifest.json`: its digest, its fields, and that the slices tile each tensor.

    Args:
        folder: checkpoint folder.
        key: key that signed the manifest. With a key, an unsigned manifest is refused.
        share: (index, count): check the slices of every count-th tensor, from this one; other ranks check the others.

    Raises:
        CheckpointError: the folder has no manifest, or the manifest is damaged or refused.
        UnreadableError: the manifest cannot be read, or its key is not given.
    """
    path = folder / NAME
    if folder.is_symlink():
        raise _refused(path, "its folder is a link")
    try:
        raw = _read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            rule=f"a checkpoint is a folder with a {NAME}; that file is written last",
            fix="`weft checkpoint ls` lists the checkpoints of a run",
        ) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise unreadable_error(folder, error) from None
        raise _refused(path, f"it cannot be read: {error.strerror}") from None
    last = raw[raw.rstrip().rfind(b"\n") + 1 :]
    body, is_keyed = raw[: -len(last)], last.startswith(f'"{KEYED}"'.encode())
    if is_keyed and not key:
        raise UnreadableError(
            "the manifest cannot be checked: it was written with a key",
            where=str(path),
            rule="a signed checkpoint is read with its key",
            fix="name the key with checkpoint.key_file or --key-file",
        )
    if key and not is_keyed:
        raise _refused(path, "it was written without the key of checkpoint.key_file, so anyone may have written it")
    digest = _hasher(key)
    digest.update(body)
    if last != _last_line(digest.hexdigest(), key):
        raise _refused(path, "its bytes do not match the digest in its last line" + (" under this key" if key else ""))
    try:
        fields = json.loads(raw)
        del fields[KEYED if key else PLAIN]
        manifest = Manifest.model_validate(upgrade(fields) if fields.get("version") == 2 else fields)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, ValidationError) as error:
        raise _refused(path, str(error).splitlines()[0]) from None
    _check_position(path, manifest.position)
    for name in manifest.files:
        if not SHARD_NAME.fullmatch(name):
            raise _refused(path, f"{name!r} is no valid file name; files are named shard-NNNNN.safetensors")
    _check_tensors(path, manifest)
    _verify_slices(path, manifest, share)
    return manifest


def _read_regular(path: Path) -> bytes:
    """Read a regular file; refuse links, devices and fifos (a read could block), and files above the size limit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "it is not a regular file")
        if status.st_size > MAX_MANIFEST_BYTES:
            raise _refused(path, f"it has {status.st_size} bytes, at most {MAX_MANIFEST_BYTES} are allowed")
        return file.read(status.st_size)


def _check_position(path: Path, position: Position) -> None:
    named, scale = FOLDER_NAME.fullmatch(path.parent.name), position.loss_scale.value
    if named and int(named[1]) != position.step:
        raise _refused(path, f"its step is {position.step}, but its folder is named after step {int(named[1])}")
    if not 0 < scale < math.inf:
        raise _refused(path, f"its loss scale is {scale}, not positive and finite")


def _check_tensors(path: Path, manifest: Manifest) -> None:
    """Refuse unknown dtypes and locations, and tensors that do not fit, before anything allocates memory for them."""
    held, available = 0, manifest.bytes
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPE_BYTES:
            raise _refused(path, f"{name} has the unknown dtype {entry.dtype!r}")
        layout = -1 if entry.layout is None else entry.layout
        if (layout < 0) == (entry.file is None) or layout >= len(manifest.layouts):
            raise _refused(path, f"{name} has file {entry.file} and layout {entry.layout}")
        if entry.file is not None and file_name(entry.file) not in manifest.files:
            raise _refused(path, f"{name} names the file {file_name(entry.file)!r}, which the manifest does not list")
        held += math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if held > available:
            raise _refused(path, f"the bytes of tensors up to {name} do not fit in {available} bytes of files")


def _verify_slices(path: Path, manifest: Manifest, share: tuple[int, int]) -> None:
    """Check that the slices of tensors tile them; tensors with the same layout and shape are checked once."""
    places = {(e.layout, e.shape): name for name, e in manifest.tensors.items() if e.layout is not None}
    for name in list(places.values())[share[0] :: share[1]]:
        shape = manifest.tensors[name].shape
        try:
            files, offsets, shapes = manifest.parts(name)
        except ValueError as error:
            raise _refused(path, f"{name}: {error}") from None
        if missing := {file_name(number) for number in set(files.tolist())} - manifest.files.keys():
            raise _refused(path, f"{name} names the file {min(missing)!r}, which the manifest does not list")
        limits = np.array([min(size, 2**62) for size in shape], np.int64)
        inside = offsets.shape[1] == len(shape) and bool((offsets + shapes <= limits).all())
        if fault := find_tiling_error(offsets, offsets + shapes, shape) if inside else "are not inside of it":
            raise _refused(path, f"the slices of {name} {fault}")


def verify_file(folder: Path, name: str, file: FileEntry, writer: str | None = None) -> str | None:
    """Compare a file with its size and digest in the manifest. Returns the problem as a text; None if they match.

    Raises:
        UnreadableError: the file cannot be read.
    """
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is missing"
        if status.st_size != file.bytes:
            return f"{name} has {status.st_size} bytes, {file.bytes} were written"
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, blake3).hexdigest()  # type: ignore[arg-type]
    except FileNotFoundError:
        return f"{name} is missing" + (f"; {writer} has written it" if writer else "")
    except OSError as error:
        raise unreadable_error(folder, error) from None
    if digest == file.blake3:
        return None
    return f"{name} has the digest {digest[:16]}..., {file.blake3[:16]}... was written"


def verify_names(folder: Path, manifest: Manifest) -> str | None:
    """Look for a file that the manifest does not list. Returns the problem as a text; None if there is no such file.

    Raises:
        UnreadableError: the folder cannot be listed.
    """
    try:
        unlisted = sorted({path.name for path in folder.iterdir()} - manifest.files.keys() - {NAME})
    except OSError as error:
        raise unreadable_error(folder, error) from None
    return f"{unlisted[0]} is not part of the checkpoint" if unlisted else None


def verify_folder(folder: Path, key: bytes | None = None) -> Manifest:
    """Verify every byte of a checkpoint in this process, several files in parallel.

    Args:
        folder: checkpoint folder.
        key: key that signed the manifest.

    Raises:
        CheckpointError: verification failed; the message names the first bad file in the order of the manifest.
    """
    manifest = read_manifest(folder, key)
    files, hosts = manifest.files, manifest.hosts
    with ThreadPoolExecutor(THREADS) as threads:
        file_problems = threads.map(partial(verify_file, folder), files, files.values(), map(hosts.get, files))
        problems = [verify_names(folder, manifest), *file_problems]
    if problem := next(filter(None, problems), None):
        raise verification_error(folder, problem)
    return manifest


def verification_error(folder: Path | str, problem: str) -> CheckpointError:
    """Error for a checkpoint that fails verification."""
    return CheckpointError(
        problem,
        where=str(folder),
        rule="every file of a checkpoint has the size and digest of its manifest, and the folder has no other files",
        fix="use another step: --resume auto takes the newest checkpoint that passes verification",
    )


def unreadable_error(folder: Path, error: OSError) -> UnreadableError:
    """Error for a checkpoint, or a folder of checkpoints, that cannot be read at the moment."""
    return UnreadableError(
        f"a checkpoint cannot be read: {error.strerror or error}",
        where=str(error.filename or folder),
        rule="a checkpoint that cannot be read is not damaged: training does not continue from an earlier one",
        fix="mount the disk, or mend its permissions, and run the same command again; or name another checkpoint with --resume",
    )


def sync_folder(folder: Path) -> None:
    """Flush the file names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest is refused: {problem}",
        where=str(path),
        rule="a manifest is unchanged since it was written, and names only files in its folder",
        fix="use another step: --resume auto takes the newest checkpoint that passes verification",
    )
