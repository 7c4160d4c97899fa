"""Adafactor: second moments of matrices as the product of a column and a row (Shazeer and Stern, Adafactor, 2018).

A matrix [rows, columns] stores rows + columns elements instead of two moments of its size. Updates are those of
`torch.optim.Adafactor`, which cannot update sharded parameters: here sums over a sharded dim are all-reduced, and the row and
the column are sharded like the matrix.
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
        eps: minimum root of the second moment (None: the rounding unit of the dtype, of float32 for 16-bit dtypes), and
            minimum root mean square of a parameter, which lets small parameters grow.
        d: clipping threshold: an update with a larger root mean square is scaled down to it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ):
        super().__init__(groups, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient. Collective over the ranks that share a parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.init_state(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        weight = local_part(parameter)
        gradient = gradient.to(weight.dtype)
        state["step"] += 1
        step, (smallest_root, smallest_size) = state["step"].to(weight.dtype), group["eps"]
        if smallest_root is None:
            smallest_root = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps
        share, squares = step ** group["beta2_decay"], gradient.square()
        if parameter.ndim > 1:
            row = _lerp(state["row_var"], _mean(squares, parameter, -1), share)
            column = _lerp(state["col_var"], _mean(squares, parameter, -2), share)
            variance = row @ column / _mean(row, parameter, -2).clamp(min=smallest_root)
        else:
            variance = _lerp(state["variance"], squares, share).clone()
        update = variance.clamp_(min=smallest_root**2).rsqrt_().mul_(gradient)
        size = _root_mean_square(unpack_tensor(weight), parameter).clamp(min=smallest_size)
        excess = (_root_mean_square(update, parameter) / group["d"]).clamp(min=1.0)
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


def state_like(parameter: Tensor, dim: int) -> Tensor:
    """Zeros in the shape of a parameter with size 1 along a dim, sharded over the same ranks along its other dims."""
    dim, local = dim % parameter.ndim, local_part(parameter)

    def without(shape: torch.Size) -> list[int]:
        return [*shape[:dim], 1, *shape[dim + 1 :]]

    zeros = torch.zeros(without(local.shape), dtype=local.dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    reduced = {axis for axis, sharded in sharded_axes(parameter) if sharded == dim}
    placements = [Replicate() if axis in reduced else p for axis, p in enumerate(parameter.placements)]
    shape = torch.Size(without(parameter.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _lerp(state: Tensor, values: Tensor, share: Tensor) -> Tensor:
    """Move a state towards new values by a share of the difference, and return its values."""
    held = local_part(state)
    found = unpack_tensor(held).lerp_(values, share)
    if found is not held:
        held.copy_(found)
    return found


def _mean(values: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """Mean along a dim of a parameter, which may be sharded, with size 1 in place of the dim."""
    return _sum_over_ranks(values.sum(dim, keepdim=True), parameter, (dim % parameter.ndim,)) / parameter.shape[dim]


def _root_mean_square(values: Tensor, parameter: Tensor) -> Tensor:
    total = _sum_over_ranks(values.square().sum(), parameter, tuple(range(parameter.ndim)))
    return (total / math.prod(parameter.shape)).sqrt()


def _sum_over_ranks(part: Tensor, parameter: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum of the parts of the ranks over which one of the dims is sharded."""
    for axis, dim in sharded_axes(parameter):
        if dim in dims:
            dist.all_reduce(part, group=parameter.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return part
