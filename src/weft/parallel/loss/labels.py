"""Exact global mean of the loss that a model computes from its `labels`, for custom training loops.

By default each data rank computes the mean over its own targets, and the mean of these means differs from the mean over all
targets if ranks have different numbers of targets. Here one all-reduce adds up loss sums and target counts, so that loss and
gradients equal those of one process that has all rows.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from weft.anatomy.transformers import MASKED_WORDS
from weft.comm.collectives import all_reduce
from weft.data import IGNORED
from weft.errors import ModelError, Refusal, raise_if_refused
from weft.parallel.loss.cross_entropy import cross_entropy_sum, vocab_size
from weft.parallel.loss.weights import LossWeights
from weft.parallel.sequence.rows import pad_rows, shard_sequence
from weft.topology.mesh import CONTEXT_AXES, DATA_AXES, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build

SumAndCount = Callable[..., tuple[Tensor, Tensor]]


def count_targets(labels: Tensor | Iterable[Tensor], mesh: DeviceMesh, shifted: bool = True) -> Tensor:
    """Number of target tokens of a step over all data ranks, for `num_items_in_batch`. Every rank must call it.

    It is needed only if a step has several micro-batches: pass it to the forward of each micro-batch, and the sum of their
    losses is the mean over all targets of the step.

    Args:
        labels: labels of a causal language model, int64 [rows, tokens], or an iterable of such tensors, one for each
            micro-batch of this rank; -100 and the first token of each row are not targets.
        mesh: device mesh from `weft.build_mesh`.
        shifted: False for labels of another model, whose first token is a target; see `shifts_labels`.

    Returns:
        int64 scalar on the device of the labels, the same on every rank.
    """
    batches = [labels] if isinstance(labels, Tensor) else list(labels)
    targets = [batch[:, 1:] if shifted else batch for batch in batches]
    return all_reduce(torch.stack([(own != IGNORED).sum() for own in targets]).sum(), mesh, DATA_AXES)


def shifts_labels(model: nn.Module, labels: Tensor) -> bool:
    """True for a causal language model, whose logits of a token predict the label of the next one.

    Labels of classes, [rows], and those of masked words and of encoder-decoder models are compared as they are.
    """
    if not isinstance(model, PreTrainedModel) or labels.ndim < 2:
        return False
    return not model.config.is_encoder_decoder and type(model).__name__ not in MASKED_WORDS


def average_loss_over_targets(
    model: Any, mesh: DeviceMesh, multiple: int | None, library_num_items: bool = False
) -> None:
    """Replace the loss of `model(..., labels=...)` by the mean over the targets of all data ranks, in place.

    The value is the same on every rank, and the gradients averaged over the data ranks are the gradients of this mean. Without
    gradients (evaluation) the loss is the mean over the rows of this data rank, without communication between data ranks.

    Args:
        model: model after all parallelism except data parallelism.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        multiple: length to whose multiples rows are padded if tp or cp ranks split them; None if each rank has the logits of
            full rows and of the full vocabulary.
        library_num_items: see `weft.parallelize`.
    """
    if not isinstance(model, PreTrainedModel):
        return  # the script's own loss: a mean over the rows of a rank
    has_data_ranks = ranks_along(mesh, *DATA_AXES) > 1
    if model.get_output_embeddings() is None:
        if has_data_ranks and not library_num_items:
            _average_by_weight(model, mesh)
        return
    loss_function_calls: list[bool] = []
    own_sum = _row_sum if multiple is None else partial(_local_sum, model, mesh, multiple)
    if multiple is not None or (has_data_ranks and model.loss_function is ForCausalLMLoss):
        model.loss_function = partial(_mean_loss, mesh, loss_function_calls, own_sum, library_num_items)
    if not has_data_ranks or library_num_items:
        return

    def check(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        bypassed = not loss_function_calls and getattr(output, "loss", None) is not None
        loss_function_calls.clear()
        if bypassed and torch.is_grad_enabled():
            labels = inspect.signature(model.forward).bind(*args, **kwargs).arguments["labels"]
            if not shifts_labels(model, labels):
                output.loss = _mean_over_ranks(output.loss, (labels != IGNORED).sum(), mesh)
                return output
            raise_if_refused(_reason_against_uneven(labels, mesh, type(model).__name__))
        return None

    model.register_forward_hook(check, with_kwargs=True)


def _average_by_weight(model: Any, mesh: DeviceMesh) -> None:
    """Replace the loss of a model without a language head by the mean over the targets of all data ranks, in place."""
    weights, signature = LossWeights(type(model).__name__, mesh), inspect.signature(model.forward)

    def average(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.ndim == 0 and torch.is_grad_enabled():
            inputs = signature.bind_partial(*args, **kwargs).arguments
            output.loss = _mean_over_ranks(loss, weights.weight(loss, inputs, output), mesh)
        return output

    model.register_forward_hook(average, with_kwargs=True)


def _mean_loss(
    mesh: DeviceMesh,
    loss_function_calls: list[bool],
    sum_and_count: SumAndCount,
    library_num_items: bool,
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Loss function of a parallelized model: loss sum over ranks / number of targets over ranks (or `num_items_in_batch`)."""
    loss_function_calls.append(True)
    own, count = sum_and_count(logits, labels, *args, **kwargs)
    given = num_items_in_batch is not None
    over_data_ranks = torch.is_grad_enabled() and not (given and library_num_items)
    axes = (*DATA_AXES, *CONTEXT_AXES) if over_data_ranks else CONTEXT_AXES
    items = torch.as_tensor(num_items_in_batch if given else 0, device=own.device).double()
    sums = all_reduce(torch.stack([own.detach().double(), count.double(), items, items.square()]), mesh, axes)
    ranks = ranks_along(mesh, *axes)
    if given and over_data_ranks and ranks_along(mesh, *DATA_AXES) > 1:
        raise_if_refused(_reason_against_items(sums.tolist(), ranks))
    total = items if given else sums[1].clamp(min=1)
    return _global_mean(own, sums[0], total, ranks)


