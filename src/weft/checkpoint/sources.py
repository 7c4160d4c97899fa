"""Tensor sources for conversion: tensors of any supported folder format, read one at a time by their checkpoint names."""

from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.anatomy.transformers import read_any_anatomy
from weft.checkpoint import dcp
from weft.checkpoint.manifest import FileEntry, TensorEntry, file_name
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, cast
from weft.checkpoint.restore import Reader
from weft.checkpoint.shard_file import (
    SAFETENSORS_DTYPES,
    ShardBuffer,
    SlotSpec,
    check_free_space,
    torch_dtype,
    write_bytes,
)
from weft.checkpoint.slices import PER_RANK_KINDS, named_weights
from weft.errors import CheckpointError
from weft.job import Model

T = TypeVar("T")
FILE_BYTES = 2**30  # maximum size of a file, and of its buffer in memory; a larger tensor gets a file by itself
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW states with the shape of the weight; AdamW also has a step count per weight."""


class TensorSource(NamedTuple):
    """Set of named tensors that can be read one at a time."""

    where: Path
    """Folder of the tensors."""
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtype and shape of each tensor, by checkpoint name: weights/..., buffers/..., exp_avg/..., and so on."""
    read: Callable[[str], Tensor]
    """Read a tensor by name."""


def from_checkpoint(reader: Reader) -> TensorSource:
    """Weights, buffers and optimizer states of a verified checkpoint."""
    specs = {
        name: (torch_dtype(entry.dtype, name), entry.shape)
        for name, entry in reader.manifest.tensors.items()
        if name.partition("/")[0] not in PER_RANK_KINDS
    }
    return TensorSource(reader.folder, specs, reader.read)


def from_huggingface(folder: Path, dtype: torch.dtype) -> TensorSource:
    """Weights and buffers of a Hugging Face folder, loaded into memory by Transformers."""
    source = Model(path=str(folder))
    model = build_plain(source, read_config(source), dtype)
    held: dict[str, Tensor] = {f"weights/{name}": value for name, value in _weights(model).items()}
    held |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    return TensorSource(folder, _specs(held), lambda name: held[name].detach())


def from_dcp(folder: dcp.DcpFolder, meta: PreTrainedModel) -> TensorSource:
    """Weights and buffers of a DCP folder that has the model's state_dict at the top level or under "model".

    Raises:
        CheckpointError: the folder has an entry that belongs neither to the model nor to its optimizer.
    """
    names = _dcp_names(folder, meta)
    unknown = [name for name in folder.tensors if name not in names and not name.startswith("optimizer.state.")]
    unknown += [name for name in folder.objects if not name.startswith(("optimizer.param_groups.", "train_state."))]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} entries belong neither to the model nor to its optimizer: {', '.join(unknown[:8])}",
            where=str(folder.path),
            rule='a DCP folder has the state_dict of a model, or {"model": ..., "optimizer": ...} of get_state_dict',
            fix="save it again without these entries",
        )
    saved: dict[str, str] = {}
    for name, target in names.items():
        if target in saved and not torch.equal(folder.read(name), folder.read(saved[target])):
            raise CheckpointError(
                f"{name} and {saved[target]} differ",
                where=str(folder.path),
                rule="tied weights are equal, and the configuration of the model ties these two",
                fix="set tie_word_embeddings = false in model.config",
            )
        saved.setdefault(target, name)
    return _dcp_source(folder, saved)


def _dcp_source(folder: dcp.DcpFolder, saved: dict[str, str]) -> TensorSource:
    """Source for tensors of a DCP folder; `saved` maps checkpoint names to DCP names."""
    specs = {target: (folder.tensors[name].dtype, folder.tensors[name].shape) for target, name in saved.items()}
    return TensorSource(folder.path, specs, lambda target: folder.read(saved[target]))


