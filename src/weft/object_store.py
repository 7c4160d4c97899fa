"""Folders on object stores: s3://, gs://, az://, and whatever else fsspec can write.

A store has no rename, and may fail or throttle at any moment: each file is read back after it was sent, its digest is compared
with that of the file on the disk, and what fails is repeated. Imports no torch.
"""

import hashlib
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from blake3 import blake3
from pydantic import AfterValidator, Field

from weft.errors import JobError, UnreadableError
from weft.plan import Table

EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Extra of this package with the library of a scheme."""
URL = re.compile(r"[a-z][a-z0-9+.-]*:/")  # a Path has one slash less
PROBE = re.compile(r"\.weft-[0-9a-f]{16}")  # of `StoreFolder.probe`
SEND_SECONDS = 600.0  # for the repetitions of one file in the background
START_SECONDS = 20.0  # for those of a request on which a run waits
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between repetitions
NO_RETRIES = {"total_max_attempts": 1}  # of botocore: `retrying` repeats
PARTS = 4  # of a file on S3 that are sent at once, and are in memory, each of 50 MiB or more
JITTER = random.Random()  # separate, since the state of Python's generator is part of checkpoints
PERMANENT = (FileNotFoundError, PermissionError)
CHUNK = 2**23  # bytes that are read at once
THREADS = 4  # that send the files of a folder

T = TypeVar("T")


def _below(name: str) -> str:
    """Refuse a path that leads out of its folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name} is outside of its folder")
    return name


class FileEntry(Table):
    """Size and digest of a file."""

    bytes: Annotated[int, Field(ge=0)]
    blake3: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileList(Table):
    """Files of a folder."""

    files: dict[Annotated[str, AfterValidator(_below)], FileEntry]


def is_url(path: str | Path) -> bool:
    """True for the URL of a store, also as a Path."""
    return URL.match(str(path)) is not None


def as_url(path: Path) -> str:
    """URL of a store that was read as a Path, which has one slash less; any other path as it is."""
    text = str(path)
    return (
        text
        if "://" in text or not is_url(path)
        else text.replace(":/", ":///" if text.startswith("file:") else "://", 1)
    )


def retrying(action: Callable[[], T], seconds: float) -> T:
    """Result of an action that may fail for a moment; repeated after pauses that double, with jitter.

    Args:
        action: raises exceptions of any class: each library of a store has its own.
        seconds: time after which it is not repeated any more.

    Raises:
        Exception: the last one; `PERMANENT` ones at once.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return action()
        except PERMANENT:
            raise
        except Exception:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause * JITTER.uniform(0.5, 1.0))  # ranks that were throttled together do not come back together
        pause = min(2 * pause, LONGEST_PAUSE)


def entry_of(path: Path) -> FileEntry:
    """Size and digest of a file on this machine."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, blake3).hexdigest()  # type: ignore[arg-type]
    return FileEntry(bytes=path.stat().st_size, blake3=digest)


