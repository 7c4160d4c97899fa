"""Training state in the checkpoints of a script: weights and optimizer states, as Weft saves them."""

import atexit
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration

from weft.checkpoint.folders import clean, list_checkpoints, newest_checkpoint, step_of
from weft.checkpoint.loading import load_folder
from weft.checkpoint.snapshot import wait_for_writers
from weft.checkpoint.together import ask_rank_0, new_folder
from weft.device.device import Device
from weft.integrations.optimizer import PlacedOptimizer
from weft.training.own_checkpoints import OwnCheckpoints

STATE_FOLDER = "weft"
"""Folder in a checkpoint of a script with the training state: digested, without pickle, for any plan."""
PAIRS = "weft.pairs"
"""Key of the pairs of a dictionary whose keys are not text."""


class ScriptState:
    """Saves and loads the training state of all models that a script trains. Methods are collective."""

    def __init__(self, optimizers: Callable[[], list[PlacedOptimizer]], device: Device, torch_device: torch.device):
        """
        Args:
            optimizers: returns the optimizers of the script, in the order in which it has prepared them.
        """
        self.optimizers, self.device, self.torch_device = optimizers, device, torch_device
        self.facts: dict[str, Any] = {}
        """Values that JSON can hold, the same on every rank, which each checkpoint has beside its own `extra`."""
        self._writers: dict[PlacedOptimizer, OwnCheckpoints] = {}
        """Writer of the checkpoints of each optimizer."""
        atexit.register(wait_for_writers)  # a script may end right after a save

    def save(self, folder: str | Path, step: int, extra: dict[str, Any] | None = None) -> None:
        """Save weights and optimizer states in a checkpoint of the script, in the background.

        Args:
            folder: folder of the checkpoint. State that it has already is removed when the new one is complete.
            step: number of the step.
            extra: further values that JSON can hold, the same on every rank.
        """
        for index, optimizer in enumerate(self.optimizers()):
            writer, own = self._writer(optimizer), _folder(folder, index)
            writer.finish()
            number = ask_rank_0(partial(_next_number, own, step))
            writer.save(own / f"step-{number}", optimizer.steps, {**self.facts, **(extra or {})}, keep=1)

    @contextmanager
    def replacing(self, folder: str | Path | None) -> Iterator[Any]:
        """Context with the folder to save a checkpoint of a script in. Collective.

        A complete checkpoint in `folder` stays until the end of the context: it is saved beside it, and takes its place in one
        rename. Files that the new checkpoint lacks are those of the script, and are kept.

        Args:
            folder: folder of the checkpoint; None for one that accelerate will name.

        Raises:
            CheckpointError: the checkpoint cannot be written, so that the earlier one stays; the same on every rank.
        """
        if folder is None or not self.is_complete(folder):
            yield folder
            return
        with new_folder(Path(folder), partial(_add_files, Path(folder))) as part:
            yield str(part)
            self.finish()

    @contextmanager
    def place_of(self, folder: str | None, settings: ProjectConfiguration) -> Iterator[str | None]:
        """Context of a checkpoint of accelerate, with the folder to save in; None where accelerate names it. Collective.

        Earlier checkpoints stay until the new one is complete: that in `folder`, see `replacing`, and the oldest one, which
        accelerate alone would remove first.

        Args:
            folder: folder of the checkpoint.
            settings: settings of accelerate, with the number of checkpoints to keep.
        """
        self.finish()
        named, limit = settings.automatic_checkpoint_naming, settings.total_limit
        settings.total_limit = None
        try:
            with self.replacing(None if named else folder) as place:
                yield place
        finally:
            settings.total_limit = limit
        if limit and named:
            self.finish()
            ask_rank_0(partial(_remove_oldest, Path(settings.project_dir, "checkpoints"), limit))

    def is_in(self, folder: str | Path) -> bool:
        """True if a checkpoint has a training state of Weft; the answer of rank 0."""
        return bool(ask_rank_0(_folder(folder, 0).is_dir))

    def is_complete(self, folder: str | Path) -> bool:
        """True if the training state of a checkpoint is complete on the disk; the answer of rank 0."""
        return bool(ask_rank_0(partial(is_complete, Path(folder))))

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Load weights and optimizer states that were saved under any plan.

        Returns:
            The `extra` of `save`.

        Raises:
            CheckpointError: the state is damaged, incomplete, or of another model; the same on every rank.
        """
        extra: dict[str, Any] = {}
        for index, optimizer in enumerate(self.optimizers()):
            position = self._writer(optimizer).load(newest_checkpoint(_folder(folder, index)))
            optimizer.restart(position.next_batch)
            extra = position.extra or {}
        return extra

    def load_weights(self, folder: str | Path) -> None:
        """Load the weights of a checkpoint, with or without a training state of Weft; optimizers keep their states.

        Raises:
            CheckpointError: see `load`.
        """
        has_state = self.is_in(folder)
        for index, optimizer in enumerate(self.optimizers()):
            if has_state:
                self._writer(optimizer).load_weights(newest_checkpoint(_folder(folder, index)))
            else:
                load_folder(optimizer.distributed.model, Path(folder))

    def finish(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            CheckpointError: a checkpoint could not be written; the same on every rank.
        """
        for writer in self._writers.values():
            writer.finish()

    def forget(self) -> None:
        """Wait until all checkpoints are written, and forget the optimizers."""
        self.finish()
        self._writers.clear()

    def _writer(self, optimizer: PlacedOptimizer) -> OwnCheckpoints:
        if optimizer not in self._writers:
            model: Any = optimizer.distributed.model
            self._writers[optimizer] = OwnCheckpoints(model, optimizer.distributed, self.device, self.torch_device)
        return self._writers[optimizer]


