"""Exports on object stores. A command writes a folder on this machine, whose files are then copied.

URL/.weft-export.json       list of the files, sent first and removed last: an export that is not complete
URL/model.safetensors
URL/config.json             sent after all others: no library loads a folder without it
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from weft.errors import CheckpointError, UnreadableError
from weft.inputs import check_new
from weft.launch.scratch import part_folder
from weft.object_store import (
    PROBE,
    SEND_SECONDS,
    FileList,
    StoreFolder,
    as_url,
    entry_of,
    first_line,
    is_url,
    list_files,
    retrying,
)

MARK = ".weft-export.json"
LAST = (
    *("model.safetensors.index.json", "metadata.json", ".metadata", "manifest.json"),
    *("adapter_config.json", "config.json"),
)
"""Files that readers of the formats look for first, in the order in which they are sent."""


@contextmanager
def local_folder(target: Path, source: Path) -> Iterator[Path]:
    """Context with the folder that a command writes; of a URL, a folder that is copied there at the end of the block.

    Args:
        target: new folder, or the URL of one.
        source: folder that the command reads; a folder that will be copied is written next to it, or, where this user cannot
            write, among temporary files.

    Raises:
        CheckpointError: the target exists, or has the beginning of another export.
        JobError: the URL is invalid, or its bucket does not exist.
        UnreadableError: the store does not answer.
    """
    if not is_url(target):
        check_new(target)
        yield target
        return
    store = StoreFolder(as_url(target))
    begun = _read_begun(store)
    store.probe()
    beside = source.absolute().parent
    parent = beside if os.access(beside, os.W_OK) else Path(tempfile.gettempdir())
    with part_folder(parent / "export-to-store") as part:
        yield part / "folder"
        files = list_files(part / "folder")
        if begun not in (None, files):
            raise _other_export(store)
        (part / MARK).write_text(files.model_dump_json(), encoding="utf-8")
        try:
            _send(store, part, files)
        except Exception as error:  # of any library
            raise UnreadableError(
                f"the export is not complete: {first_line(error)}",
                where=store.url,
                rule="each file is sent, read back, and sent again for ten minutes if it differs",
                fix="run the same command again; files that are there with their digests are not sent again",
            ) from None


def _send(store: StoreFolder, part: Path, files: FileList) -> None:
    folder = part / "folder"
    store.send(part / MARK, MARK, entry_of(part / MARK))
    last = sorted((LAST.index(Path(name).name), name) for name in files.files if Path(name).name in LAST)
    store.send_all(folder, {name: file for name, file in files.files.items() if Path(name).name not in LAST})
    for _, name in last:
        store.send(folder / name, name, files.files[name])
    retrying(lambda: store.remove_file(MARK), SEND_SECONDS)


def _read_begun(store: StoreFolder) -> FileList | None:
    """Files of an export that was interrupted; None if there is nothing below the URL.

    Raises:
        CheckpointError: there is something else.
    """
    names = store.reach(store.names)
    probes = [name for name in names if PROBE.fullmatch(name)]
    for name in probes:  # of killed commands
        store.reach(partial(store.remove_file, name))
    if len(names) == len(probes):
        return None
    try:
        return FileList.model_validate_json(store.reach(lambda: store.read(MARK)) or b"")
    except ValidationError:
        raise _other_export(store) from None


def _other_export(store: StoreFolder) -> CheckpointError:
    return CheckpointError(
        f"{store.url} has other files",
        rule="an export never overwrites, and continues an interrupted one only if all its files are the same",
        fix="name another URL, or remove what is there",
    )
