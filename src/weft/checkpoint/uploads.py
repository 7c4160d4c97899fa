"""Background copies of the checkpoints of a run to an object store, and downloads of them. Every rank copies its own share.

    writing threads     | step 100 | commit |          | step 200 | commit |
    uploading threads                       | files of step 100 | manifest, retention |  files of step 200 ...

Rank 0 names the next checkpoint to copy: the newest that is complete on the disk when the copy before is done. It publishes the
files of each rank in the store of the job, and sends the manifest when all ranks have counted up.
"""

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from weft.checkpoint.folders import begin_folder, commit_folder, folder_of, part_of, set_aside, step_of, sync_tree
from weft.checkpoint.manifest import NAME, Manifest, read_manifest, verification_error
from weft.checkpoint.remote import RemoteFolder, copy_name, locate
from weft.checkpoint.snapshot import yield_to_training
from weft.checkpoint.together import ask_rank_0
from weft.comm.objects import broadcast_json, run_together
from weft.errors import CheckpointError, UnreadableError
from weft.object_store import SEND_SECONDS, FileEntry, entry_of, first_line, retrying

REQUESTS_PER_SECOND = 256.0  # of all ranks that ask whether there is something to copy: 2 % of a core of the store
LEAST_POLL_SECONDS = 0.05


