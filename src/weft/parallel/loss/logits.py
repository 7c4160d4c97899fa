"""Gather the full logits of a model split over tp or cp, for a custom loss."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm import collectives
from weft.errors import ModelError
from weft.parallel.loss.cross_entropy import gather_vocabulary, vocab_size
from weft.parallel.runtime import runtime
from weft.parallel.sequence.context_grid import own_positions
from weft.parallel.sequence.rows import pad_rows, row_multiple
from weft.topology.mesh import CONTEXT_AXES, join_axes, ranks_along


def gather_logits(model: nn.Module, logits: Tensor, tokens: int) -> Tensor:
    """Gather the logits of full rows and of the full vocabulary. Differentiable; collective.

    All ranks of tp and cp continue with the same logits and compute the same loss; see `gather_tokens` for backward.

    Args:
        model: parallelized model.
        logits: logits of this rank, [rows, tokens of this rank, part of the vocabulary].
        tokens: tokens of a full row, before padding.

    Returns:
        [rows, tokens, vocabulary], the same on all ranks of tp and cp.
    """
    if tokens < 1 or (runtime(model).plan.parallel.cp == 1 and tokens > logits.shape[1]):
        raise _refusal(f"{tokens} tokens for logits of {logits.shape[1]} tokens")
    parallelized, size = runtime(model), vocab_size(model)  # type: ignore[arg-type]
    if ranks_along(parallelized.mesh, "tp") > 1:
        logits = gather_vocabulary(logits, size, parallelized.mesh.get_group("tp"))
    return gather_tokens(model, logits, tokens)


def gather_tokens(model: nn.Module, values: Tensor, tokens: int) -> Tensor:
    """Gather values of the tokens of full rows over the ranks of cp. Differentiable; collective.

    Backward multiplies each rank's part by the number of cp ranks, because gradients are averaged over cp ranks later.

    Args:
        model: parallelized model.
        values: [rows, tokens of this rank, ...].
        tokens: tokens of a full row, before padding.

    Returns:
        [rows, tokens, ...], the same on all ranks of cp.
    """
    parallelized = runtime(model)
    mesh = parallelized.mesh
    if ranks_along(mesh, *CONTEXT_AXES) > 1:
        length = pad_rows(torch.zeros(1, tokens), row_multiple(parallelized.anatomy, parallelized.plan), 0).shape[1]
        if length // parallelized.plan.parallel.cp != values.shape[1]:
            raise _refusal(
                f"{tokens} tokens for logits of {values.shape[1]} tokens on each of {parallelized.plan.parallel.cp} cp ranks"
            )
        values = _GatherTokens.apply(values, mesh, own_positions(length, mesh, values.device))
    return values[:, :tokens]


def tokens_of_rank(model: nn.Module, values: Tensor, count: int, fill: int) -> Tensor:
    """Values of the tokens of this rank, in the order of its logits.

    Args:
        model: parallelized model.
        values: [rows, tokens] of full rows, before padding.
        count: tokens of this rank.
        fill: value of the tokens with which rows are padded.

    Returns:
        [rows, count].
    """
    parallelized = runtime(model)
    padded = F.pad(values, (0, count * parallelized.plan.parallel.cp - values.shape[1]), value=fill)
    if parallelized.plan.parallel.cp == 1:
        return padded
    return padded[:, own_positions(padded.shape[1], parallelized.mesh, values.device)]


def _refusal(what: str) -> ModelError:
    return ModelError(
        what,
        where="gather_logits(logits, tokens)",
        rule="tokens is the length of the rows that were passed to the model, and logits are the model's output for them",
        fix="pass input_ids.shape[1] as tokens, and the logits unchanged",
    )


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, positions: Tensor) -> Tensor:
        group = join_axes(mesh, CONTEXT_AXES).get_group()
        ctx.positions, ctx.ranks = positions, dist.get_world_size(group)
        parts = collectives.gather_dim(x.contiguous(), group, 1)
        order = collectives.gather_dim(positions[None].contiguous(), group, 1)[0].argsort()
        return parts[:, order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[:, ctx.positions] * ctx.ranks, None, None
