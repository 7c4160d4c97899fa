"""Load weights into the shards of a parallelized model: from a Hugging Face folder, a new model, or rank 0."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from weft.checkpoint.huggingface import dtype_named, own_class
from weft.checkpoint.plain_model import build_plain, find_slices, slices_of
from weft.checkpoint.stored_slices import SliceReader, StoredLayout
from weft.checkpoint.weight_files import plain_name
from weft.comm.objects import broadcast_json, run_together
from weft.errors import CheckpointError, ModelError
from weft.job import Model
from weft.memory.nf4 import is_nf4
from weft.memory.storages import plain_parts
from weft.parallel.runtime import allocate, packed_parameters
from weft.parallel.weights import to_local


def materialize(
    model: PreTrainedModel,
    source: Model,
    device: torch.device,
    change: Callable[[PreTrainedModel], None] = lambda plain: None,
    kind: str = "causal",
    *,
    change_reads_weights: bool = False,
) -> None:
    """Load or initialize the weights of a parallelized meta model, directly into the shards of each rank. Collective.

    Each rank reads its own slices of the files; no process holds more than its shards and one more slice. Where they are not
    found (`find_layout`), and of a newly initialized model, rank 0 holds the full model once, in host memory, and broadcasts it
    one tensor at a time. Newly initialized weights are bitwise equal to those of plain Transformers after
    `torch.manual_seed(init_seed)`.

    Args:
        model: parallelized model from `build_on_meta`.
        source: folder or configuration of the model.
        device: device of the shards.
        change: called on rank 0 with the full model, to which it may add adapters.
        kind: `task.kind` of the job.
        change_reads_weights: whether `change` needs the weights; else they may have no values yet.

    Raises:
        CheckpointError: raised on every rank if a rank cannot read the weights.
    """
    dtype = next(model.parameters()).dtype
    full: dict[str, torch.Tensor] = {}
    layout, problem = StoredLayout({}, {}), ""
    if dist.get_rank() == 0:
        config: Any = dict(model.config) if kind == "diffusion" else model.config
        try:
            found = None if change_reads_weights else find_slices(source, config, dtype, kind)
            plain, layout = found or (build_plain(source, config, dtype, kind), layout)
            change(plain)
            state = {**dict(plain.named_buffers()), **plain.state_dict()}
            full = {name: tensor for name, tensor in state.items() if plain_name(name) not in layout.spans}
        except (CheckpointError, ModelError) as error:
            problem = str(error)
    problem, places = broadcast_json([problem, layout.dump()])
    if problem:
        raise CheckpointError(problem)
    allocate(model, device)
    scatter_weights(model, full)
    read_weights(model, StoredLayout.parse(places))


def read_weights(model: Any, layout: StoredLayout) -> None:
    """Read the slices of this rank from the files of a Hugging Face folder. Collective: an error is raised on every rank.

    Args:
        model: parallelized model with allocated memory.
        layout: where the weights are stored; those that it does not name are not changed.
    """
    packed, read = packed_parameters(model), set[int]()

    def attempt() -> None:
        with SliceReader(layout) as reader:
            for name, own in {**dict(model.named_buffers()), **model.state_dict()}.items():
                local = to_local(own).detach()
                if plain_name(name) not in layout.spans or local.numel() == 0:
                    continue
                place = plain_parts(local)[0].data_ptr()  # a weight of several parts has no address itself
                if place in read:  # a tied weight has several names
                    continue
                read.add(place)
                offset, size = (0,) * own.ndim, tuple(own.shape)
                if isinstance(own, DTensor) and name not in packed:
                    size, offset = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
                dtype = torch.float32 if is_nf4(local) else local.dtype  # rounded once
                value = reader.read(plain_name(name), own.shape, offset, size, dtype)
                if name in packed:
                    _copy_shard(own, packed[name](value, True))
                else:
                    local.copy_(value)

    run_together(attempt)


def scatter_weights(model: PreTrainedModel, full: dict[str, torch.Tensor]) -> None:
    """Copy full weights, in host memory of rank 0, into the shards of all ranks: the inverse of `gather_weights`. Collective.

    Args:
        model: parallelized model with allocated memory.
        full: weights and buffers by name on rank 0, which are removed from it one by one; ignored on the other ranks.
    """
    leads = dist.get_rank() == 0
    own = {**dict(model.named_buffers()), **model.state_dict()}
    device = to_local(next(model.parameters())).device
    packed = packed_parameters(model)
    table = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in full.items()]
    for name, shape, dtype_name in broadcast_json(table):
        tensor = torch.empty(shape, dtype=dtype_named(dtype_name), device=device)
        if leads:
            tensor.copy_(full.pop(name))
        dist.broadcast(tensor, src=0)
        if name in own:
            _copy_shard(own[name], packed[name](tensor, True) if name in packed else tensor)


def load_folder(model: Any, folder: Path) -> None:
    """Load the weights of a Hugging Face folder into the shards of a parallelized model, as `materialize` does. Collective.

    Raises:
        CheckpointError: the folder does not have the weights of the model; the same on every rank.
    """
    full: dict[str, torch.Tensor] = {}
    layout, problem = StoredLayout({}, {}), ""
    if dist.get_rank() == 0:
        own = own_class(model)
        try:
            found = slices_of(folder, model.config, lambda: own(copy.deepcopy(model.config)))
            if found is not None:
                layout = found[1]
            else:
                full = dict(own.from_pretrained(folder, dtype=torch.float32, local_files_only=True).state_dict())
        except (AttributeError, CheckpointError, OSError, RuntimeError, SafetensorError, ValueError) as error:
            problem = f"the weights cannot be read: {error}"
    problem, places = broadcast_json([problem, layout.dump()])
    if problem:
        raise CheckpointError(problem, where=str(folder), fix="name a folder that save_pretrained has written")
    scatter_weights(model, full)
    read_weights(model, StoredLayout.parse(places))


def _copy_shard(own: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's shard out of a full tensor."""
    if isinstance(own, DTensor):
        shape, offset = compute_local_shape_and_global_offset(full.shape, own.device_mesh, own.placements)
        full = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        own = own.to_local()
    own.detach().copy_(full)
