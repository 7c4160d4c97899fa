"""Copies of checkpoints on object stores: s3://, gs://, az://, and whatever else fsspec can write.

    URL/run_id                                      identity of the run whose copies these are
    URL/step-00000100/shard-00000.safetensors
    URL/step-00000100/manifest.json                 sent last and removed first: a folder without it is no copy

Files and their layout are those of checkpoints on the disk. A store has no rename, and may fail or throttle at any moment: each
file is read back after it was sent, its digest is compared with that of the manifest, and what fails is repeated.
"""

import hashlib
import random
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from weft.checkpoint.folders import expired, folder_of, sync_tree
from weft.checkpoint.manifest import (
    CHUNK,
    FOLDER_NAME,
    NAME,
    SHARD_NAME,
    THREADS,
    FileEntry,
    Manifest,
    read_manifest,
    sync_folder,
    verification_error,
    verify_file,
)
from weft.errors import CheckpointError, JobError, UnreadableError

RUN_ID = "run_id"
EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Extra of this package with the library of a scheme."""
URL = re.compile(r"[a-z][a-z0-9+.-]*:/")  # a Path has one slash less
SEND_SECONDS = 600.0  # for the repetitions of one file in the background
START_SECONDS = 20.0  # for those of a request on which a run waits
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between repetitions
NO_RETRIES = {"total_max_attempts": 1}  # of botocore: `retrying` repeats
PARTS = 4  # of a file on S3 that are sent at once, and are in memory, each of 50 MiB or more
JITTER = random.Random()  # a generator of its own: the state of Python's is part of checkpoints
PERMANENT = (FileNotFoundError, PermissionError)

T = TypeVar("T")


def is_url(path: str | Path) -> bool:
    """True for the URL of a store, also as a Path."""
    return URL.match(str(path)) is not None


def require_local(*paths: Path) -> None:
    """Refuse the URL of a store where a command reads folders.

    Raises:
        CheckpointError: names the command that copies a checkpoint from a store.
    """
    for path in map(str, filter(is_url, paths)):
        url = path if "://" in path else path.replace(":/", ":///" if path.startswith("file:") else "://", 1)
        raise CheckpointError(
            f"{url} is on an object store",
            rule="this command reads folders on this machine",
            fix=f"run `weft checkpoint fetch {url} FOLDER`, which copies and verifies a checkpoint, and name FOLDER",
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


class RemoteFolder:
    """Copies of the checkpoints of a run below a URL.

    Args:
        url: such as s3://bucket/runs/first. Credentials, endpoint and region are those of the environment.

    Raises:
        JobError: no library knows the scheme, or it is not installed.
    """

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
                where="checkpoint.remote, or --resume",
                rule="a URL begins with s3://, gs://, az:// or another scheme of fsspec, whose library is installed",
                fix=f'pip install "weft-train[{extra}]"' if extra else "correct the scheme, or install its library",
            ) from None
        self.fs: Any = opened[0]
        self.root: str = opened[1].rstrip("/")
        if scheme == "file":
            self.fs.auto_mkdir = True  # as stores, which have no folders

    # Copies

    def copies(self) -> dict[int, float]:
        """Times at which the complete copies were written, in seconds since the epoch, by step, newest step first."""
        written = {}
        for step in self._folders():
            with suppress(FileNotFoundError):
                written[step] = self.fs.modified(self._path(step, NAME)).timestamp()
        return written

    def _folders(self) -> list[int]:
        """Steps that have a folder, newest first."""
        names = (FOLDER_NAME.fullmatch(name) for name in self._names(self.root))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def _names(self, path: str) -> list[str]:
        """Names of what is in a folder."""
        try:
            return [name.rstrip("/").rpartition("/")[2] for name in self.fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _path(self, step: int, name: str = "") -> str:
        return f"{self.root}/step-{step:08d}" + f"/{name}" * bool(name)

    def url_of(self, step: int) -> str:
        """URL of the copy of a step."""
        return f"{self.url}/step-{step:08d}"

    def remove(self, step: int) -> None:
        """Remove a copy: its manifest first, so that it is never seen in part."""
        names = self._names(self._path(step))
        if NAME in names:
            self.fs.rm_file(self._path(step, NAME))
        if shards := [self._path(step, name) for name in names if SHARD_NAME.fullmatch(name)]:
            self.fs.rm(shards)
        with suppress(Exception):  # most stores have no folders
            self.fs.rmdir(self._path(step))

    def tidy(self, keep: int, keep_hours: float) -> None:
        """Remove copies as `retire` does, and what killed runs have left: older folders without a manifest."""
        written = self.copies()
        left = [step for step in self._folders() if step not in written and step < max(written, default=0)]
        for step in [*expired(written, keep, keep_hours), *left]:
            self.remove(step)

    def set_aside_after(self, last: int) -> list[str]:
        """Move the copies of later steps, which are trained again, to names such as step-00000100.aside-1.

        Returns:
            New names.
        """
        names, moved = set(self._names(self.root)), []
        for step in (step for step in self.copies() if step > last):
            index = 1
            while (aside := f"step-{step:08d}.aside-{index}") in names:
                index += 1
            files = sorted(self._names(self._path(step)), key=lambda name: name == NAME)
            for name in files:
                self.fs.cp_file(self._path(step, name), f"{self.root}/{aside}/{name}")
            self.remove(step)
            moved.append(aside)
        return moved

    # Files

    def has(self, step: int, name: str, file: FileEntry) -> bool:
        """True if a file is there with the size and digest of a manifest; reads all of it."""
        path, digest = self._path(step, name), blake3()
        try:
            if self.fs.info(path)["size"] != file.bytes:
                return False
            with self.fs.open(path, "rb", block_size=CHUNK) as content:
                while piece := content.read(CHUNK):
                    digest.update(piece)
        except FileNotFoundError:
            return False
        return digest.hexdigest() == file.blake3

    def send(self, path: Path, step: int, name: str, file: FileEntry) -> None:
        """Copy a file to the store and read it back, unless it is there.

        Args:
            path: file on this machine.
            step: step of its checkpoint.
            name: its name.
            file: its size and digest.

        Raises:
            Exception: it could not be copied for `SEND_SECONDS`.
        """

        def attempt() -> None:
            with suppress(Exception):  # what cannot be read is sent again
                if self.has(step, name, file):
                    return
            try:
                self.fs.put_file(str(path), self._path(step, name))
            except FileNotFoundError as error:
                if not path.exists():
                    raise
                raise OSError(str(error)) from None  # an upload in parts is gone whose last answer was lost
            if not self.has(step, name, file):
                raise OSError(f"{name} has other bytes in the store than were sent")

        retrying(attempt, SEND_SECONDS)

    def withdraw(self, step: int) -> None:
        """Remove the manifest of a copy whose files will change."""
        if NAME in self._names(self._path(step)):
            self.fs.rm_file(self._path(step, NAME))

    def receive(self, step: int, name: str, folder: Path, file: FileEntry | None = None) -> None:
        """Copy a file from the store into a folder, and verify it.

        Args:
            step: step of its checkpoint.
            name: its name.
            folder: folder on this machine.
            file: its size and digest; None for the manifest, which has its own.

        Raises:
            CheckpointError: it is missing or damaged.
            UnreadableError: the store cannot be read.
        """
        problem: str | None = None
        for _ in range(2):  # it may have been damaged on its way
            try:
                self.reach(lambda: self.fs.get_file(self._path(step, name), str(folder / name)))
            except FileNotFoundError:
                problem = f"{name} is missing"
                continue
            problem = verify_file(folder, name, file) if file else None
            if problem is None:
                return
        raise verification_error(self.url_of(step), problem or "")

    def read_manifest(self, step: int, key: bytes | None) -> Manifest:
        """Manifest of a copy.

        Raises:
            CheckpointError: it is missing or damaged.
            UnreadableError: the store cannot be read, or the key is not given.
        """
        with tempfile.TemporaryDirectory(prefix="weft-manifest-") as scratch:
            folder = folder_of(Path(scratch), step)
            folder.mkdir()
            self.receive(step, NAME, folder)
            return read_manifest(folder, key)

    # Runs

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
                rule="a store may have newer checkpoints: training does not begin, or continue from an earlier one, without it",
                fix="check the network and the credentials in the environment, and run the same command again; or leave "
                "checkpoint.remote empty",
            ) from None

    def probe(self) -> None:
        """Write and remove a small object.

        Raises:
            JobError: there is no such bucket.
            UnreadableError: the store does not answer, or this user may not write there.
        """
        path = f"{self.root}/.weft-{secrets.token_hex(8)}"

        def write() -> None:
            self.fs.pipe_file(path, b"weft")
            self.fs.rm_file(path)

        try:
            self.reach(write)
        except FileNotFoundError as error:
            raise JobError(
                f"nothing can be written there: {first_line(error)}",
                where=f"checkpoint.remote = {self.url!r}",
                rule="the bucket or container of a URL exists",
                fix="create it, or correct the URL",
            ) from None

    def read_run_id(self) -> str:
        """Identity of the run whose copies these are; "" without one."""
        try:
            return str(self.fs.cat_file(f"{self.root}/{RUN_ID}").decode(errors="replace"))
        except FileNotFoundError:
            return ""

    def claim(self, run_id: str) -> None:
        """Write the identity of a run, which from now on is the only one to send copies."""
        self.reach(lambda: self.fs.pipe_file(f"{self.root}/{RUN_ID}", run_id.encode()))


def locate(url: str) -> tuple[RemoteFolder, int]:
    """Folder of a run on a store, and a step: that of a URL of a copy, or the newest copy.

    Raises:
        JobError: see `RemoteFolder`.
        CheckpointError: there is no complete copy.
        UnreadableError: the store cannot be read.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if named := FOLDER_NAME.fullmatch(name):
        return RemoteFolder(parent), int(named[1])
    remote = RemoteFolder(url)
    newest = next(iter(remote.reach(remote.copies)), None)
    if newest is None:
        raise CheckpointError(
            "there is no complete checkpoint",
            where=url,
            rule="a copy is complete when its manifest.json is there, which is sent last",
            fix="name the URL of a run, or of a checkpoint in it, such as s3://bucket/runs/first/step-00000100",
        )
    return remote, newest


def fetch(url: str, folder: Path, key: bytes | None) -> Manifest:
    """Copy a checkpoint of a store into a new folder, which appears when every byte of it has been verified.

    Args:
        url: URL of the checkpoint, or of the run for its newest one.
        folder: folder that does not exist.
        key: key that signed the manifest.

    Raises:
        CheckpointError: it is missing or damaged.
        UnreadableError: the store cannot be read.
    """
    remote, step = locate(url)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".weft-fetch-", dir=folder.parent) as scratch:
        part = folder_of(Path(scratch), step)
        part.mkdir()
        remote.receive(step, NAME, part)
        manifest = read_manifest(part, key)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda item: remote.receive(step, item[0], part, item[1]), manifest.files.items()))
        sync_tree(part)
        part.rename(folder)
    sync_folder(folder.parent)
    return manifest


def entry_of(path: Path) -> FileEntry:
    """Size and digest of a file on this machine."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, blake3).hexdigest()  # type: ignore[arg-type]
    return FileEntry(bytes=path.stat().st_size, blake3=digest)


def first_line(error: Exception) -> str:
    """First line of the text of an error, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
