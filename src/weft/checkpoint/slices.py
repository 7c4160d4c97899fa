"""Slices of the model and optimizer state that each rank holds.

Names and shapes are those of the unmodified model, so that a checkpoint is independent of the layout that wrote it: packed
matrices and experts have their original order, a tied weight has one name, and the blocks of a pipeline keep their names.

    weights/NAME          parameters
    exp_avg/NAME ...      optimizer state of a parameter, one tensor per kind of state
    buffers/NAME          buffers, also non-persistent ones
    rng/00003/cpu ...     states of the random number generators of rank 3
    feedback/00003/...    error feedback of rank 3's compressed collectives, and its momenta if momenta are compressed
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.anatomy.roles import Anatomy
from weft.device.device import Device
from weft.errors import CheckpointError
from weft.parallel.runtime import runtime

PER_RANK_KINDS = ("rng", "feedback")  # kinds of tensors that belong to a rank, not to the model


class TensorSlice(NamedTuple):
    """Slice of a full tensor that this rank holds."""

    name: str
    tensor: Tensor
    """Elements of the slice: a view of the rank's local tensor, on its device."""
    offset: tuple[int, ...]
    """Index of its first element in the full tensor."""
    full_shape: tuple[int, ...]
    """Shape of the full tensor."""


def model_slices(model: nn.Module) -> list[TensorSlice]:
    """Slices of the parameters and buffers of a parallelized model that this rank holds; without those of a frozen base."""
    slices, trained_only = [], runtime(model).saves_trained_only
    for name, parameter in named_weights(model, runtime(model).anatomy).items():
        if trained_only and not parameter.requires_grad:
            continue
        slices += _slices(f"weights/{name}", parameter.detach(), _packed(model, name))
    for name, buffer in model.named_buffers():
        slices += _slices(f"buffers/{name}", buffer, None)
    return slices


def optimizer_slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[TensorSlice]:
    """Slices of the optimizer state that this rank holds.

    Raises:
        CheckpointError: the optimizer state of a parameter has a value that is not a tensor.
    """
    check_states(optimizer)
    slices = []
    for name, parameter in named_weights(model, runtime(model).anatomy).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            packed = _packed(model, name)
            if packed and (value.ndim != parameter.ndim or value.shape[packed[0]] != parameter.shape[packed[0]]):
                packed = None  # a scalar, or a mean over the packed dim
            slices += _slices(f"{key}/{name}", value, packed)
    return slices


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose states cannot be saved.

    Raises:
        CheckpointError: a state of a parameter is not a tensor.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the optimizer keeps {key} = {value!r} for a parameter",
                    where=type(optimizer).__name__,
                    rule="the optimizer state of a parameter consists of tensors",
                    fix="use an optimizer whose state values are tensors",
                )


def feedback_slices(model: nn.Module, rank: int) -> list[TensorSlice]:
    """Error feedback tensors of this rank's compressed collectives."""
    feedback = runtime(model).feedback
    tensors = feedback.tensors() if feedback is not None else {}
    return [
        TensorSlice(f"feedback/{rank:05d}/{name}", tensor, (0,) * tensor.ndim, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def named_weights(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """Parameters by name. A tied weight has the name of the embedding, also on a rank that holds only the head."""
    tied = {f"{anatomy.head}.weight": f"{anatomy.embedding}.weight"} if anatomy.tied else {}
    return {tied.get(name, name): parameter for name, parameter in model.named_parameters()}


def rng_states(device: Device, rank: int) -> dict[str, Tensor]:
    """States of the random number generators of torch and of the module random of this rank, by name in the checkpoint."""
    version, values, _ = random.getstate()
    states = {"cpu": torch.get_rng_state(), "python": torch.tensor([version, *values])}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device.type).get_rng_state()
    return {f"rng/{rank:05d}/{kind}": state for kind, state in states.items()}


def set_rng_states(device: Device, states: dict[str, Tensor]) -> None:
    """Restore the random number generators of this rank from the result of `rng_states`."""
    for name, state in states.items():
        kind = name.rpartition("/")[2]
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == "device":
            torch.get_device_module(device.type).set_rng_state(state)
        else:
            version, *values = state.tolist()
            random.setstate((version, tuple(values), None))


def _packed(model: nn.Module, name: str) -> tuple[int, list[tuple[int, int, int]]] | None:
    """Dim and row segments of a parameter that packs several projections, or of experts that have moved; None for others."""
    owner, _, last = name.rpartition(".")
    relocation = runtime(model).relocation
    if relocation is not None and owner in relocation.homes:
        homes = relocation.homes[owner]
        return None if homes.table is None else (0, [(slot, e, 1) for slot, e in enumerate(homes.expert_of)])
    try:
        packed = runtime(model).tensor_split.packed.get(model.get_submodule(owner))
    except AttributeError:  # a tied weight, named after a module on another rank
        return None
    if packed is None or last not in packed.dim:
        return None
    return packed.dim[last], list(_segments(packed.sizes, packed.ranks))


def _segments(sizes: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int, int]]:
    """Segments of packed rows as (row in sharded order, row in original order, number of rows).

    See `weft.parallel.weights.PackedLayout` for the two orders.
    """
    sharded_row = 0
    for rank in range(ranks):
        start = 0
        for size in sizes:
            length = size // ranks
            yield sharded_row, start + rank * length, length
            sharded_row += length
            start += size


def _slices(name: str, tensor: Tensor, packed: tuple[int, list[tuple[int, int, int]]] | None) -> list[TensorSlice]:
    """Slices of a full tensor that this rank holds: one, or one per segment of a packed parameter."""
    offset: tuple[int, ...] = (0,) * tensor.ndim
    full_shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(full_shape, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return []
    if packed is None:
        return [TensorSlice(name, tensor, tuple(offset), full_shape)]
    dim, segments = packed
    first, last = offset[dim], offset[dim] + tensor.shape[dim]
    slices = []
    for sharded_row, original_row, length in segments:
        low, high = max(first, sharded_row), min(last, sharded_row + length)
        if low < high:
            slice_offset = (*offset[:dim], original_row + low - sharded_row, *offset[dim + 1 :])
            slices.append(TensorSlice(name, tensor.narrow(dim, low - first, high - low), slice_offset, full_shape))
    return slices
