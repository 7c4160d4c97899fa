"""Gradient norm and clipping of sharded parameters."""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_reduce_group
from weft.errors import ModelError, Refusal, WeftError, raise_if_refused
from weft.parallel.weights import to_local


def squared_grad_norm_share(parameters: Iterable[torch.Tensor], ranks: int) -> torch.Tensor:
    """Share of this rank in the squared global gradient norm; the sum over ranks is the squared norm, in any layout.

    A gradient that several ranks hold is divided equally among these ranks.

    Args:
        parameters: parameters whose gradients count; the same parameters, or shards of them, on all `ranks`.
        ranks: number of ranks that share the parameters: all ranks, or the ranks of a pipeline stage.

    Returns:
        float64 scalar.
    """
    shares = [norms.square().sum() * shards / ranks for shards, norms in _local_norms(parameters, 2.0)]
    if not shares:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([share.to(shares[0].device) for share in shares]).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the global gradient norm in place: `torch.nn.utils.clip_grad_norm_` for a parallelized model.

    The norm equals the norm on a single process, under any plan without a pipeline: each element counts once, whether ranks
    hold shards (zero, tp, ep) or copies (dp_replicate, zero 0, norms under tp). Call it on every rank, between `backward` and
    `optimizer.step`.

    Args:
        parameters: all or some of `model.parameters()`, the same on every rank. Parameters without a gradient are ignored.
        max_norm: maximum norm; gradients with a larger norm are multiplied by `clip_factor`.
        norm_type: p of the p-norm; may be math.inf.
        error_if_nonfinite: raise an error if the norm is NaN or infinite, and leave gradients unchanged. Synchronizes with the
            host.

    Returns:
        Norm before clipping, float64 scalar, the same on every rank.

    Raises:
        ModelError: ranks hold different parameters, as the stages of a pipeline do.
        WeftError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    raise_if_refused(_reason_against_other_parameters(own, ranks))
    device = to_local(own[0]).device if own else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    is_max_norm = norm_type == math.inf
    for shards, norms in _local_norms(own, norm_type):
        total = (
            torch.maximum(total, norms.max()) if is_max_norm else total + norms.pow(norm_type).sum() * shards / ranks
        )
    if ranks > 1:
        all_reduce_group(total, None, "max" if is_max_norm else "sum")
    norm = total if is_max_norm else total.pow(1 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise WeftError(
            f"the norm of the gradient is {norm.item()}",
            where="weft.clip_grad_norm_",
            rule="with error_if_nonfinite, gradients must be finite",
            fix="skip this step, and check the batch and the learning rate",
        )
    factor = clip_factor(norm, max_norm)
    for gradients in _local_gradients(own).values():
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, _norm_dtype(gradients[0])))
    return norm


def clip_factor(norm: Any, max_norm: float) -> Any:
    """Factor of gradients that are clipped, at most 1; a tensor for a norm that is one, else a number."""
    factor = max_norm / (norm + 1e-6)
    return factor.clamp(max=1.0) if isinstance(factor, torch.Tensor) else min(1.0, factor)


def _reason_against_other_parameters(parameters: list[torch.Tensor], ranks: int) -> Refusal | None:
    """Reason against different parameters on different ranks. Compares on the host, without synchronizing with the device."""
    if ranks == 1:
        return None
    checksum = zlib.crc32(repr([tuple(parameter.shape) for parameter in parameters]).encode())
    extremes = torch.tensor([checksum, -checksum])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes.sum() != 0:
        return Refusal(
            "ranks hold different parameters",
            where="weft.clip_grad_norm_",
            rule="the norm is taken over the same parameters on every rank; with plan.parallel.pp > 1 each rank has only the "
            "parameters of its stages",
            fix="with a pipeline, use weft.prepare, whose run clips over all stages; else pass the same parameters",
            error=ModelError,
        )
    return None


def _local_gradients(parameters: Iterable[torch.Tensor]) -> dict[tuple[int, torch.dtype], list[torch.Tensor]]:
    """Local gradients of this rank, grouped by number of shards and dtype."""
    groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        shards = 1
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            shards = math.prod(mesh.size(axis) for axis, p in enumerate(gradient.placements) if not p.is_replicate())
        local = to_local(gradient)
        if local.numel():  # a rank has no elements if there are more ranks than rows
            groups[shards, local.dtype].append(local)
    return groups


def _local_norms(parameters: Iterable[torch.Tensor], norm_type: float) -> list[tuple[int, torch.Tensor]]:
    """Number of shards, and float64 norms of the local gradients with this number of shards, for each such number."""
    result = []
    for (shards, _), gradients in _local_gradients(parameters).items():
        norms = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=_norm_dtype(gradients[0])))
        result.append((shards, norms.double()))
    return result


def _norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by a factor, in place."""
    if factor != 1.0:
        for gradients in _local_gradients(parameters).values():
            torch._foreach_mul_(gradients, factor)


def divide_gradients(parameters: Iterable[torch.Tensor], divisor: float) -> None:
    """Divide every gradient by a number, in place."""
    if divisor != 1.0:
        for gradients in _local_gradients(parameters).values():
            torch._foreach_div_(gradients, divisor)
