"""The non-finite guard's second look: which rank, and which parameter, made a step non-finite.

After the reduction every rank sees the same NaN. The step is run once more, and each rank looks at its own gradients while
they are made, before they are reduced. This costs one more forward and backward, on bad steps only.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.collectives import all_gather_rows


def find_culprit(model: nn.Module, rerun: Callable[[], float]) -> str:
    """Name the rank and the parameter where non-finite numbers begin. Every rank must call it; all return the same text.

    Args:
        model: parallelized, with its weights as they were in the bad step.
        rerun: forward and backward of the bad step's micro-batches on this rank; returns this rank's own loss.
    """
    names = [name for name, _ in model.named_parameters()]
    loss, first = _watch(model, rerun, {name: index for index, name in enumerate(names)})
    mine = torch.tensor([int(not math.isfinite(loss)), first])
    ranks = all_gather_rows(mine, dist.get_world_size()).tolist()
    guilty = [(rank, bad_loss, index) for rank, (bad_loss, index) in enumerate(ranks) if bad_loss or index >= 0]
    if not guilty:
        return "a loss or a gradient was not finite; run once more the step was finite, so that no rank can be named"
    rank, bad_loss, index = guilty[0]
    what = ["the loss"] * bad_loss + [f"the gradient of {names[index]}"] * (index >= 0)
    others = ", ".join(str(other) for other, *_ in guilty[1:])
    return f"rank {rank}: {' and '.join(what)} not finite" + (f" (also on rank {others})" if others else "")


def _watch(model: nn.Module, rerun: Callable[[], float], number: dict[str, int]) -> tuple[float, int]:
    """This rank's loss, and the number of the first parameter in backward order with a non-finite gradient, or -1."""
    first = -1
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(parameter: Tensor, index: int) -> None:
        def look(gradient: Tensor) -> None:
            nonlocal first
            if first < 0 and not bool(torch.isfinite(gradient).all()):
                first = index

        hooks.append(parameter.register_hook(look))

    def before_forward(prefix: str) -> Callable[[nn.Module, object], None]:
        def watch_weights(module: nn.Module, _: object) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.requires_grad and name in number:  # a tied weight is known by its first name
                    watch(parameter, number[name])

        return watch_weights

    # Gathered weights exist only while their block runs, so that they are met at each module's forward.
    for prefix, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(before_forward(prefix)))
    loss = rerun()
    for hook in hooks:
        hook.remove()
    return loss, first