class Uploads:
    """Uploading thread of each rank. All ranks create one instance; `offer` and `go_back` are for rank 0.

    Args:
        remote: folder of the run on the store.
        run: folder of the checkpoints on the disk.
        run_id: identity of the run.
        keep: see `weft.checkpoint.folders.expired`, as `keep_hours`.
        keep_hours: see there.
    """

    def __init__(self, remote: RemoteFolder, run: Path, run_id: str, keep: int, keep_hours: float):
        self.remote, self.run, self.run_id, self.keep, self.keep_hours = remote, run, run_id, keep, keep_hours
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        self.prefix = f"uploads/{broadcast_json(secrets.token_hex(8))}"
        self.poll = max(LEAST_POLL_SECONDS, self.world_size / REQUESTS_PER_SECOND)
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.say: Callable[[str], None] = lambda text: None
        self.index = 0
        """Number of copies begun."""
        self.last: int | None = None
        """Step to which training went back; copies of later steps are to be moved aside."""
        self.next: tuple[Path, Mapping[str, FileEntry]] | None = None
        """Checkpoint to copy next."""
        self.current: Path | None = None
        """Checkpoint that is being copied."""
        self.busy = False

    def start(self, say: Callable[[str], None]) -> None:
        """Start the thread of this rank.

        Args:
            say: called on rank 0 with messages, from that thread.
        """
        self.say = say
        run = self._lead if self.rank == 0 else self._follow
        threading.Thread(target=run, name="weft-upload", daemon=True).start()

    def offer(self, folder: Path, files: Mapping[str, FileEntry]) -> Path | None:
        """Copy a complete checkpoint when the current copy is done. One that still waits is skipped for it.

        Returns:
            The checkpoint that is being copied now, which must stay.
        """
        with self.lock:
            skipped, self.next = self.next, (folder, files)
            if skipped:
                self._say_no_copy(step_of(skipped[0]), f"step {step_of(folder)} is complete")
            return self.current

    def go_back(self, step: int) -> None:
        """Move the copies of later steps aside, which will be trained again."""
        with self.lock:
            self.last = step
            if self.next and step_of(self.next[0]) > step:
                self.next = None

    def is_busy(self) -> bool:
        """True on rank 0 while something is to be copied or moved."""
        with self.lock:
            return self.busy or self.next is not None or self.last is not None

    def stop(self) -> None:
        """Begin nothing more."""
        self.stopped.set()

    def _say_no_copy(self, step: int, reason: str) -> None:
        self.say(f"no copy of step {step} at {self.remote.url}: {reason}; training continues")

    # Uploading thread of rank 0

    def _lead(self) -> None:
        self._yield()
        while not self.stopped.is_set():
            with self.lock:
                last, chosen = self.last, self.next
                self.last = self.next = None
                self.current, self.busy = chosen[0] if chosen else None, last is not None or chosen is not None
            if last is not None:
                self._move_aside(last)
            if chosen:
                self._copy(*chosen)
            if not self.busy:
                self.stopped.wait(self.poll)

    def _move_aside(self, last: int) -> None:
        try:
            for name in retrying(partial(self.remote.set_aside_after, last), SEND_SECONDS):
                self.say(f"{name.partition('.')[0]} at {self.remote.url} is now {name}")
        except Exception as error:
            self.say(f"the copies after step {last} at {self.remote.url} cannot be moved: {first_line(error)}")

    def _copy(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        """Copy a checkpoint, unless it is there; then remove old copies."""
        step = step_of(folder)
        try:
            manifest = entry_of(folder / NAME)
            if not retrying(partial(self.remote.has, copy_name(step, NAME), manifest), SEND_SECONDS):
                begin = time.perf_counter()
                retrying(partial(self.remote.withdraw, step), SEND_SECONDS)
                self._send_files(step, files)
                if (owner := retrying(self.remote.read_run_id, SEND_SECONDS)) not in ("", self.run_id):
                    raise OSError(f"it belongs to run {owner} by now")
                self.remote.send(folder / NAME, copy_name(step, NAME), manifest)
                self.say(f"{folder.name} is copied to {self.remote.url} in {time.perf_counter() - begin:.1f} s")
        except Exception as error:  # of any library
            self._say_no_copy(step, first_line(error))
            return
        try:
            retrying(partial(self.remote.tidy, self.keep, self.keep_hours), SEND_SECONDS)
        except Exception as error:
            self.say(f"old copies at {self.remote.url} cannot be removed: {first_line(error)}")

    def _send_files(self, step: int, files: Mapping[str, FileEntry]) -> None:
        """Let all ranks copy their files.

        Raises:
            OSError: a rank could not; names it.
        """
        self.index += 1
        listed = [(name, file.bytes, file.blake3) for name, file in files.items()]
        for rank in range(self.world_size):
            self.store.set(self._key(rank), json.dumps([step, listed[rank :: self.world_size]]))
        self._send_share()
        while self.store.add(self._key("count"), 0) < self.world_size:
            if self.stopped.wait(self.poll):
                raise OSError("the run has ended")
        self.store.delete_key(self._key("count"))
        if self.store.check([self._key("problem")]):
            raise OSError(self.store.get(self._key("problem")).decode())

    # Uploading threads of all ranks

    def _follow(self) -> None:
        self._yield()
        self.index = 1
        while not self.stopped.is_set():
            try:
                if self.store.check([self._key(self.rank)]):
                    self._send_share()
                    self.index += 1
            except Exception:  # the launcher has ended, and the ranks end with it
                return
            self.stopped.wait(self.poll)

    def _send_share(self) -> None:
        """Copy the files that rank 0 has given to this rank, and report."""
        step, files = json.loads(self.store.get(self._key(self.rank)))
        self.store.delete_key(self._key(self.rank))
        try:
            for name, size, digest in files:
                file = FileEntry(bytes=size, blake3=digest)
                self.remote.send(folder_of(self.run, step) / name, copy_name(step, name), file)
        except Exception as error:  # rank 0 must not wait for this rank
            self.store.set(self._key("problem"), f"rank {self.rank}: {first_line(error)}")
        self.store.add(self._key("count"), 1)

    def _key(self, name: int | str) -> str:
        return f"{self.prefix}/{self.index}/{name}"

    def _yield(self) -> None:
        """Give this thread, and that of an asynchronous library, the lowest priority."""
        yield_to_training()
        if self.remote.fs.async_impl:
            self.remote.fs.loop.call_soon_threadsafe(yield_to_training)


def download_newest(
    remote: RemoteFolder, after: int, until: int, run: Path, key: bytes | None, log: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Copy the newest complete checkpoint of a store that verifies into the folder of a run. Collective.

    Args:
        remote: folder of the run on the store.
        after, until: its step is later than `after`, and at most `until`.
        run: folder of the checkpoints on the disk.
        key: key that signed the manifests.
        log: called on every rank with a line for each copy that is refused, and for the one that is taken.

    Returns:
        Its folder and manifest; None if there is none.

    Raises:
        UnreadableError: the store cannot be read.
    """
    steps = ask_rank_0(lambda: list(remote.reach(remote.copies)))
    for step in (step for step in steps if after < step <= until):
        try:
            return download(remote, step, run, key, log)
        except UnreadableError:
            raise
        except CheckpointError as error:
            log(f"{remote.url_of(step)} is skipped: {error.what}")
    return None


def download_named(url: str, run: Path, key: bytes | None, log: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Copy the checkpoint at a URL, or the newest one below it, into the folder of a run. Collective; see `download`."""

    def find() -> list[str | int]:
        remote, step = locate(url)
        return [remote.url, step]

    found, step = ask_rank_0(find)
    return download(run_together(partial(RemoteFolder, found)), step, run, key, log)


def download(
    remote: RemoteFolder, step: int, run: Path, key: bytes | None, log: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Copy a checkpoint of a store into the folder of a run, its files divided over the ranks. Collective.

    Args:
        remote: folder of the run on the store.
        step: step of the checkpoint.
        run: folder of the checkpoints on the disk, which all ranks share.
        key: key that signed the manifest.
        log: called on every rank.

    Returns:
        Its folder, in which every byte has been verified, and its manifest.

    Raises:
        CheckpointError: the copy is damaged or incomplete; the same on every rank.
        UnreadableError: the store cannot be read.
    """
    log(f"copying {remote.url_of(step)} to {run}")
    rank, part = dist.get_rank(), part_of(run, step)

    def begin() -> None:
        begin_folder(run, step)
        remote.download(step, NAME, part)

    def receive() -> Manifest:
        manifest = read_manifest(part, key, (rank, dist.get_world_size()))
        if manifest.position.step != step:
            raise verification_error(remote.url_of(step), f"its manifest is that of step {manifest.position.step}")
        for name, file in list(manifest.files.items())[rank :: dist.get_world_size()]:
            remote.download(step, name, part, file)
        return manifest

    def commit() -> str:
        if folder_of(run, step).exists():
            log(f"{folder_of(run, step).name} on the disk is now {set_aside(folder_of(run, step)).name}")
        sync_tree(part)
        return str(commit_folder(run, step))

    try:
        ask_rank_0(begin)
        manifest = run_together(receive)
        return Path(ask_rank_0(commit)), manifest
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
