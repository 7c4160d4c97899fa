"""Model to compress: its configuration, a copy without memory for weights, and its weights by name.

Weights are read from the files one at a time, by the names that the model gives them. Transformers stores some under other
names, and a stack of experts as matrices; families in which a stored tensor has no rows of a weight are loaded as a whole.
A weight that is not changed keeps the dtype in which it is stored; the model runs in the dtype of its configuration, as the
library loads it.
"""

from collections.abc import Callable, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from weft.anatomy.build import build_as
from weft.anatomy.stored_rows import Rows, stored_rows
from weft.anatomy.transformers import kind_of_model, read_anatomy
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, cast, kept_in_float32
from weft.compress.folder import WeightReader
from weft.errors import ModelError
from weft.job import Model
from weft.memory.storages import saved_buffers


class _Stored(NamedTuple):
    """Storage of a weight."""

    shape: torch.Size
    rows: Rows


class Source(ExitStack):
    """A causal language model in a Hugging Face folder; a context manager."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None):
        """
        Args:
            folder: Hugging Face folder, with weights that are not quantized.
            dtype: dtype in which weights are read, but for those that stay in float32; None: as they are stored.

        Raises:
            CheckpointError: weights are missing or damaged, or too large for the dtype.
            ModelError: the family is unknown, its parts are not found, or the model is not a causal language model.
        """
        super().__init__()
        self.folder, config = folder, read_causal_config(folder)
        reader = self.enter_context(WeightReader(folder))
        self.dtype: torch.dtype = dtype or config.dtype or reader.dtype
        """Dtype in which the model runs."""
        self.use_config(config)
        parameters = dict(self.model.named_parameters())
        self._stored = {name: _Stored(x.shape, self._rows_in(reader, name, x)) for name, x in parameters.items()}
        self.is_streamed = all(stored.rows for stored in self._stored.values())
        """True if weights are read one at a time."""
        for name, buffer in saved_buffers(self.model).items():
            if rows := self._rows_in(reader, name, buffer):  # folders of an older version may not have it
                self._stored[name] = _Stored(buffer.shape, rows)
        known = {key for stored in self._stored.values() for key in stored.rows}
        if self.anatomy.tied:  # Transformers reads a copy of the embedding beside int8 values as another weight
            known.add(f"{self.anatomy.head}.weight")
        self.names: list[str] = [*self._stored, *(name for name in reader.names if name not in known)]
        """Names of all weights and buffers, and of other tensors in the folder."""
        self.read: Callable[[str], Tensor] = partial(_read, reader, self._stored, dtype, self._kept)
        """Read a weight by its name in the model."""

    def _rows_in(self, reader: WeightReader, name: str, tensor: Tensor) -> Rows:
        if name in reader:
            return {name: None}
        rows = stored_rows(self.model, name)
        fit = all(
            places is not None and key in reader and reader.shape(key) == (*places.shape[:-1], *tensor.shape[-1:])
            for key, places in rows.items()
        )
        return rows if fit else {}

    def use_config(self, config: Any) -> None:
        """Take a configuration, and build its model on the meta device."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model: Any = build_as("causal", config, torch.float32).eval()
        model.tie_weights()  # the context has made two weights of one
        model.set_experts_implementation("eager")  # one matrix after the other, whose inputs calibration sees
        self.config, self.model, self.anatomy = config, model, read_anatomy(model)
        self._kept = kept_in_float32(model, dict(model.named_parameters()), self.dtype)

    def load_whole(self) -> Any:
        """Load the model with all weights; they are then read under the names that the model gives them."""
        if self.is_streamed:
            self.load("", self.model)
            return self.model
        whole = build_plain(Model(path=str(self.folder)), self.config, self.dtype).eval()
        tied_head = f"{self.anatomy.head}.weight" if self.anatomy.tied else ""
        weights = {
            name: self.read(name) if name in self._stored and name in self._stored[name].rows else weight
            for name, weight in whole.state_dict().items()
            if name != tied_head
        }
        self.names, self.read = list(weights), weights.__getitem__
        return whole

    def rename(self, config: Any, old_names: dict[str, str]) -> None:
        """Become the model of another configuration, which has some of the weights under other names.

        Args:
            config: configuration of the new model.
            old_names: by name of each weight of the new model, its name now.
        """
        read, old = self.read, self._stored
        self.names, self.read = list(old_names), lambda name: read(old_names[name])
        self.use_config(config)
        self._stored = {
            new: _Stored(old[name].shape, {new: None} if name in old[name].rows else stored_rows(self.model, new))
            for new, name in old_names.items()
            if name in old
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the model's own weights and saved buffers."""
        return {name: stored.shape for name, stored in self._stored.items()}

    @property
    def merged(self) -> list[str]:
        """Weights that are stored as several tensors."""
        return [name for name, stored in self._stored.items() if len(stored.rows) > 1]

    def as_stored(self, name: str, tensor: Tensor, narrower: nn.Module | None = None) -> dict[str, Tensor]:
        """Tensors by the names under which the library stores a weight.

        Args:
            name: name of the weight in the model.
            tensor: the weight, or other numbers for each of its rows [..., columns].
            narrower: model of which the tensor is a weight, if it has fewer rows than here; None: it has as many.
        """
        columns = tensor.shape[-1:]
        rows = self._stored[name].rows if name in self._stored else {name: None}
        if narrower is not None and name not in rows:
            rows = stored_rows(narrower, name)
        return {
            key: tensor
            if places is None
            else tensor.reshape(-1, *columns)[places.flatten()].view(*places.shape[:-1], *columns)
            for key, places in rows.items()
        }

    def load(self, prefix: str, module: nn.Module) -> None:
        """Load all weights of a module that have no memory yet, and its buffers.

        Args:
            prefix: name of the module in the model; "" for the model.
        """
        tied: dict[int, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            owner = module.get_submodule(name.rpartition(".")[0])
            if id(parameter) not in tied:
                full = f"{prefix}.{name}" if prefix else name
                dtype = torch.float32 if full in self._kept else self.dtype
                tied[id(parameter)] = nn.Parameter(self.read(full).to(dtype), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], tied[id(parameter)])
        for name in saved_buffers(module):
            full = f"{prefix}.{name}" if prefix else name
            if full in self._stored:
                setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], self.read(full))


