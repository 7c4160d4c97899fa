"""Weights of the micro-batches of a step in a custom loop: their numbers of targets, or the user's `items`."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.collectives import all_reduce
from weft.data import IGNORED
from weft.errors import ModelError, PlanError
from weft.parallel.loss.labels import count_targets, shifts_labels
from weft.parallel.runtime import Runtime
from weft.topology.mesh import AXES, DATA_AXES, ranks_along


class ForwardRecord(NamedTuple):
    """Labels of a forward."""

    has_labels: bool
    targets: Tensor | None
    """Number of targets over all data ranks; None without labels, or if the step has one micro-batch."""


class Weight(NamedTuple):
    """Weight of a micro-batch."""

    weight: Tensor
    """Weight beside the other micro-batches of the step, scalar; the same on every rank."""
    share: float
    """Factor of the loss of this rank, whose gradients are averaged over the data ranks."""
    is_counted: bool
    """True if the weight is a number of targets or items; False if all micro-batches count the same."""


def record_forward(
    model: nn.Module, args: Any, kwargs: dict[str, Any], several: bool, mesh: DeviceMesh
) -> ForwardRecord:
    """Count the targets of a forward. Collective if the step has several micro-batches and the forward has labels.

    Args:
        model: model that is called.
        args: its arguments.
        kwargs: its keyword arguments.
        several: True if the step has several micro-batches.

    Raises:
        ModelError: the forward has num_items_in_batch, and the step several micro-batches.
    """
    labels: Any = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("labels")
    shifted = kwargs.get("shift_labels")
    if several and kwargs.get("num_items_in_batch") is not None:
        raise ModelError(
            "num_items_in_batch in run.accumulate",
            where="weft.Run.accumulate",
            rule="run.backward weights the micro-batches of a step by their numbers of targets",
            fix="leave num_items_in_batch out",
        )
    has_labels = labels is not None
    if isinstance(shifted, Tensor):  # the targets of the loss, each beside the token before it
        labels = torch.nn.functional.pad(shifted, (1, 0), value=IGNORED)
    counts = several and isinstance(labels, Tensor)
    shifts = counts and (isinstance(shifted, Tensor) or shifts_labels(model, labels))
    return ForwardRecord(has_labels, count_targets(labels, mesh, shifts) if counts else None)


def weigh(
    forward: ForwardRecord | None, items: Tensor | int | None, several: bool, mesh: DeviceMesh, device: torch.device
) -> Weight:
    """Weight of a micro-batch. Collective if `items` is given.

    Args:
        forward: its forward; None if it ran before `accumulate`.
        items: see `weft.Run.backward`.
        several: True if the step has several micro-batches.

    Raises:
        ModelError: `items` is negative on a rank, zero on all ranks, or differs between ranks after a forward with labels; or
            the weight is not known; the same on every rank.
    """
    if items is None and forward is None and several:
        raise unknown_weight("a loss whose forward ran before run.accumulate")
    if items is None:
        counted = forward.targets if forward else None
        return Weight(torch.ones(()) if counted is None else counted, 1.0, counted is not None)
    own = float(items)
    total, negative = all_reduce(
        torch.tensor([own, float(own < 0)], dtype=torch.float64, device=device), mesh, DATA_AXES
    ).cpu()
    high, low = all_reduce(torch.tensor([own, -own], dtype=torch.float64, device=device), mesh, AXES, "max").tolist()
    if negative > 0 or not total > 0:
        raise ModelError(
            f"items adds up to {total:g} over the data ranks" + (", with a negative number" if negative > 0 else ""),
            where="weft.Run.backward",
            rule="items is the number of elements that the loss of a data rank averages",
            fix="pass the number of targets, for example (labels[:, 1:] != -100).sum()",
        )
    if forward is not None and forward.has_labels and high != -low:
        raise ModelError(
            "items that differ between ranks, after a forward with labels",
            where="weft.Run.backward",
            rule="the loss of the model is the mean over the targets of all data ranks already",
            fix="leave items out for the loss of the model; for a loss of your own, call the model without labels",
        )
    return Weight(total, own * ranks_along(mesh, *DATA_AXES) / float(total), True)


def check_accumulate(runtime: Runtime) -> None:
    """Refuse forward and backward of one micro-batch where `Run.train_batch` alone is right.

    Raises:
        PlanError: the plan has a pipeline, or a backward in fp16.
        ModelError: the model has an auxiliary loss of its routers.
    """
    if runtime.pipeline is not None:
        raise PlanError(
            f"run.accumulate under plan.parallel.pp = {runtime.plan.parallel.pp}",
            where="weft.Run.accumulate",
            rule="the schedule of a pipeline runs forward and backward of all micro-batches of a step together",
            fix="call run.train_batch(batch) instead of forward and run.backward",
        )
    if runtime.plan.precision.backward == "fp16":
        raise PlanError(
            'run.accumulate with plan.precision.backward = "fp16"',
            where="weft.Run.accumulate",
            rule="gradients become fp16 between the loss and the logits, in the loss that Weft computes",
            fix="call run.train_batch(batch) instead of forward and run.backward",
        )
    if runtime.router_stats.coefficient > 0:
        raise ModelError(
            "run.accumulate with output_router_logits = True",
            where="weft.Run.accumulate",
            rule="the auxiliary loss of the model's own forward depends on which tokens a rank has",
            fix="call run.train_batch(batch), which adds the same auxiliary loss under every plan",
        )


def unknown_weight(what: str) -> ModelError:
    """Error for micro-batches whose weights are not known."""
    return ModelError(
        what,
        where="weft.Run.backward",
        rule="the micro-batches of a step are averaged by their numbers of targets, which the forward in run.accumulate counts",
        fix="run forward in run.accumulate with labels, or pass items= for each micro-batch",
    )


def divisor(items: Tensor) -> Tensor:
    """Number of items to divide by: 1 if there are none."""
    return torch.where(items == 0, 1, items)
