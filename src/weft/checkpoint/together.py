"""Folders that all ranks write together, and that rank 0 gives their names."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.checkpoint.folders import replace_folder
from weft.checkpoint.manifest import sync_tree
from weft.comm.objects import broadcast_json, run_together
from weft.errors import CheckpointError
from weft.launch.scratch import part_folder


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
