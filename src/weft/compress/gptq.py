"""Rounding and pruning of a weight matrix that make up for their own errors on calibration inputs.

GPTQ (Frantar et al., 2022) rounds the columns of a matrix one after the other, and adds what the rounding of each changes in
the output to the columns after it. SparseGPT (Frantar and Alistarh, 2023) is the same with zeros: two of four weights, those
that cost the least output. Without inputs, both are rounding to the nearest value.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DAMPING = 0.01
"""Fraction of the mean diagonal added to the diagonal of the Hessian, so that it can be inverted."""
PANEL = 128
"""Columns whose errors are passed on together to the columns after them."""
SHRINKS = tuple(1 - step / 40 for step in range(13))
"""Factors of the range of a group that are tried: a smaller range clips the largest weight, and rounds all others less."""
WHOLE_RANGE = (1.0,)
"""The factor with which nothing is clipped."""


class Grid(NamedTuple):
    """Values that a weight can have."""

    scale: Tensor
    """Distance of neighbouring values [out, groups]."""
    zero: Tensor
    """Level of zero [out, groups], an integer; 0 in symmetric grids."""
    lowest: float
    highest: float
    """Lowest and highest level."""
    to_level: Callable[[Tensor], Tensor]
    """Round a number to the nearest level that the format has."""

    def nearest(self, column: Tensor, group: int) -> Tensor:
        """Nearest values of the grid, for a column [out] of a group."""
        return self._round(column, self.scale[:, group], self.zero[:, group])

    def nearest_of_all(self, weight: Tensor) -> Tensor:
        """Nearest values of the grid, for a matrix [out, in]."""
        groups = weight.unflatten(1, (self.scale.shape[1], -1))
        return self._round(groups, self.scale[..., None], self.zero[..., None]).flatten(1)

    def _round(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (self.to_level((values / scale + zero).clamp(self.lowest, self.highest)) - zero) * scale


def fit_grid(
    weight: Tensor,
    group_size: int,
    levels: tuple[float, float],
    *,
    symmetric: bool,
    importance: Tensor | None = None,
    shrinks: Sequence[float] = SHRINKS,
    to_level: Callable[[Tensor], Tensor] = torch.round,
    dtype: torch.dtype = torch.float32,
) -> Grid:
    """Grid with the smallest squared error of the weights, weighted by `importance`.

    Args:
        weight: [out, in], float32.
        group_size: consecutive columns with one scale; it divides `in`.
        levels: lowest and highest level, such as (-8, 7).
        symmetric: without zero points.
        importance: [in], weight of each column's error; None: equal.
        shrinks: factors of the range to choose from.
        to_level: rounds to a level of the format.
        dtype: dtype that scales are stored in.
    """
    lowest, highest = levels
    groups = weight.unflatten(1, (-1, group_size))
    errors_of = torch.ones(weight.shape[1]) if importance is None else importance
    errors_of = errors_of.view(-1, group_size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best, kept = torch.full_like(low, torch.inf), (torch.ones_like(low), torch.zeros_like(low))
    for shrink in shrinks:
        if symmetric:
            scale = torch.maximum(low / lowest, high / highest) * shrink
            zero = torch.zeros_like(scale)
        else:
            scale = (high - low) * shrink / (highest - lowest)
            zero = (lowest - low * shrink / scale.clamp(min=1e-30)).round().clamp(lowest, highest)
        scale = scale.to(dtype).float()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # of a group of zeros
        rounded = Grid(scale, zero, lowest, highest, to_level).nearest_of_all(weight).view_as(groups)
        error = ((rounded - groups).square() * errors_of).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        kept = torch.where(better, scale, kept[0]), torch.where(better, zero, kept[1])
    return Grid(*kept, lowest, highest, to_level)


def compensate(
    weight: Tensor, hessian: Tensor | None, grid: Grid | None, group_size: int, *, prune: bool
) -> tuple[Tensor, float]:
    """Round and prune a matrix, column by column, with compensation of the errors.

    Args:
        weight: [out, in], float32; not changed.
        hessian: [in, in], sum of x xT over the calibration inputs x of the layer; None: no compensation.
        grid: values that weights can have; None: any.
        group_size: columns of a group of the grid.
        prune: set two of four consecutive weights of each row to zero.

    Returns:
        The new matrix, and the squared error of its outputs on the calibration inputs, relative to that of a matrix of zeros.
    """
    original, width = weight, weight.shape[1]
    if hessian is None and not prune and grid is not None:
        rounded = grid.nearest_of_all(weight)
        size = weight.square().sum()
        return rounded, float((rounded - weight).square().sum() / size) if size else 0.0
    hessian = torch.eye(width) if hessian is None else hessian.clone()
    diagonal = hessian.diagonal()
    unused = diagonal == 0  # inputs that are always zero
    diagonal[unused] = 1.0
    weight = torch.where(unused, torch.zeros(()), weight)
    # Columns with the largest inputs are rounded first, while later ones can still make up for them; 2:4 needs its order.
    order = torch.arange(width) if prune else torch.argsort(diagonal, descending=True)
    factor = torch.linalg.cholesky(damped(hessian)[order][:, order])
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    weight, result = weight[:, order].clone(), torch.empty_like(weight)
    for start in range(0, width, PANEL):
        stop = min(start + PANEL, width)
        panel, errors = weight[:, start:stop].clone(), torch.empty(len(weight), stop - start)
        keep = torch.ones_like(panel, dtype=torch.bool)
        for column in range(stop - start):
            index = start + column
            if prune and index % 4 == 0:
                cost = panel[:, column : column + 4].square() / inverse.diagonal()[index : index + 4].square()
                keep[:, column : column + 4].scatter_(1, cost.topk(2, dim=1, largest=False).indices, False)
            value = panel[:, column]
            kept = value if grid is None else grid.nearest(value, int(order[index]) // group_size)
            kept = torch.where(keep[:, column], kept, torch.zeros(()))
            error = (value - kept) / inverse[index, index]
            panel[:, column + 1 :] -= error[:, None] * inverse[index, index + 1 : stop]
            result[:, index], errors[:, column] = kept, error
        weight[:, stop:] -= errors @ inverse[start:stop, stop:]
    restored = torch.empty_like(result)
    restored[:, order] = result
    return restored, _relative_error(original, restored, hessian)


def damped(hessian: Tensor) -> Tensor:
    """Hessian that can be inverted."""
    return hessian + DAMPING * hessian.diagonal().mean().clamp(min=1e-12) * torch.eye(len(hessian))


def _relative_error(original: Tensor, changed: Tensor, hessian: Tensor) -> float:
    difference = changed - original
    size = (original @ hessian * original).sum()
    return float((difference @ hessian * difference).sum() / size) if size else 0.0
