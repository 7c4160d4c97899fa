"""What a rank holds of a model and its optimizer, as boxes of whole tensors; and which of them it writes.

Names and shapes are those of the untouched model, so that a checkpoint knows nothing of the layout it was written under:
rows of packed matrices stand in the order of the model's authors, a tied weight has one name, a pipeline's blocks have theirs.

    weights/NAME          parameters          exp_avg/NAME ...      each tensor of the optimizer's state for a parameter
    buffers/NAME          buffers, those that a model leaves out of its state_dict too
    rng/00003/cpu ...     generators of rank 3
    feedback/00003/...    what its compressed messages have left out, and its momenta, where those are what is compressed
"""

import hashlib
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weft.anatomy.roles import Anatomy
from weft.comm.collectives import all_gather_rows
from weft.device.device import Device
from weft.errors import CheckpointError

OF_RANKS = ("rng", "feedback")  # kinds of tensors that belong to a rank, not to the model
SMALLEST_SHARE = 2**20  # bytes; ranks that hold the same box divide it, but not into smaller parts


class TensorSlice(NamedTuple):
    """A box of a whole tensor that this rank holds."""

    name: str
    tensor: Tensor
    """The box itself: a view of what the rank holds, on its device."""
    offset: tuple[int, ...]
    """Of its first element in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""


def model_pieces(model: nn.Module, anatomy: Anatomy) -> list[TensorSlice]:
    """All parameters and buffers of a parallelized model, as this rank holds them."""
    found = []
    for name, parameter in named_weights(model, anatomy).items():
        found += _boxes(f"weights/{name}", parameter.detach(), _packed(model, name))
    for name, buffer in model.named_buffers():
        found += _boxes(f"buffers/{name}", buffer, None)
    return found


def optimizer_pieces(model: nn.Module, anatomy: Anatomy, optimizer: torch.optim.Optimizer) -> list[TensorSlice]:
    """The optimizer's state of each parameter, as this rank holds it.

    Raises:
        CheckpointError: an optimizer keeps something else than tensors.
    """
    found = []
    for name, parameter in named_weights(model, anatomy).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the optimizer keeps {key} = {value!r} for {name}",
                    where=type(optimizer).__name__,
                    rule="what an optimizer keeps for a parameter are tensors",
                )
            found += _boxes(f"{key}/{name}", value, _packed(model, name) if value.ndim else None)
    return found


def feedback_pieces(model: Any, rank: int) -> list[TensorSlice]:
    """What this rank's compressed reductions carry on."""
    feedback = getattr(model, "feedback", None)
    tensors = feedback.tensors() if feedback is not None else {}
    return [
        TensorSlice(f"feedback/{rank:05d}/{name}", tensor, (0,) * tensor.ndim, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def reshard(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let parameters be those at rest, as an evaluation may have left weights gathered; and states where they live."""
    away = getattr(optimizer, "away_states", None)
    if away:
        away.finish()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_weights(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """Parameters by name, a tied one once: under the name of the embedding, also on a rank that has only the head."""
    tied = {f"{anatomy.head}.weight": f"{anatomy.embedding}.weight"} if anatomy.tied else {}
    return {tied.get(name, name): parameter for name, parameter in model.named_parameters()}


def generators(device: Device, rank: int) -> dict[str, Tensor]:
    """The state of every random number generator of this rank, by name of the checkpoint."""
    version, numbers, _ = random.getstate()
    found = {"cpu": torch.get_rng_state(), "python": torch.tensor([version, *numbers])}
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device.type).get_rng_state()
    return {f"rng/{rank:05d}/{kind}": state for kind, state in found.items()}


def set_generators(device: Device, states: dict[str, Tensor]) -> None:
    """Give the generators of this rank back what `generators` found."""
    for name, state in states.items():
        kind = name.rpartition("/")[2]
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == "device":
            torch.get_device_module(device.type).set_rng_state(state)
        else:
            version, *numbers = state.tolist()
            random.setstate((version, tuple(numbers), None))


def _packed(model: nn.Module, name: str) -> tuple[int, list[tuple[int, int, int]]] | None:
    """Of a parameter that holds several projections: its cut dim, and where its rows at rest stand with the authors."""
    owner, _, last = name.rpartition(".")
    try:
        packed: Any = getattr(model.get_submodule(owner), "packed", None)
    except AttributeError:  # the name of a tied weight whose module is on another rank
        return None
    if packed is None or last not in packed.dim:
        return None
    return packed.dim[last], list(_segments(packed.sizes, packed.ranks))


def _segments(sizes: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int, int]]:
    """(place at rest, place with the authors, length) of each stretch of rows; see `weft.parallel.weights.Packed`."""
    at_rest = 0
    for rank in range(ranks):
        start = 0
        for size in sizes:
            length = size // ranks
            yield at_rest, start + rank * length, length
            at_rest += length
            start += size


def _boxes(name: str, tensor: Tensor, packed: tuple[int, list[tuple[int, int, int]]] | None) -> list[TensorSlice]:
    offset: tuple[int, ...] = (0,) * tensor.ndim
    whole = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return []
    if packed is None:
        return [TensorSlice(name, tensor, tuple(offset), whole)]
    dim, segments = packed
    first, last = offset[dim], offset[dim] + tensor.shape[dim]
    found = []
    for at_rest, place, length in segments:
        low, high = max(first, at_rest), min(last, at_rest + length)
        if low < high:
            place_of_box = (*offset[:dim], place + low - at_rest, *offset[dim + 1 :])
            found.append(TensorSlice(name, tensor.narrow(dim, low - first, high - low), place_of_box, whole))
    return found


def divide(pieces: list[TensorSlice], device: torch.device) -> list[TensorSlice]:
    """What this rank writes of its pieces, so that each box is written once, by all ranks that hold it together.

    Every rank must call it. Of n ranks with the same box each writes one n-th along its first dim; small boxes are written
    whole, by one rank or another.

    Args:
        pieces: of this rank.
        device: where its group communicates.
    """
    keys = np.array([_key(piece) for piece in pieces], dtype=np.int64)
    world_size = dist.get_world_size()
    counts = all_gather_rows(torch.tensor([len(keys)], device=device), world_size).flatten()
    padded = np.zeros(int(counts.max()), dtype=np.int64)
    padded[: len(keys)] = keys
    gathered = all_gather_rows(torch.from_numpy(padded).to(device), world_size).cpu().numpy()
    holders: dict[int, list[int]] = {key: [] for key in keys.tolist()}
    for rank, row in enumerate(gathered):
        for key in row[np.isin(row, keys)].tolist():
            holders[key].append(rank)
    return [
        share for piece, key in zip(pieces, keys.tolist(), strict=True) for share in _share(piece, key, holders[key])
    ]


def _key(piece: TensorSlice) -> int:
    text = f"{piece.name} {piece.offset} {tuple(piece.tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _share(piece: TensorSlice, key: int, holders: list[int]) -> list[TensorSlice]:
    """The part of a box that this rank writes, if any."""
    tensor = piece.tensor
    rows = tensor.shape[0] if tensor.ndim else 1
    num_shares = max(1, min(len(holders), rows, math.ceil(tensor.nbytes / SMALLEST_SHARE)))
    place = (holders.index(dist.get_rank()) + key) % len(holders)  # small boxes are spread over their holders
    if place >= num_shares:
        return []
    if num_shares == 1:
        return [piece]
    start, stop = rows * place // num_shares, rows * (place + 1) // num_shares
    offset = (piece.offset[0] + start, *piece.offset[1:])
    return [piece._replace(tensor=tensor[start:stop], offset=offset)]
