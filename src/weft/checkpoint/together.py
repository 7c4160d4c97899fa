"""Folders that all ranks write together, and that rank 0 gives their names."""

import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.backends.hierarchical import host_id
from weft.checkpoint.folders import replace_folder, sync_tree
from weft.comm.objects import broadcast_json, run_together, same_on_all
from weft.errors import CheckpointError, JobError
from weft.launch.scratch import part_folder

SHARING_SECONDS = 10.0  # delay allowed until a file of one host is visible on other hosts


def ask_rank_0(ask: Callable[[], Any]) -> Any:
    """Answer of rank 0, which JSON can hold; an error of rank 0 is raised on all ranks. Collective."""
    return broadcast_json(run_together(lambda: ask() if dist.get_rank() == 0 else None))


@contextmanager
def new_folder(folder: Path, complete: Callable[[Path], None] = lambda part: None) -> Iterator[Path]:
    """Context with the path of a new folder, which gets its name at the end of the block. Collective.

    An earlier folder of this name stays until then, and is removed afterwards; see `replace_folder`.

    Args:
        folder: final name.
        complete: called on rank 0 with the new folder before it gets its name.

    Raises:
        CheckpointError: a folder cannot be written, so that the earlier one stays; the same on every rank.
    """

    def commit(part: Path) -> None:
        complete(part)
        sync_tree(part)
        replace_folder(part, folder)

    with ExitStack() as stack:
        made = ask_rank_0(partial(_writing, folder, lambda: str(stack.enter_context(part_folder(folder)))))
        part = Path(made, folder.name)
        yield part
        ask_rank_0(partial(_writing, folder, partial(commit, part)))


def check_same_folder(folder: Path, where: str) -> None:
    """Refuse a folder of several hosts that they do not share, before ranks write into it. Collective; created if missing.

    Args:
        folder: folder that ranks of all hosts will write to.
        where: what names the folder, for the message.

    Raises:
        CheckpointError: rank 0 cannot write the folder; the same on every rank.
        JobError: a host has another folder at this path; the same on every rank.
    """
    if same_on_all(host_id()):
        return

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".weft-shared-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    path = folder / ask_rank_0(partial(_writing, folder, write))
    try:
        run_together(partial(_wait_for, path, where))
    finally:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)


def unshared_error(folder: Path, where: str, host: str) -> JobError:
    """Error for a folder that is not the same on all hosts.

    Args:
        folder: path of the folder.
        where: what names the folder.
        host: host whose folder is another one.
    """
    return JobError(
        f"the hosts do not share this folder: {folder.absolute()} on {host} is not that of the host of rank 0",
        where=f"{where} = {str(folder)!r}",
        rule="all hosts of a job write into the same folder, on a shared file system",
        fix="name a folder on a shared file system, the same on every host; without one, set checkpoint.per_host = true in a "
        "job of weft train: each host then keeps the files of its ranks on its own disk",
    )


def _wait_for(path: Path, where: str) -> None:
    deadline = time.monotonic() + SHARING_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise unshared_error(path.parent, where, platform.node())
        time.sleep(0.1)


def _writing(folder: Path, write: Callable[[], Any]) -> Any:
    try:
        return write()
    except OSError as error:
        raise CheckpointError(
            f"the folder cannot be written: {error}",
            where=str(folder),
            rule="rank 0 writes the folder beside its final name, and renames it when it is complete",
            fix="choose a folder on a disk with free space, which rank 0 may write",
        ) from None
