"""The optimizer's update in parts, so that what it needs beside its inputs is bounded."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGEST_PART, SMALLEST_PART = 2**26, 2**20  # bytes of parameters
PARTS = 24


def chunked_step(optimizer: torch.optim.Optimizer, part_bytes: int | None = None) -> None:
    """`optimizer.step()`, a few parameters at a time; their gradients are dropped on the way.

    An optimizer leaves parameters without gradient alone: it steps once a part, and sees the gradients of that part only. So
    split weights (`weights.py`) are joined, and states that are away (`optimizer_state.py`) are here, for a part at a time.
    Any optimizer will do that treats each parameter by itself.

    Args:
        optimizer: over local or sharded parameters.
        part_bytes: of the parameters that step together; a larger parameter steps alone. None: a 24th of all, within bounds.
    """
    with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = {parameter: parameter.grad for parameter in with_gradient}
    for parameter in with_gradient:
        parameter.grad = None
    total = sum(map(_own_bytes, with_gradient))
    parts = list(_parts(with_gradient, part_bytes or min(max(total // PARTS, SMALLEST_PART), LARGEST_PART)))
    away = getattr(optimizer, "away_states", None)
    for part, following in zip(parts, [*parts[1:], []], strict=False):  # no part where nothing has a gradient
        if away:
            away.expect(part + following)
        for parameter in part:
            parameter.grad = gradients.pop(parameter)
        optimizer.step()
        for parameter in part:
            parameter.grad = None


def _parts(parameters: list[Tensor], part_bytes: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if part and size + _own_bytes(parameter) > part_bytes:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += _own_bytes(parameter)
    if part:
        yield part


def _own_bytes(parameter: Tensor) -> int:
    return parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes
