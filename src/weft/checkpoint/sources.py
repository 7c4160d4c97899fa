"""Tensors on their way from one kind of folder to another, read one at a time, by the names that a checkpoint gives them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.anatomy.transformers import read_anatomy
from weft.checkpoint import dcp
from weft.checkpoint.huggingface import build_plain
from weft.checkpoint.manifest import Entry, File, Part, file_name
from weft.checkpoint.model_config import read_config
from weft.checkpoint.restore import Reader
from weft.checkpoint.shard_file import FORMATS, Shard, Slot, check_room, torch_format, write_bytes
from weft.checkpoint.slices import named_weights
from weft.errors import CheckpointError
from weft.job import Model

FILE_BYTES = 2**30  # of a file, and so of memory; a larger tensor has a file of its own
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for a weight, in its shape; beside them it counts steps."""


class TensorSource(NamedTuple):
    """Tensors that can be read."""

    where: Path
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Format and shape of each, by name of the checkpoint: weights/..., buffers/..., exp_avg/... ."""
    read: Callable[[str], Tensor]


def of_checkpoint(reader: Reader) -> TensorSource:
    """The model in a verified checkpoint."""
    forms = {
        name: (torch_format(entry.format, name), entry.shape)
        for name, entry in reader.manifest.tensors.items()
        if name.startswith(("weights/", "buffers/"))
    }
    return TensorSource(reader.folder, forms, reader.read)


def from_huggingface(folder: Path, dtype: torch.dtype) -> TensorSource:
    """The model in a Hugging Face folder, as Transformers loads it: with its buffers, and held in memory, once."""
    source = Model(path=str(folder))
    model = build_plain(source, read_config(source), dtype)
    held: dict[str, Tensor] = {f"weights/{name}": value for name, value in _weights(model).items()}
    held |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    return TensorSource(folder, _forms(held), lambda name: held[name].detach())


def from_dcp(folder: dcp.Folder, meta: PreTrainedModel) -> TensorSource:
    """The model in a DCP folder: its state_dict, as it is or under "model".

    Raises:
        CheckpointError: a tensor or an object is neither the model's nor the optimizer's.
    """
    names = _names_of_dcp(folder, meta)
    strange = [name for name in folder.tensors if name not in names and not name.startswith("optimizer.state.")]
    strange += [name for name in folder.objects if not name.startswith("optimizer.param_groups.")]
    if strange:
        raise CheckpointError(
            f"{len(strange)} entries have no place in a model and its optimizer: {', '.join(strange[:8])}",
            where=str(folder.path),
            rule='a DCP folder has the state_dict of a model, or {"model": ..., "optimizer": ...} of get_state_dict',
            fix="save it again without them",
        )
    stock: dict[str, str] = {}
    for name, target in names.items():
        if target in stock and not torch.equal(folder.read(name), folder.read(stock[target])):
            raise CheckpointError(
                f"{name} and {stock[target]} differ",
                where=str(folder.path),
                rule="the configuration of the model ties them: they are one tensor",
                fix="set tie_word_embeddings = false in model.config",
            )
        stock.setdefault(target, name)
    forms = {target: (folder.tensors[name].dtype, folder.tensors[name].shape) for target, name in stock.items()}
    return TensorSource(folder.path, forms, lambda target: folder.read(stock[target]))


def _names_of_dcp(folder: dcp.Folder, meta: PreTrainedModel) -> dict[str, str]:
    """Names of the model's tensors in a DCP folder, and what a checkpoint calls them."""
    table = state_names(meta)
    found = ({f"{prefix}{name}": to for name, to in table.items()} for prefix in ("model.", ""))
    counted = [{name: to for name, to in names.items() if name in folder.tensors} for names in found]
    return max(counted, key=len)


def optimizer_of_dcp(folder: dcp.Folder, meta: PreTrainedModel) -> TensorSource:
    """The state of AdamW in a DCP folder; empty where there is none.

    Raises:
        CheckpointError: a tensor is not one that AdamW keeps for a weight of the model, or one of them is missing.
    """
    shapes = {name: tuple(weight.shape) for name, weight in _weights(meta).items()}
    stock: dict[str, str] = {}
    for name in folder.tensors:
        if name.startswith("optimizer.state."):
            weight, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            wanted = {"step": (), **dict.fromkeys(MOMENTS, shapes.get(weight))}.get(kind)
            if wanted is None or weight not in shapes or folder.tensors[name].shape != wanted:
                raise _no_adamw(folder, f"{name} of shape {folder.tensors[name].shape} is nothing that AdamW keeps")
            stock[f"{kind}/{weight}"] = name
    for weight in {name.partition("/")[2] for name in stock}:
        for kind in ("step", *MOMENTS):
            if f"{kind}/{weight}" not in stock:
                raise _no_adamw(folder, f"{kind} of {weight} is missing")
    forms = {target: (folder.tensors[name].dtype, folder.tensors[name].shape) for target, name in stock.items()}
    return TensorSource(folder.path, forms, lambda target: folder.read(stock[target]))


def _no_adamw(folder: dcp.Folder, problem: str) -> CheckpointError:
    return CheckpointError(
        problem,
        where=str(folder.path),
        rule=f"for a weight of the model AdamW keeps step, {' and '.join(MOMENTS)}, under the name of the weight",
        fix="save what torch.distributed.checkpoint.state_dict.get_state_dict gives, of an AdamW without options",
    )


def write_files(
    stocks: list[TensorSource], dtype: torch.dtype, folder: Path
) -> tuple[dict[str, File], dict[str, Entry]]:
    """Write all tensors whole, weights and moments in one format; the files, and what lies in them."""
    readers = {name: stock.read for stock in stocks for name in stock.forms}
    slots = [
        Slot(name, shape, dtype if name.startswith(("weights/", *(f"{kind}/" for kind in MOMENTS))) else own)
        for stock in stocks
        for name, (own, shape) in stock.forms.items()
    ]
    check_room(folder, sum(slot.bytes for slot in slots))
    files, found = {}, {}
    for number, group in enumerate(_groups(slots)):
        file = file_name(number)
        files[file] = _write_file(group, readers, folder / file)
        for slot in group:
            part = Part(file=file, key=slot.key, offset=(0,) * len(slot.shape), shape=slot.shape)
            found[slot.key] = Entry(format=FORMATS[slot.dtype], shape=slot.shape, parts=(part,))
    return files, found


def _write_file(slots: list[Slot], readers: dict[str, Callable[[str], Tensor]], path: Path) -> File:
    shard = Shard(slots)
    for slot in slots:
        shard.tensors[slot.key].copy_(readers[slot.key](slot.key))
    return write_bytes(shard.buffer, path)


def _groups(slots: list[Slot]) -> Iterator[list[Slot]]:
    """Neighbours that fill a file together."""
    group: list[Slot] = []
    size = 0
    for slot in slots:
        if group and size + slot.bytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(slot)
        size += slot.bytes
    if group:
        yield group


def _weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return named_weights(model, read_anatomy(model))


def state_names(model: PreTrainedModel) -> dict[str, str]:
    """What a checkpoint calls each entry of a state_dict; both names of a tied weight are one."""
    weights = {id(weight): f"weights/{name}" for name, weight in _weights(model).items()}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {name: weights.get(id(value), f"buffers/{name}") for name, value in state.items()}


def _forms(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