def _dcp_names(folder: dcp.DcpFolder, meta: PreTrainedModel) -> dict[str, str]:
    """Checkpoint names of the model's tensors by their names in a DCP folder."""
    table = state_names(meta)
    candidates = ({f"{prefix}{name}": to for name, to in table.items()} for prefix in ("model.", ""))
    present = [{name: to for name, to in names.items() if name in folder.tensors} for names in candidates]
    return max(present, key=len)


def optimizer_from_dcp(folder: dcp.DcpFolder, meta: PreTrainedModel) -> TensorSource:
    """AdamW state in a DCP folder; empty if the folder has none.

    Raises:
        CheckpointError: a tensor is not part of the AdamW state of the model's weights, or a part of the state is missing.
    """
    shapes = {name: tuple(weight.shape) for name, weight in _weights(meta).items()}
    saved: dict[str, str] = {}
    for name in folder.tensors:
        if name.startswith("optimizer.state."):
            weight, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            expected = {"step": (), **dict.fromkeys(MOMENTS, shapes.get(weight))}.get(kind)
            shape = folder.tensors[name].shape
            if expected is None or weight not in shapes or shape != expected:
                raise _no_adamw(folder, f"{name} of shape {shape} is not part of the AdamW state of the model")
            saved[f"{kind}/{weight}"] = name
    for weight in {name.partition("/")[2] for name in saved}:
        for kind in ("step", *MOMENTS):
            if f"{kind}/{weight}" not in saved:
                raise _no_adamw(folder, f"{kind} of {weight} is missing")
    return _dcp_source(folder, saved)


def _no_adamw(folder: dcp.DcpFolder, problem: str) -> CheckpointError:
    return CheckpointError(
        problem,
        where=str(folder.path),
        rule=f"AdamW has the states step, {' and '.join(MOMENTS)} for each weight, under the name of the weight",
        fix="save the result of torch.distributed.checkpoint.state_dict.get_state_dict, with AdamW without amsgrad",
    )


def write_files(
    sources: list[TensorSource], dtype: torch.dtype, folder: Path, kept: Container[str] = ()
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Write all tensors of some sources unsliced.

    Args:
        sources: tensors to write.
        dtype: dtype of the written weights and moments; all other tensors keep their dtype.
        folder: existing folder.
        kept: names of weights that keep their dtype, too.

    Raises:
        CheckpointError: a weight is too large for the dtype.

    Returns:
        Manifest entries of the files, and of the tensors.
    """
    readers = {name: source.read for source in sources for name in source.specs}
    changed = ("weights/", *(f"{kind}/" for kind in MOMENTS))
    slots = [
        SlotSpec(name, shape, dtype if name.startswith(changed) and name not in kept else own)
        for source in sources
        for name, (own, shape) in source.specs.items()
    ]
    check_free_space(folder, sum(slot.bytes for slot in slots))
    files, tensors = {}, {}
    for index, group in enumerate(file_groups(slots, lambda slot: slot.bytes)):
        file = file_name(index)
        files[file] = _write_file(group, readers, folder / file)
        for slot in group:
            tensors[slot.key] = TensorEntry(dtype=SAFETENSORS_DTYPES[slot.dtype], shape=slot.shape, file=index)
    return files, tensors


def _write_file(slots: list[SlotSpec], readers: dict[str, Callable[[str], Tensor]], path: Path) -> FileEntry:
    shard = ShardBuffer(slots)
    for slot in slots:
        shard.tensors[slot.key].copy_(cast(slot.key, readers[slot.key](slot.key), slot.dtype))
    return write_bytes(shard.buffer, path)


def file_groups(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group consecutive items into files of at most FILE_BYTES.

    Args:
        size: bytes of an item.
    """
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > FILE_BYTES:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def _weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return named_weights(model, read_any_anatomy(model, needs_roles=False))


def state_names(model: PreTrainedModel) -> dict[str, str]:
    """Checkpoint name of each entry of the model's state_dict; both entries of a tied weight have the same name."""
    weights = {id(weight): f"weights/{name}" for name, weight in _weights(model).items()}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {name: weights.get(id(value), f"buffers/{name}") for name, value in state.items()}


def _specs(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