def _next_number(own: Path, step: int) -> int:
    """Number of a new state: the step, or above that of the state that it replaces, as the newest is loaded; on rank 0."""
    clean(own)
    return max([step, *(step_of(path) + 1 for path in list_checkpoints(own))])


def is_complete(folder: Path, also: str = "") -> bool:
    """True if the training state of a checkpoint is complete on the disk.

    Args:
        folder: folder of the checkpoint.
        also: JSON file that its trainer writes last; a killed one leaves it missing or torn.
    """
    try:
        read = not also or bool(json.loads((folder / also).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return read and bool(list_checkpoints(_folder(folder, 0)))


def _add_files(folder: Path, part: Path) -> None:
    """Give a new checkpoint the further files of the earlier one, as links; on rank 0."""
    names = {path.name for path in part.iterdir()}
    for path in folder.iterdir():
        if path.name in names or path.name.partition("-")[0] == STATE_FOLDER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, part / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, part / path.name)


def _remove_oldest(parent: Path, limit: int) -> None:
    numbers = {path: path.name.removeprefix("checkpoint_") for path in parent.glob("checkpoint_*")}
    for path in sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))[
        :-limit
    ]:
        shutil.rmtree(path)


def _link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _folder(folder: str | Path, index: int) -> Path:
    """Folder of the training state of a model in a checkpoint of a script."""
    return Path(folder) / (f"{STATE_FOLDER}-{index}" if index else STATE_FOLDER)


def with_text_keys(value: Any) -> Any:
    """Value that JSON returns unchanged: dictionaries with other keys than text, as of MultiStepLR, become lists of pairs."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: with_text_keys(item) for key, item in value.items()}
        return {PAIRS: [[key, with_text_keys(item)] for key, item in value.items()]}
    return [with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def from_text_keys(value: Any) -> Any:
    """Inverse of `with_text_keys`; tuples have become lists."""
    if isinstance(value, dict):
        if set(value) == {PAIRS}:
            return Counter({key: from_text_keys(item) for key, item in value[PAIRS]})
        return {key: from_text_keys(item) for key, item in value.items()}
    return [from_text_keys(item) for item in value] if isinstance(value, list) else value
