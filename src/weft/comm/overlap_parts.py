"""Parts of the overlapped matmuls: gradients of several matrices with one input, and matmuls into slices."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import Pending, start_reduce_scatter

DeferGrad = Callable[[Tensor, Tensor], None]
"""Function that queues a weight gradient: output gradient [tokens, outputs] and input [tokens, features], multiplied later."""


class MatricesBackward:
    """Backward of several matrices with one input: gradients of the matrices and biases from gradients of the outputs.

    Gradients may be stored in another dtype than their nominal one (`precision/fp16_backward.py`): all matmuls use the stored
    dtype.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor | None],
        matrices: Sequence[Tensor],
        defer: Sequence[DeferGrad | None],
        needs_gradient: Sequence[bool],
    ):
        """
        Args:
            gradients: gradients of the outputs, [*, outputs]; None for unused outputs.
            matrices: matrices of the forward.
            defer: see `all_gather_matmul`.
            needs_gradient: True for each matrix, then for each bias, that needs a gradient.
        """
        count = len(matrices)
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        self.wrap = wrapper(gradients[used[0]])
        self.grad_outs = [stored(gradients[index]).contiguous().flatten(0, -2) for index in used]  # type: ignore[arg-type]
        """Gradient of each used output, [tokens, outputs]."""
        self.matrices = [
            matrices[index].to(grad_out.dtype) for index, grad_out in zip(used, self.grad_outs, strict=True)
        ]
        self.defer = [defer[index] for index in used]
        self.with_grad = [index for index in used if needs_gradient[index] or defer[index]]
        self.used = used
        self.grad_matrices: list[Tensor | None] = [None] * count
        self.grad_biases: list[Tensor | None] = [None] * count
        for index, grad_out in zip(used, self.grad_outs, strict=True):
            if needs_gradient[count + index]:
                self.grad_biases[index] = self.wrap(grad_out.sum(0))

    @property
    def needs_input(self) -> bool:
        """True if the gradient of a matrix needs the input."""
        return bool(self.with_grad)

    def compute_grads(self, x: Tensor) -> None:
        """Compute the gradients of the matrices that are not queued, given the input [tokens, features]."""
        self.x = x
        for index, grad_out, defer in zip(self.used, self.grad_outs, self.defer, strict=True):
            if index in self.with_grad and defer is None:
                self.grad_matrices[index] = self.wrap(grad_out.T @ x.to(grad_out.dtype))

    def queue_grads(self) -> None:
        """Queue the gradients of the other matrices."""
        for grad_out, defer in zip(self.grad_outs, self.defer, strict=True):
            if defer is not None:
                defer(self.wrap(grad_out), self.x)


class GradAccumulator:
    """Sum over chunks; float32 for 16-bit dtypes."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        """Add left.T @ right."""
        if self.total is None:
            self.total = (left.T @ right).to(_accumulate_dtype(left.dtype))
        elif self.total.dtype == left.dtype:
            self.total.addmm_(left.T, right)
        else:
            self.total += left.T @ right

    def add(self, rows: Tensor) -> None:
        """Add the sum of rows."""
        row_sum = rows.sum(0, dtype=_accumulate_dtype(rows.dtype))
        self.total = row_sum if self.total is None else self.total + row_sum

    def cast(self, dtype: torch.dtype) -> Tensor:
        """Return the total in a dtype."""
        assert self.total is not None
        return self.total.to(dtype)


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def fold(x: Tensor, dim: int) -> Tensor:
    """Reshape [*, part, *, features] to [outer, part, features]; dim is the index of the part."""
    return x.reshape(math.prod(x.shape[:dim]), -1, x.shape[-1])


def fold_full(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Reshape [*, ranks x part, *, features] to [outer, ranks, part, features]."""
    return x.reshape(math.prod(x.shape[:dim]), ranks, -1, x.shape[-1])


def multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute x @ matrix.T + bias into a slice: [*, rows, features], [outputs, features] -> [*, rows, outputs]."""
    for rows, target in _blocks(x, out):
        if bias is None:
            torch.mm(rows, matrix.T, out=target)
        else:
            torch.addmm(bias, rows, matrix.T, out=target)


def multiply_back(grad_out: Tensor, matrix: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Compute grad_out @ matrix into a slice, or add to it: [*, rows, outputs], [outputs, features] -> [*, rows, features]."""
    for rows, target in _blocks(grad_out, out):
        if add:
            target.addmm_(rows, matrix)
        else:
            torch.mm(rows, matrix, out=target)


def scatter_into(
    out: Tensor, group: dist.ProcessGroup
) -> tuple[Callable[[slice, Tensor], Pending], Callable[[slice, Tensor], None]]:
    """Functions that start the reduce-scatter of a chunk [ranks, outer, rows, features] and store it in `out`.

    Contiguous slices of `out`, [outer, part, features], are written directly.
    """

    def start(rows: slice, chunk: Tensor) -> Pending:
        target = out[:, rows]
        return start_reduce_scatter(chunk, target if target.is_contiguous() else torch.empty_like(target), group)

    def keep(rows: slice, received: Tensor) -> None:
        if not out[:, rows].is_contiguous():
            out[:, rows] = received

    return start, keep


def _blocks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of matrices at the same indices of two tensors [*, rows, features]; a single pair if both are contiguous."""
    if x.is_contiguous() and out.is_contiguous():
        return [(x.flatten(0, -2), out.flatten(0, -2))]
    return [(x[index], out[index]) for index in product(*map(range, x.shape[:-2]))]


def join(parts: list[Tensor]) -> Tensor:
    """Concatenate parts [outer, rows, features] to [tokens, features]; a single part is not copied."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(0, -2)


def without(parts: Tensor, rank: int) -> Tensor:
    """Parts of all other ranks; a view if the rank is the first or the last."""
    if rank == 0:
        return parts[1:]
    return torch.cat([parts[:rank], parts[rank + 1 :]]) if rank < len(parts) - 1 else parts[:rank]


def stored(gradient: Tensor) -> Tensor:
    return getattr(gradient, "stored", gradient)


def wrapper(gradient: Any) -> Callable[[Tensor], Tensor]:
    """Function that wraps a tensor like a given gradient: as an fp16 gradient, or not at all."""
    return type(gradient) if hasattr(gradient, "stored") else lambda tensor: tensor
