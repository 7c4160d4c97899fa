"""The split of a backward: gradients of inputs at once, those of matrices when their turn comes (Qi et al., Zero Bubble, 2023).

A linear module of a block runs a function whose backward gives the gradient of its input and leaves the other product, of
the same input and output gradient, in a queue. Nothing is computed twice. Vectors (norms, biases), embeddings, experts,
matrices whose gradient tp ranks share, and matrices whose input has no gradient (all before them is frozen) have theirs with
the gradient of the inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy


class Product(NamedTuple):
    """A gradient of a matrix that is not computed yet."""

    weight: Tensor
    """As forward saw it, with its way back to the parameter."""
    left: Tensor
    """[tokens, rows of the weight]"""
    right: Tensor
    """[tokens, columns of the weight]"""

    def compute(self) -> Tensor:
        return self.left.T @ self.right


class WeightGradients:
    """The queue between the two parts of a backward."""

    def __init__(self) -> None:
        self.products: list[Product] = []

    def take(self) -> list[Product]:
        """What has come in since the last call."""
        products, self.products = self.products, []
        return products

    @staticmethod
    def finish(products: list[Product]) -> None:
        """Compute gradients and give them to their parameters, first come first; each is freed before the next."""
        products.reverse()
        while products:
            product = products.pop()
            torch.autograd.backward(product.weight, product.compute())


def defer_weight_gradients(model: nn.Module, anatomy: Anatomy, queue: WeightGradients) -> None:
    """Let the linear modules of all blocks leave the gradients of their matrices in a queue, in place.

    Args:
        model: split over tp already; what multiplies in chunks (`fan.py`) uses the queue by itself.
        anatomy: of the blocks that are here.
        queue: of this rank.
    """
    for block in anatomy.blocks:
        for module in model.get_submodule(block.name).modules():
            apart = getattr(module, "shares_gradients", False) or getattr(module, "multiplies_in_chunks", False)
            if type(module) in (nn.Linear, Conv1D) and not apart:
                module.forward = partial(_linear, module, queue)


def _linear(module: Any, queue: WeightGradients, x: Tensor) -> Tensor:
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
        queue: WeightGradients,
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
        ctx.queue.products.append(Product(ctx.owner[0], *sides))
        of_x = F.linear(gradient, weight.T if ctx.rows_first else weight) if ctx.needs_input_grad[0] else None
        of_bias = outputs.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None, None
