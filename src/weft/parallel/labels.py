"""The loss that a model computes from its `labels`, in a training loop of one's own: that of the rows of all ranks.

Left alone, each data rank computes the mean over its own targets, and the mean of those means is not the mean over all
targets where ranks have unequal numbers of them. Here each rank contributes a sum and a count, in one message, so that loss
and gradients are those of one process that has all rows.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.loss.loss_utils import ForCausalLMLoss

from weft.comm.collectives import all_reduce
from weft.data import IGNORED
from weft.errors import ModelError
from weft.parallel.loss import cross_entropy_sum, vocab_size
from weft.parallel.sequence_sharding import pad_rows, shard_sequence
from weft.topology.mesh import CONTEXT_AXES, DATA_AXES, ranks_along

SumAndCount = Callable[..., tuple[Tensor, Tensor]]


def count_targets(labels: Tensor | Iterable[Tensor], mesh: DeviceMesh) -> Tensor:
    """Number of target tokens of a step over all data ranks, for `num_items_in_batch`. Every rank must call it.

    Needed only where a step has several micro-batches: pass the same number to the forward of each, and the sum of their
    losses is the mean over all targets of the step.

    Args:
        labels: of a causal language model, int64 [rows, tokens], or several of them, one for each micro-batch of this rank;
            -100 and the first token of a row are no targets.
        mesh: from `weft.build_mesh`.

    Returns:
        int64 scalar on the device of the labels, the same on every rank.
    """
    batches = [labels] if isinstance(labels, Tensor) else list(labels)
    return all_reduce(torch.stack([(batch[:, 1:] != IGNORED).sum() for batch in batches]).sum(), mesh, DATA_AXES)


def average_over_all_targets(model: Any, mesh: DeviceMesh, multiple: int | None) -> None:
    """Let the loss of `model(..., labels=...)` be the mean over the targets of all data ranks, in place.

    Its value is the same on every rank, and its gradients, averaged over the data ranks, are those of that mean. Without
    gradients (evaluation) it is the mean over the rows of this rank, which waits for no other data rank.

    Args:
        model: parallelized, all but data parallelism.
        mesh: with the axes of `weft.topology.mesh`.
        multiple: number of tokens that rows are padded to a multiple of where tp or cp ranks split them; None where each
            rank has logits of whole rows and of the whole vocabulary.
    """
    several = ranks_along(mesh, *DATA_AXES) > 1
    took_part: list[bool] = []
    if multiple is not None:
        model.loss_function = partial(_mean_loss, mesh, took_part, partial(_sum_of_part, model, mesh, multiple))
    elif several and model.loss_function is ForCausalLMLoss:
        model.loss_function = partial(_mean_loss, mesh, took_part, _sum_of_rows)
    if not several:
        return

    def check(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        computed_elsewhere = not took_part and getattr(output, "loss", None) is not None
        took_part.clear()
        if computed_elsewhere and torch.is_grad_enabled():
            labels = inspect.signature(model.forward).bind(*args, **kwargs).arguments["labels"]
            _check_even(labels, mesh, type(model).__name__)

    model.register_forward_hook(check, with_kwargs=True)


def _mean_loss(
    mesh: DeviceMesh,
    took_part: list[bool],
    sum_and_count: SumAndCount,
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Tensor:
    """The loss function of a parallelized model: the sum over ranks, divided by the count over ranks or the given one."""
    took_part.append(True)
    own, count = sum_and_count(logits, labels, *args, **kwargs)
    axes = (*DATA_AXES, *CONTEXT_AXES) if torch.is_grad_enabled() else CONTEXT_AXES
    given = num_items_in_batch is not None
    items = torch.as_tensor(num_items_in_batch if given else 0, device=own.device).double()
    sums = all_reduce(torch.stack([own.detach().double(), count.double(), items, items.square()]), mesh, axes)
    ranks = ranks_along(mesh, *axes)
    if given and torch.is_grad_enabled() and ranks_along(mesh, *DATA_AXES) > 1:
        _check_items(sums.tolist(), ranks)
    whole = items if given else sums[1].clamp(min=1)
    # Gradients are averaged over the ranks: each part of the sum counts for as many.
    part = own * (ranks / whole).to(own.dtype)
    return part + ((sums[0] / whole).to(own.dtype) - part.detach())


def _sum_of_rows(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies over the targets of this rank's rows, by the library's own function, and their number."""
    targets = labels[..., 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    count = (targets != kwargs.get("ignore_index", IGNORED)).sum()
    library: Any = ForCausalLMLoss
    return library(logits, labels, *args, num_items_in_batch=1, **kwargs), count.to(logits.device)


def _sum_of_part(
    model: Any, mesh: DeviceMesh, multiple: int, logits: Tensor, labels: Tensor, *_: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The same of the tokens of this rank, whose logits are those of its part of the vocabulary."""
    ignored = kwargs.get("ignore_index", IGNORED)
    targets = kwargs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels[:, 1:], (0, 1), value=ignored)
    parts = shard_sequence(pad_rows(targets, multiple, ignored), mesh)
    return cross_entropy_sum(logits, parts, ignored, mesh.get_group("tp"), vocab_size(model)), (parts != ignored).sum()


def _check_items(sums: list[float], ranks: int) -> None:
    """Refuse a `num_items_in_batch` that is not that of the whole step, from sums over the ranks."""
    _, count, items, squares = sums
    mean = items / ranks
    if mean < count or squares / ranks - mean * mean > 1e-9 * mean * mean:
        raise ModelError(
            f"num_items_in_batch is {mean:g} on average over the ranks, and this micro-batch alone has {count:g} targets",
            where="model(..., num_items_in_batch=...)",
            rule="it is the number of target tokens of all micro-batches of the step on all ranks, the same on every rank; "
            "it takes no factor for the number of ranks",
            fix="pass weft.count_targets([labels of each micro-batch], mesh), or leave it out where a step is one micro-batch",
        )


def _check_even(labels: Tensor, mesh: DeviceMesh, name: str) -> None:
    """Refuse unequal numbers of targets for a model that computes the mean over its own rows."""
    counts = torch.stack([(labels != IGNORED).sum(), (labels[:, 1:] != IGNORED).sum()])
    largest = all_reduce(torch.cat([counts, -counts]), mesh, DATA_AXES, "max")
    if bool((largest[:2] != -largest[2:]).any()):
        raise ModelError(
            f"data ranks have between {-largest[2].item()} and {largest[0].item()} targets",
            where=f"the loss of {name}, which does not come from model.loss_function",
            rule="it is the mean over the targets of one rank, and gradients are averaged over ranks: exact only where all "
            "ranks have as many targets",
            fix="leave labels out, compute the sum of the loss from logits, multiply it by the number of data ranks and "
            "divide it by weft.count_targets(labels, mesh)",
        )
