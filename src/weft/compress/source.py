"""Model to compress: its configuration, a copy without memory for weights, and its weights by name.

Weights are read from the files one at a time, where they are stored under the names that the model gives them. Families whose
names differ (Transformers stores the experts of a layer one by one) can only be loaded as a whole.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.build import build_as
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.compress.folder import WeightReader
from weft.errors import CheckpointError
from weft.job import Model


class Source(ExitStack):
    """A causal language model in a Hugging Face folder; a context manager."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None):
        """
        Args:
            folder: Hugging Face folder, with weights that are not quantized.
            dtype: dtype in which weights are read; None: as they are stored.

        Raises:
            CheckpointError: weights are missing or damaged.
            ModelError: the family is unknown, or its parts are not found.
        """
        super().__init__()
        self.folder = folder
        self.use_config(read_config(Model(path=str(folder))))
        reader = self.enter_context(WeightReader(folder))
        self.is_streamed = all(name in reader for name, _ in self.model.named_parameters())
        """True if weights are read one at a time."""
        self.names: list[str] = reader.names
        """Names of all weights."""
        self.read: Callable[[str], Tensor] = reader.read
        """Read a weight."""
        if dtype is not None:
            self.read = partial(_read_in, self.read, dtype)

    def use_config(self, config: Any) -> None:
        """Take a configuration, and build its model on the meta device."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model: Any = build_as("causal", config, torch.float32).eval()
        model.tie_weights()  # the context has made two weights of one
        self.config, self.model, self.anatomy = config, model, read_anatomy(model)

    def load_whole(self) -> Any:
        """Load the model with all weights; they are then read under the names that the model gives them."""
        if self.is_streamed:
            self.load("", self.model)
            return self.model
        stored = self.read(next((name for name in self.names if "norm" in name), self.names[-1])).dtype
        whole = build_plain(Model(path=str(self.folder)), self.config, stored).eval()
        tied_head = f"{self.anatomy.head}.weight" if self.anatomy.tied else ""
        weights = {name: weight for name, weight in whole.state_dict().items() if name != tied_head}
        self.names, self.read = list(weights), weights.__getitem__
        return whole

    def rename(self, config: Any, old_names: dict[str, str]) -> None:
        """Become the model of another configuration, which has some of the weights under other names.

        Args:
            config: configuration of the new model.
            old_names: by name of each weight of the new model, its name now.
        """
        read = self.read
        self.names, self.read = list(old_names), lambda name: read(old_names[name])
        self.use_config(config)

    def load(self, prefix: str, module: nn.Module) -> None:
        """Load all weights of a module that have no memory yet.

        Args:
            prefix: name of the module in the model; "" for the model.
            module: the module.
        """
        tied: dict[int, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            owner = module.get_submodule(name.rpartition(".")[0])
            if id(parameter) not in tied:
                full = f"{prefix}.{name}" if prefix else name
                tied[id(parameter)] = nn.Parameter(self.read(full), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], tied[id(parameter)])


def _read_in(read: Callable[[str], Tensor], dtype: torch.dtype, name: str) -> Tensor:
    tensor = read(name)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context with an empty folder next to `out`, which is removed at the end if it has not been renamed.

    Raises:
        CheckpointError: `out` exists.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists", rule="a compression never overwrites", fix="name another folder")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