def read_causal_config(folder: Path) -> Any:
    """Configuration of a folder with a causal language model.

    Raises:
        ModelError: the family has no causal language model, or the folder has another model of it.
    """
    config = read_config(Model(path=str(folder)))
    found = (config.architectures or [""])[0]
    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Classes of other language models pass: folders of related families name them, and have the same tensors.
    known = hasattr(transformers, found) and not found.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    )
    if causal is None or (known and found != causal.__name__):
        kind = kind_of_model(config)
        raise ModelError(
            f"the folder has a {found}" if known else f"{config.model_type} is {kind or 'no causal language model'}",
            where=str(folder),
            rule="weft compress reads causal language models",
            fix="name the folder of one, as AutoModelForCausalLM.save_pretrained writes it",
        )
    return config


def _read(
    reader: WeightReader, table: dict[str, _Stored], dtype: torch.dtype | None, kept: Set[str], name: str
) -> Tensor:
    if name not in table or name in table[name].rows:
        tensor = reader.read(name)
    else:
        shape, rows = table[name]
        parts = {key: reader.read(key) for key in rows}
        tensor = torch.empty(shape, dtype=next(iter(parts.values())).dtype)
        for key, places in rows.items():
            if places is not None:
                tensor.view(-1, shape[-1])[places.flatten()] = parts[key].view(-1, shape[-1])
    return tensor if dtype is None or name in kept else cast(name, tensor, dtype)
