"""Training state in the checkpoints of a script: weights and optimizer states, as Weft saves them."""

import atexit
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint.folders import list_checkpoints, newest_checkpoint
from weft.checkpoint.huggingface import load_folder
from weft.checkpoint.snapshot import wait_for_writers
from weft.comm.objects import broadcast_json
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
            device: device interface of this rank.
            torch_device: device of this rank.
        """
        self.optimizers, self.device, self.torch_device = optimizers, device, torch_device
        self._writers: dict[PlacedOptimizer, OwnCheckpoints] = {}
        """Writer of the checkpoints of each optimizer."""
        atexit.register(wait_for_writers)  # a script may end right after a save

    def save(self, folder: str | Path, step: int, extra: dict[str, Any] | None = None) -> None:
        """Save weights and optimizer states in a checkpoint of the script, in the background.

        Args:
            folder: folder of the checkpoint. State that it has already is replaced.
            step: number of the step.
            extra: further values that JSON can hold, the same on every rank.
        """
        for index, optimizer in enumerate(self.optimizers()):
            writer, own = self._writer(optimizer), _folder(folder, index)
            writer.finish()
            if dist.get_rank() == 0 and own.exists():  # a script may write the same checkpoint again
                shutil.rmtree(own.rename(own.with_name(f".{own.name}.gone")))
            writer.save(own / f"step-{step}", optimizer.steps, extra)

    def is_in(self, folder: str | Path) -> bool:
        """True if a checkpoint has a training state of Weft; the answer of rank 0."""
        return bool(broadcast_json(_folder(folder, 0).is_dir()))

    def is_complete(self, folder: str | Path) -> bool:
        """True if the training state of a checkpoint is complete on the disk; the answer of rank 0."""
        return bool(broadcast_json(bool(list_checkpoints(_folder(folder, 0)))))

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
