"""Weights of Hugging Face folders, one at a time: read by name, and written in files of limited size."""

import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoint.plain_model import refused_weights, unusable_weight
from weft.checkpoint.shard_file import TORCH_DTYPES
from weft.checkpoint.weight_files import INDEX, PLAIN_DTYPES, WEIGHTS, stored_tensors

FILE_BYTES = 2**30


class WeightReader(ExitStack):
    """Opened safetensors files of a folder; a context manager."""

    def __init__(self, folder: Path):
        """
        Raises:
            CheckpointError: the folder has no safetensors files, or a damaged one.
        """
        super().__init__()
        self._stored = stored_tensors(folder)
        paths = {tensor.file for tensor in self._stored.values()}
        files: dict[Path, Any] = {path: self.enter_context(safe_open(path, "pt")) for path in paths}
        self._file = {name: files[tensor.file] for name, tensor in self._stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._file

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first tensor with floating-point numbers, which the library takes for that of the model."""
        return next(TORCH_DTYPES[tensor.dtype] for tensor in self._stored.values() if tensor.dtype in PLAIN_DTYPES)

    def check_values(self) -> None:
        """Read all tensors once, and refuse numbers that rounding would hide.

        Raises:
            CheckpointError: a weight is NaN, infinite or too large; names the first such tensor and its file.
        """
        found = {name: unusable_weight(self.read(name)) for name in self.names}
        if bad := {name: largest for name, largest in found.items() if largest is not None}:
            raise refused_weights(bad, lambda name: str(self._stored[name].file))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._file[name].get_tensor(name)
        return tensor


class WeightWriter:
    """Writes tensors into safetensors files of about `FILE_BYTES`, with an index if there are several.

    Args:
        folder: existing folder.
        discards: write nothing, on ranks other than the first.
    """

    def __init__(self, folder: Path, *, discards: bool = False):
        self.folder, self.discards, self.bytes = folder, discards, 0
        self._waiting: dict[str, Tensor] = {}
        self._files: dict[int, list[str]] = defaultdict(list)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors; their memory is freed when a file is full."""
        if self.discards:
            return
        self._waiting |= tensors
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the last file and the index."""
        self._flush()
        count = len(self._files)
        if self.discards:
            return
        if count == 1:
            self._path(0).rename(self.folder / WEIGHTS)
            return
        table: dict[str, str] = {}
        for number, names in self._files.items():
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self.folder / name)
            table |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": table}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        number = len(self._files)
        self._files[number] = list(self._waiting)
        self.bytes += sum(tensor.nbytes for tensor in self._waiting.values())
        save_file(self._waiting, self._path(number), metadata={"format": "pt"})
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"
