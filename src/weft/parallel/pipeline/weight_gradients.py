"""Split backward: input gradients immediately, weight gradients deferred (Qi et al., Zero Bubble, 2023).

The backward of a linear module in a block, and of its experts, computes the input gradient and queues the matmul of the weight
gradient. Nothing is computed twice. Some gradients are computed immediately, together with the input gradients:

- vectors (norms, biases), embeddings, and experts with biases or norms, or in float64
- matrices whose gradient is shared by tp ranks
- matrices whose input has no gradient, because everything before them is frozen
"""

from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy
from weft.compute.experts import grouped_gradient, grouped_linear
from weft.parallel.experts.path import Linear

if TYPE_CHECKING:
    from weft.parallel.build import Build


class DeferredMatmul(NamedTuple):
    """Deferred weight gradient of a matrix."""

    weight: Tensor
    """The weight that forward used; its graph leads to the parameter."""
    left: Tensor
    """[tokens, rows of the weight]"""
    right: Tensor
    """[tokens, columns of the weight]"""

    def compute(self) -> Tensor:
        return self.left.T @ self.right


class DeferredGroupedMatmul(NamedTuple):
    """Deferred weight gradient of the matrices of several experts."""

    weight: Tensor
    """The weights that forward used, [experts, rows, columns]; their graph leads to the parameter."""
    left: Tensor
    """[copies, rows of a weight], sorted by expert"""
    right: Tensor
    """[copies, columns of a weight]"""
    borders: Tensor
    """End of the copies of each expert."""

    def compute(self) -> Tensor:
        return grouped_gradient(self.left, self.right, self.borders)


Deferred = DeferredMatmul | DeferredGroupedMatmul


class WeightGradientQueue:
    """Queue of weight gradients between the two parts of a backward."""

    def __init__(self) -> None:
        self.pending: list[Deferred] = []

    def take_pending(self) -> list[Deferred]:
        """Remove and return the matmuls queued since the last call."""
        pending, self.pending = self.pending, []
        return pending

    @staticmethod
    def finish(pending: list[Deferred]) -> None:
        """Compute the weight gradients in order and accumulate them; each matmul is freed before the next one runs."""
        pending.reverse()
        while pending:
            matmul = pending.pop()
            torch.autograd.backward(matmul.weight, matmul.compute())


def defer_weight_gradients(
    model: nn.Module, anatomy: Anatomy, queue: WeightGradientQueue, excluded: Set[nn.Module] = frozenset()
) -> None:
    """Make the linear modules of all blocks queue their weight gradients, in place.

    Args:
        model: already sharded over tp; modules with overlapped tp matmuls (`async_tp.py`) use the queue themselves.
        anatomy: anatomy of the blocks on this rank.
        queue: queue of this rank.
        excluded: linear modules to leave as they are.
    """
    for block in anatomy.blocks:
        for module in model.get_submodule(block.name).modules():
            if type(module) in (nn.Linear, Conv1D) and module not in excluded:
                module.forward = partial(_linear, module, queue)


def deferred_linear(queue: WeightGradientQueue) -> Linear:
    """Matmuls of gated experts without biases that queue their weight gradients.

    Args:
        queue: queue of this rank.
    """
    return partial(_grouped_linear, queue)


def _grouped_linear(
    queue: WeightGradientQueue, rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor
) -> Tensor:
    if torch.is_grad_enabled() and weight.requires_grad and rows.requires_grad:
        return _GroupedLinear.apply(rows.to(weight.dtype), weight.detach(), rows_first, borders, (weight,), queue)
    return grouped_linear(rows, weight, rows_first, borders)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        rows_first: bool,
        borders: Tensor,
        owner: tuple[Tensor],
        queue: WeightGradientQueue,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, borders)
        ctx.rows_first, ctx.owner, ctx.queue = rows_first, owner, queue
        return grouped_linear(rows, weight, rows_first, borders)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, borders = ctx.saved_tensors
        left, right = (gradient, rows) if ctx.rows_first else (rows, gradient)
        ctx.queue.pending.append(DeferredGroupedMatmul(ctx.owner[0], left, right, borders))
        return grouped_linear(gradient, weight, not ctx.rows_first, borders), None, None, None, None, None


def _linear(module: Any, queue: WeightGradientQueue, x: Tensor) -> Tensor:
    rows_first = isinstance(module, nn.Linear)
    weight, bias = module.weight, module.bias
    if torch.is_grad_enabled() and weight.requires_grad and x.requires_grad:
        return _Linear.apply(x, weight.detach(), bias, rows_first, (weight,), queue)
    return F.linear(x, weight if rows_first else weight.T, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows_first: bool,
        owner: tuple[Tensor],
        queue: WeightGradientQueue,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows_first, ctx.owner, ctx.queue = rows_first, owner, queue
        return F.linear(x, weight if rows_first else weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tokens, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
        sides = (outputs, tokens) if ctx.rows_first else (tokens, outputs)
        ctx.queue.pending.append(DeferredMatmul(ctx.owner[0], *sides))
        of_x = F.linear(gradient, weight.T if ctx.rows_first else weight) if ctx.needs_input_grad[0] else None
        of_bias = outputs.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None, None


def defer_gradients(build: "Build") -> None:
    """Step of `parallelize`: weight gradients that the schedule runs apart, but for those that tensor parallelism defers."""
    build.begin("defer_gradients", "split_tensors")
    split = build.runtime.tensor_split
    if build.queue is not None:
        defer_weight_gradients(build.model, build.anatomy, build.queue, split.copied | split.chunked)
