"""Location of non-finite values: find the rank and the parameter that made a step non-finite.

After the gradient reduction every rank sees the same NaN. The step is therefore rerun, and each rank checks its own gradients
as they are computed, before they are reduced. This costs one more forward and backward, on non-finite steps only.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.comm.objects import all_gather_json


class NonFiniteReport(NamedTuple):
    """Findings of one rank in a rerun of a non-finite step."""

    bad_loss: bool
    parameter: str | None
    """Parameter with a non-finite gradient that forward uses last: backward spreads the values to earlier parameters."""
    stage: int
    """Pipeline stage of the parameter."""


def locate_nonfinite(model: nn.Module, rerun: Callable[[], float], stage: Callable[[], int]) -> str:
    """Find the rank and the parameter where non-finite values begin. Collective; all ranks return the same text.

    Of several pipeline stages with non-finite gradients, the last stage is named, because backward spreads them to earlier
    stages.

    Args:
        model: parallelized model with the weights of the non-finite step.
        rerun: runs forward and backward of the step's micro-batches on this rank; returns the loss of this rank.
        stage: returns the index of the pipeline stage that is running; 0 without a pipeline.
    """
    reports = [NonFiniteReport(*fields) for fields in all_gather_json(_check_rerun(model, rerun, stage))]
    affected = [rank for rank, report in enumerate(reports) if report.bad_loss or report.parameter]
    if not affected:
        return "a loss or gradient was not finite, but a rerun of the step was finite, so that the origin is unknown"
    first = max(affected, key=lambda rank: (reports[rank].bad_loss, reports[rank].stage))  # the lowest rank of equals
    report = reports[first]
    what = ["the loss"] * report.bad_loss + [f"the gradient of {report.parameter}"] * (report.parameter is not None)
    others = ", ".join(str(rank) for rank in affected if rank != first)
    return f"rank {first}: {' and '.join(what)} not finite" + (f" (also on rank {others})" if others else "")


def _check_rerun(model: nn.Module, rerun: Callable[[], float], stage: Callable[[], int]) -> NonFiniteReport:
    known = {name for name, _ in model.named_parameters()}
    positions: dict[str, tuple[int, int]] = {}
    """Stage, and order of use in forward, of each parameter."""
    nonfinite: set[str] = set()
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(name: str, parameter: Tensor) -> None:
        def check(gradient: Tensor) -> None:
            if name not in nonfinite and not bool(torch.isfinite(gradient).all()):
                nonfinite.add(name)

        positions.setdefault(name, (stage(), len(positions)))
        hooks.append(parameter.register_hook(check))

    def before_forward(prefix: str) -> Callable[[nn.Module, object], None]:
        def watch_weights(module: nn.Module, _: object) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name in known:  # a tied weight is known by its first name
                    watch(name, parameter)

        return watch_weights

    # Gathered weights exist only while their block runs, so each module's forward registers the hooks.
    for prefix, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(before_forward(prefix)))
    loss = rerun()
    for hook in hooks:
        hook.remove()
    bad_loss = not math.isfinite(loss)
    parameter = max(nonfinite, key=positions.__getitem__, default=None)
    return NonFiniteReport(bad_loss, parameter, positions[parameter][0] if parameter else 0)
