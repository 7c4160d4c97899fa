"""Copies of folders of the token cache on an object store, data.remote_cache: other machines need not tokenize the same files.

    URL/tokens-0123456789abcdef01234567/manifest.json      files of a folder of data.cache
    URL/tokens-0123456789abcdef01234567.json               list of these files with their digests, sent last

A cache only saves time: whatever fails here is a line on the screen, and the folder is made on this machine.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from weft.data.prepared import Prepared
from weft.data.store import build_folder
from weft.errors import JobError, UnreadableError
from weft.job import Data
from weft.object_store import START_SECONDS, FileList, StoreFolder, entry_of, first_line, is_url, list_files

Log = Callable[[str], None]


def with_usable_store(data: Data, log: Log) -> Data:
    """Data table, without data.remote_cache if the store does not answer.

    Raises:
        JobError: the URL is invalid, or its library is not installed.
    """
    if not data.remote_cache:
        return data
    if not is_url(data.remote_cache):
        raise JobError(
            f"data.remote_cache = {data.remote_cache!r} is no URL",
            where="data.remote_cache",
            rule="it is the URL of a folder on an object store, beside data.cache",
            fix="write a URL such as s3://bucket/cache; data.cache names a folder of a file system",
        )
    store = StoreFolder(data.remote_cache)
    try:
        store.reach(store.names)
    except UnreadableError as error:
        log(f"data.remote_cache = {store.url} is not used: {error.what}")
        return data.model_copy(update={"remote_cache": ""})
    return data


def find_folder(folder: Path, data: Data, log: Log) -> bool:
    """True if a folder is in the cache, or was copied from the store, with every byte verified.

    Args:
        folder: folder of the cache, named after its contents.
        data: data table of a job.
        log: called with a line for a copy that is taken, or that cannot be used.

    Raises:
        DataError: the cache cannot be written.
    """
    if folder.is_dir() or not data.remote_cache:
        return folder.is_dir()
    store = StoreFolder(data.remote_cache)
    url = f"{store.url}/{folder.name}"
    try:
        if (content := store.reach(lambda: store.read(_list_name(folder)))) is None:
            return False
        files = FileList.model_validate_json(content).files
        with build_folder(folder, estimate=sum(file.bytes for file in files.values())) as scratch:
            for name, file in files.items():
                if problem := store.receive(f"{folder.name}/{name}", scratch / name, file):
                    raise ValueError(problem)
        log(f"copied from {url}")
    except UnreadableError as error:
        log(f"{url} is not used: {error.what}")
    except ValueError as error:
        log(f"{url} is damaged, and made anew: {first_line(error)}")
        _withdraw(store, folder, log)
    return folder.is_dir()


def share_folders(prepared: Prepared, data: Data, log: Log) -> None:
    """Copy the folders of the cache that a run uses to the store, unless complete copies are there.

    Args:
        prepared: data of the run.
        data: data table of its job.
        log: called with a line before and after each copy.
    """
    of_function = prepared.fields and ":" in data.source  # such records are named after what the function yields
    if not data.remote_cache or of_function:
        return
    store, cache = StoreFolder(data.remote_cache), Path(data.cache).expanduser().resolve()
    used = {Path(span.tokens) for span in (*prepared.train, *prepared.held_out)} | {Path(prepared.tokenizer or "/")}
    for folder in sorted({path for file in used for path in (file, file.parent) if path.parent == cache}):
        try:
            if store.reach(lambda folder=folder: store.read(_list_name(folder))) is not None:  # type: ignore[misc]
                continue
            log(f"copying {folder} to {store.url}")
            files = list_files(folder)
            store.send_all(cache, {f"{folder.name}/{name}": file for name, file in files.files.items()}, START_SECONDS)
            with tempfile.NamedTemporaryFile() as listed:
                Path(listed.name).write_text(files.model_dump_json(), encoding="utf-8")
                store.send(Path(listed.name), _list_name(folder), entry_of(Path(listed.name)), START_SECONDS)
        except Exception as error:  # of any library
            log(f"{folder.name} is not copied to {store.url}: {first_line(error)}")


def _list_name(folder: Path) -> str:
    return f"{folder.name}.json"


def _withdraw(store: StoreFolder, folder: Path, log: Log) -> None:
    """Remove the list of a damaged copy, so that `share_folders` sends what differs."""
    try:
        store.reach(lambda: store.remove_file(_list_name(folder)))
    except UnreadableError as error:
        log(f"{store.url}/{_list_name(folder)} cannot be removed: {error.what}")
