"""The non-finite guard's second look: which rank, and which parameter, made a step non-finite.

After the reduction every rank sees the same NaN. The step is run once more, and each rank looks at its own gradients while
they are made, before they are reduced. This costs one more forward and backward, on bad steps only.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.comm.objects import all_gather_json


class NonFiniteReport(NamedTuple):
    """What one rank saw of a bad step."""

    bad_loss: bool
    parameter: str | None
    """With a non-finite gradient, the last one that forward met: backward spreads it to those before."""
    stage: int
    """Of a pipeline: that of the parameter."""


def find_culprit(model: nn.Module, rerun: Callable[[], float], stage: Callable[[], int]) -> str:
    """Name the rank and the parameter where non-finite numbers begin. Every rank must call it; all return the same text.

    The stages of a pipeline have other parameters each, and a NaN of the last one spreads to all: the last counts.

    Args:
        model: parallelized, with its weights as they were in the bad step.
        rerun: forward and backward of the bad step's micro-batches on this rank; returns this rank's own loss.
        stage: tells which stage of a pipeline is running; 0 without one.
    """
    sights = [NonFiniteReport(*seen) for seen in all_gather_json(_watch(model, rerun, stage))]
    guilty = [rank for rank, sight in enumerate(sights) if sight.bad_loss or sight.parameter]
    if not guilty:
        return "a loss or a gradient was not finite; run once more the step was finite, so that no rank can be named"
    first = max(guilty, key=lambda rank: (sights[rank].bad_loss, sights[rank].stage))  # of equals the lowest rank
    sight = sights[first]
    what = ["the loss"] * sight.bad_loss + [f"the gradient of {sight.parameter}"] * (sight.parameter is not None)
    others = ", ".join(str(rank) for rank in guilty if rank != first)
    return f"rank {first}: {' and '.join(what)} not finite" + (f" (also on rank {others})" if others else "")


def _watch(model: nn.Module, rerun: Callable[[], float], stage: Callable[[], int]) -> NonFiniteReport:
    known = {name for name, _ in model.named_parameters()}
    places: dict[str, tuple[int, int]] = {}
    """Stage and turn in forward of each parameter that was met."""
    spoilt: set[str] = set()
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(name: str, parameter: Tensor) -> None:
        def look(gradient: Tensor) -> None:
            if name not in spoilt and not bool(torch.isfinite(gradient).all()):
                spoilt.add(name)

        places.setdefault(name, (stage(), len(places)))
        hooks.append(parameter.register_hook(look))

    def before_forward(prefix: str) -> Callable[[nn.Module, object], None]:
        def watch_weights(module: nn.Module, _: object) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name in known:  # a tied weight is known by its first name
                    watch(name, parameter)

        return watch_weights

    # Gathered weights exist only while their block runs, so that they are met at each module's forward.
    for prefix, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(before_forward(prefix)))
    loss = rerun()
    for hook in hooks:
        hook.remove()
    bad_loss = not math.isfinite(loss)
    parameter = max(spoilt, key=places.__getitem__, default=None)
    return NonFiniteReport(bad_loss, parameter, places[parameter][0] if parameter else 0)