def list_files(folder: Path) -> FileList:
    """All files below a folder of this machine, with their digests."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return FileList(files={path.relative_to(folder).as_posix(): entry_of(path) for path in paths})


def first_line(error: Exception) -> str:
    """First line of the text of an error, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class StoreFolder:
    """Folder on a store.

    Args:
        url: such as s3://bucket/runs/first. Credentials, endpoint and region are those of the environment.

    Raises:
        JobError: no library knows the scheme, or it is not installed.
    """

    unreachable = (
        "an export is written to a store that answers",
        "check the network and the credentials in the environment",
    )
    """Rule and fix of the error for a store that cannot be used."""

    def __init__(self, url: str):
        import fsspec  # not needed without a store

        self.url, scheme = url.rstrip("/"), url.partition(":")[0]
        # A listing that is kept would hide what other ranks have sent; an instance of before a fork has lost its thread.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if scheme == "s3":  # botocore would draw pauses from Python's generator, which belongs to training
            own = fsspec.config.conf.get("s3", {})
            options["config_kwargs"] = {**own.get("config_kwargs", {}), "retries": NO_RETRIES}
            options["max_concurrency"] = own.get("max_concurrency", PARTS)
        try:
            opened = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(scheme)
            raise JobError(
                f"{url} cannot be opened: {error}",
                where=url,
                rule="a URL begins with s3://, gs://, az:// or another scheme of fsspec, whose library is installed",
                fix=f'pip install "weft-train[{extra}]"' if extra else "correct the scheme, or install its library",
            ) from None
        self.fs: Any = opened[0]
        self.root: str = opened[1].rstrip("/")
        if scheme == "file":
            self.fs.auto_mkdir = True  # as stores, which have no folders

    def path(self, name: str = "") -> str:
        """Path of a file as fsspec knows it."""
        return f"{self.root}/{name}".rstrip("/")

    def names(self, name: str = "") -> list[str]:
        """Names of what is in this folder, or in one below it."""
        try:
            return [found.rstrip("/").rpartition("/")[2] for found in self.fs.ls(self.path(name), detail=False)]
        except FileNotFoundError:
            return []

    def has(self, name: str, file: FileEntry) -> bool:
        """True if a file is there with the size and digest; reads all of it."""
        path, digest = self.path(name), blake3()
        try:
            if self.fs.info(path)["size"] != file.bytes:
                return False
            with self.fs.open(path, "rb", block_size=CHUNK) as content:
                while piece := content.read(CHUNK):
                    digest.update(piece)
        except FileNotFoundError:
            return False
        return digest.hexdigest() == file.blake3

    def send(self, path: Path, name: str, file: FileEntry, seconds: float | None = None) -> None:
        """Copy a file to the store and read it back, unless it is there.

        Args:
            path: file on this machine.
            name: its name in this folder.
            file: its size and digest.
            seconds: time after which it is not repeated any more; None: `SEND_SECONDS`.

        Raises:
            Exception: it could not be copied in this time.
        """

        def attempt() -> None:
            with suppress(Exception):  # what cannot be read is sent again
                if self.has(name, file):
                    return
            try:
                self.fs.put_file(str(path), self.path(name))
            except FileNotFoundError as error:
                if not path.exists():
                    raise
                raise OSError(str(error)) from None  # an upload in parts is gone whose last answer was lost
            if not self.has(name, file):
                raise OSError(f"{name} has other bytes in the store than were sent")

        retrying(attempt, SEND_SECONDS if seconds is None else seconds)

    def send_all(self, folder: Path, files: Mapping[str, FileEntry], seconds: float | None = None) -> None:
        """Copy files of a folder to the store, each as `send` does."""
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda item: self.send(folder / item[0], item[0], item[1], seconds), files.items()))

    def receive(self, name: str, path: Path, file: FileEntry | None = None) -> str | None:
        """Copy a file from the store, and verify it.

        Args:
            name: its name in this folder.
            path: new file on this machine.
            file: its size and digest; None for a file that has its own.

        Returns:
            The problem if it is missing or damaged.

        Raises:
            UnreadableError: the store cannot be read.
        """
        problem = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # it may have been damaged on its way
            try:
                self.reach(lambda: self.fs.get_file(self.path(name), str(path)))
            except FileNotFoundError:
                problem = f"{name} is missing"
                continue
            found = entry_of(path)
            if file is None or found == file:
                return None
            problem = f"{name} has {found.bytes} bytes with the digest {found.blake3[:16]}..., "
            problem += f"{file.bytes} with {file.blake3[:16]}... were written"
        return problem

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None if it is not there."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None
        return content

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def reach(self, action: Callable[[], T]) -> T:
        """Result of a request on which a run waits.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            UnreadableError: the store does not answer, or refuses.
        """
        try:
            return retrying(action, START_SECONDS)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreadableError(
                f"the store cannot be used: {first_line(error)}",
                where=self.url,
                rule=self.unreachable[0],
                fix=self.unreachable[1],
            ) from None

    def probe(self) -> None:
        """Write and remove a small object.

        Raises:
            JobError: there is no such bucket.
            UnreadableError: the store does not answer, or this user may not write there.
        """
        name = f".weft-{secrets.token_hex(8)}"

        def write() -> None:
            self.fs.pipe_file(self.path(name), b"weft")
            self.remove_file(name)

        try:
            self.reach(write)
        except FileNotFoundError as error:
            raise JobError(
                f"nothing can be written there: {first_line(error)}",
                where=self.url,
                rule="the bucket or container of a URL exists",
                fix="create it, or correct the URL",
            ) from None
