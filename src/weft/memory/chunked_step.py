"""Optimizer update in chunks of parameters, to bound its temporary memory."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.memory.optimizer_state import OffloadedStates
from weft.memory.storages import sharded_axes

LARGEST_CHUNK, SMALLEST_CHUNK = 2**26, 2**20  # bytes of parameters
CHUNKS = 24  # at least, within the bounds


def chunked_step(
    optimizer: torch.optim.Optimizer,
    offloaded: OffloadedStates | None = None,
    chunk_bytes: int | None = None,
    at_least: int = 1,
    step: Callable[[], object] | None = None,
    read_ahead: Callable[[list[Tensor]], object] | None = None,
) -> None:
    """Run `optimizer.step()` on a chunk of parameters at a time, and free the gradients of each chunk after its update.

    Optimizers skip parameters without a gradient, so each call of `step` gets the gradients of one chunk only. Split weights
    (`weights.py`) are unpacked, and offloaded states (`optimizer_state.py`) are on the device, for one chunk at a time. Works
    with any optimizer that updates each parameter independently.

    Args:
        optimizer: optimizer over local or sharded parameters.
        offloaded: its offloaded states, which are fetched a chunk ahead.
        chunk_bytes: bytes of the parameters per chunk; a larger parameter is a chunk by itself. None: a 24th of all
            parameters, between 1 and 64 MiB.
        at_least: minimum number of parameters per chunk, for optimizers whose ranks divide the parameters of a step.
        step: updates the parameters that have a gradient, in place of `optimizer.step`.
        read_ahead: called with the parameters of the next chunk before each update.
    """
    with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = {parameter: parameter.grad for parameter in with_gradient}
    for parameter in with_gradient:
        parameter.grad = None
    total = sum(map(_local_bytes, with_gradient))
    chunk_bytes = chunk_bytes or min(max(total // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK)
    # Parameters of one mesh each, which fused and foreach updates need.
    chunks = list(_chunks(with_gradient, chunk_bytes, at_least))
    settings = [dict(group) for group in optimizer.param_groups]
    for chunk, following in zip(chunks, [*chunks[1:], []], strict=False):  # no chunk if no parameter has a gradient
        if offloaded:
            offloaded.prefetch(chunk + following)
        if read_ahead:
            read_ahead(following)
        for parameter in chunk:
            parameter.grad = gradients.pop(parameter)
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.clear()  # some optimizers count their updates in a group
            group.update(values)
        step() if step else optimizer.step()
        for parameter in chunk:
            parameter.grad = None


def _chunks(parameters: list[Tensor], chunk_bytes: int, at_least: int) -> Iterator[list[Tensor]]:
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(mesh_of(parameter), []).append(parameter)
    for group in by_mesh.values():
        chunk: list[Tensor] = []
        size = 0
        for parameter in group:
            if len(chunk) >= at_least and size + _local_bytes(parameter) > chunk_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(parameter)
            size += _local_bytes(parameter)
        yield chunk


def mesh_of(parameter: Tensor) -> Any:
    """Device mesh of a sharded parameter; None for an ordinary tensor."""
    return getattr(parameter, "device_mesh", None)


def _local_bytes(parameter: Tensor) -> int:
    """Bytes of the parameter on a rank, the same on all ranks that share it, so that they form the same chunks."""
    ranks = math.prod(parameter.device_mesh.size(axis) for axis, _ in sharded_axes(parameter))  # type: ignore[attr-defined]
    return -(-parameter.numel() // ranks) * parameter.element_size()
