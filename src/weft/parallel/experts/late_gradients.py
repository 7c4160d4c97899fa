"""Weight gradients of experts, computed while the gradients of their rows travel back to the ranks of the tokens.

The backward of a matmul is one node of the graph, so that the all-to-all of the gradients of rows would start after the
gradients of the weights, for which it need not wait. Here that node computes the gradient of rows alone, and leaves the
operands of the other matmul to a second node, through which the weight has come. Autograd runs nodes in the reverse order of
forward: the second node is made while the rows of dispatch are in flight, and therefore runs while their gradients are.

    forward     start of dispatch | second nodes | wait for dispatch | matmuls
    backward    gradients of rows | start of the all-to-all | gradients of weights | wait

The same without an all-to-all, for the parts of a pipeline's backward: `pipeline/weight_gradients.py` (zero bubble).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.anatomy.roles import Anatomy
from weft.compute.experts import grouped_gradient, grouped_linear
from weft.compute.kernels import KernelRow
from weft.parallel.experts.path import Linear

Operands = tuple[Tensor, Tensor, Tensor]
"""Left and right side of the matmul of a weight gradient, and the end of the rows of each expert."""


def find_late(anatomy: Anatomy, kernels: Iterable[KernelRow]) -> frozenset[str]:
    """Names of the experts modules whose weight gradients can be computed late: gated, without biases, by grouped matmuls.

    Args:
        anatomy: anatomy of the blocks on this rank.
        kernels: choices of `weft.compute.kernels`.
    """
    names = {name for block in anatomy.blocks for name in block.experts}
    fused = {name for row in kernels if row.op == "experts" and row.variant for name in row.modules}
    return frozenset(fused & names)


def late_linear(module: Any) -> Linear:
    """Make the nodes of the weight gradients of a forward; called while the rows of dispatch are in flight.

    Args:
        module: experts of `find_late`, with local weights.

    Returns:
        `grouped_linear` of the module's weights, called once for each.
    """
    weights = {id(weight): _LateWeight(weight) for weight in (module.gate_up_proj, module.down_proj)}

    def linear(rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor) -> Tensor:
        return weights[id(weight)].linear(rows, rows_first, borders)

    return linear


class _LateWeight:
    """Weights of experts in one forward."""

    def __init__(self, weight: Tensor):
        self.operands: list[Operands] = []
        self.weight: Tensor = _Late.apply(weight, self.operands)

    def linear(self, rows: Tensor, rows_first: bool, borders: Tensor) -> Tensor:
        """Result of `grouped_linear` with these weights."""
        rows = rows.to(self.weight.dtype)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return _Linear.apply(rows, self.weight, rows_first, borders, self.operands)
        return grouped_linear(rows, self.weight, rows_first, borders)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, operands: list[Operands]) -> Tensor:
        ctx.operands = operands
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder: Tensor) -> Any:
        left, right, borders = ctx.operands.pop()
        return grouped_gradient(left, right, borders), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor, operands: list[Operands]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, borders)
        ctx.rows_first, ctx.operands = rows_first, operands
        return grouped_linear(rows, weight, rows_first, borders)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, borders = ctx.saved_tensors
        ctx.operands.append((gradient, rows, borders) if ctx.rows_first else (rows, gradient, borders))
        of_rows = grouped_linear(gradient, weight, not ctx.rows_first, borders) if ctx.needs_input_grad[0] else None
        placeholder = gradient.new_zeros(()).expand(weight.shape)  # takes no memory
        return of_rows, placeholder, None, None, None
