"""Adafactor: second moments of matrices as the product of a column and a row (Shazeer and Stern, Adafactor, 2018).

A matrix [rows, columns] keeps rows + columns numbers in place of two moments of its size. Updates are those of
`torch.optim.Adafactor`, which cannot update parameters that are cut over ranks: here sums over a dim that is cut are
all-reduced, and the row and the column are cut like the matrix.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from weft.memory.packed import unpack_tensor
from weft.memory.storages import local_part, sharded_axes


class Adafactor(torch.optim.Optimizer):
    """Adafactor for sharded and unsharded parameters; the last two dims of a parameter are factored.

    Args:
        groups: parameter groups; the "weight_decay" of a group is decoupled.
        lr: maximum relative step; an update is min(lr, 1 / sqrt(step)) times the root mean square of the parameter.
        beta2_decay: the second moment decays by 1 - step ** beta2_decay.
        smallest: minimum root mean square of a parameter, which lets small parameters grow.
        threshold: root mean square of an update, in multiples of the second moment's root, above which it is scaled down.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        beta2_decay: float = -0.8,
        smallest: float = 1e-3,
        threshold: float = 1.0,
    ):
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "smallest": smallest, "threshold": threshold}
        super().__init__(groups, {**defaults, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient. Collective over the ranks that hold parts of a parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.init_state(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        weight = local_part(parameter)
        gradient = gradient.to(weight.dtype)
        state["step"] += 1
        step, tiny = state["step"].to(weight.dtype), torch.finfo(weight.dtype).eps
        new, squares = step ** group["beta2_decay"], gradient.square()
        if parameter.ndim > 1:
            row = _mix(state["row_var"], _mean(squares, parameter, -1), new)
            column = _mix(state["col_var"], _mean(squares, parameter, -2), new)
            variance = row @ column / _mean(row, parameter, -2).clamp(min=tiny)
        else:
            variance = _mix(state["variance"], squares, new).clone()
        update = variance.clamp_(min=tiny * tiny).rsqrt_().mul_(gradient)
        size = _root_mean_square(unpack_tensor(weight), parameter).clamp(min=group["smallest"])
        excess = (_root_mean_square(update, parameter) / group["threshold"]).clamp(min=1.0)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(update * ((step**-0.5).clamp(max=group["lr"]) * size / excess))

    def init_state(self, parameter: Tensor) -> dict[str, Any]:
        """State of a parameter, made of zeros if there is none."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            if parameter.ndim > 1:
                state["row_var"], state["col_var"] = (state_like(parameter, dim) for dim in (-1, -2))
            else:
                state["variance"] = torch.zeros_like(parameter)
        return state


def state_like(parameter: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the shape of a parameter with size 1 along a dim, cut over the same ranks along its other dims."""
    dim, local = dim % parameter.ndim, local_part(parameter)

    def without(shape: torch.Size) -> list[int]:
        return [*shape[:dim], 1, *shape[dim + 1 :]]

    zeros = torch.zeros(without(local.shape), dtype=dtype or local.dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    cut = {axis for axis, cut_dim in sharded_axes(parameter) if cut_dim == dim}
    placements = [Replicate() if axis in cut else p for axis, p in enumerate(parameter.placements)]
    shape = torch.Size(without(parameter.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _mix(state: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """Move a state towards new values, and return its values."""
    held = local_part(state)
    values = unpack_tensor(held).lerp_(new, weight)
    if values is not held:
        held.copy_(values)
    return values


def _mean(values: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """Mean along a dim of a parameter that may be cut, with size 1 in place of the dim."""
    return _sum_over_ranks(values.sum(dim, keepdim=True), parameter, (dim % parameter.ndim,)) / parameter.shape[dim]


def _root_mean_square(values: Tensor, parameter: Tensor) -> Tensor:
    total = _sum_over_ranks(values.square().sum(), parameter, tuple(range(parameter.ndim)))
    return (total / math.prod(parameter.shape)).sqrt()


def _sum_over_ranks(part: Tensor, parameter: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum of the parts of the ranks over which one of the dims is cut."""
    for axis, dim in sharded_axes(parameter):
        if dim in dims:
            dist.all_reduce(part, group=parameter.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return part