def _global_mean(own: Tensor, loss_sum: Tensor, targets: Tensor, ranks: int) -> Tensor:
    """Mean over the targets of all ranks: value of the global mean, with the gradient of the loss sum of this rank."""
    # Gradients are averaged over the ranks, so that the local sum is multiplied by the number of ranks.
    part = own * (ranks / targets).to(own.dtype)
    return part + ((loss_sum / targets).to(own.dtype) - part.detach())


def _mean_over_ranks(loss: Tensor, count: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mean over the targets of all data ranks, from the mean over those of this rank; 0 / 0 of a rank without any counts 0."""
    count = count.to(loss.device).double()
    own = torch.where(count > 0, loss, torch.zeros_like(loss)).double() * count
    total, targets = all_reduce(torch.stack([own.detach(), count]), mesh, DATA_AXES)
    return _global_mean(own, total, targets.clamp(min=1), ranks_along(mesh, *DATA_AXES)).to(loss.dtype)


def _row_sum(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies over the targets of the rows of this rank, by the function of Transformers, and target count."""
    targets = labels[..., 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    count = (targets != kwargs.get("ignore_index", IGNORED)).sum()
    library: Any = ForCausalLMLoss
    return library(logits, labels, *args, num_items_in_batch=1, **kwargs), count.to(logits.device)


def _local_sum(
    model: Any, mesh: DeviceMesh, multiple: int, logits: Tensor, labels: Tensor, *_: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies over the targets of the tokens of this rank, from vocabulary-parallel logits, and target count."""
    ignored = kwargs.get("ignore_index", IGNORED)
    targets = kwargs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels[:, 1:], (0, 1), value=ignored)
    parts = shard_sequence(pad_rows(targets, multiple, ignored), mesh)
    return cross_entropy_sum(logits, parts, ignored, mesh.get_group("tp"), vocab_size(model)), (parts != ignored).sum()


def _reason_against_items(sums: list[float], ranks: int) -> Refusal | None:
    """Reason against a `num_items_in_batch` that does not count the targets of the full step.

    Args:
        sums: loss, targets, `num_items_in_batch` and its square, summed over the ranks.
        ranks: number of ranks.
    """
    _, count, items, squares = sums
    mean = items / ranks
    if mean < count or squares / ranks - mean * mean > 1e-9 * mean * mean:
        return Refusal(
            f"num_items_in_batch is {mean:g} on average over the ranks, and this micro-batch alone has {count:g} targets",
            where="model(..., num_items_in_batch=...)",
            rule="it is the number of target tokens of all micro-batches of the step on all ranks, the same on every rank, and "
            "not multiplied by the number of ranks",
            fix="pass weft.count_targets([labels of each micro-batch], mesh), or omit it if a step is one micro-batch",
            error=ModelError,
        )
    return None


def _reason_against_uneven(labels: Tensor, mesh: DeviceMesh, name: str) -> Refusal | None:
    """Reason against unequal numbers of targets for a model whose forward computes the mean over its own rows."""
    counts = torch.stack([(labels != IGNORED).sum(), (labels[:, 1:] != IGNORED).sum()])
    largest = all_reduce(torch.cat([counts, -counts]), mesh, DATA_AXES, "max")
    if bool((largest[:2] != -largest[2:]).any()):
        return Refusal(
            f"data ranks have between {-largest[2].item()} and {largest[0].item()} targets",
            where=f"loss of {name}, which is not computed by model.loss_function",
            rule="this loss is the mean over the targets of one rank, and gradients are averaged over ranks: the result is "
            "exact only if all ranks have the same number of targets",
            fix="omit labels, compute the sum of the loss from logits, multiply it by the number of data ranks and divide it "
            "by weft.count_targets(labels, mesh)",
            error=ModelError,
        )
    return None


def average_loss(build: "Build") -> None:
    """Step of `parallelize`: the loss of labels is the mean over all ranks; its hook sees rows before they are split."""
    build.begin("average_loss", "split_rows")
    multiple = build.choices.row_multiple if build.choices.takes_full_rows else None
    average_loss_over_targets(build.model, build.mesh, multiple, build.library_num_items)
