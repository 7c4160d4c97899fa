"""State of a parallelized model that recompute must restore: local weights, dropout context, router statistics."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.lanes import Lanes
from weft.parallel.dropout import DropoutContext
from weft.parallel.moe_aux_loss import RouterStats

Weights = list[tuple[dict[str, Any], str, Any]]
"""Parameters of modules: (table of the module, name, value)."""


def capture_context(
    router_stats: RouterStats, dropout: DropoutContext | None, lanes: Lanes | None, module: nn.Module
) -> Callable[[], AbstractContextManager[None]]:
    """Capture the context of a module during its forward.

    Args:
        router_stats: router statistics of the model.
        dropout: seed and rows of its layout-invariant dropout, if it has dropout.
        lanes: lanes of joint forwards and backwards; a recompute does not hand over, because it changes the model for a while.
        module: module of the model whose forward is running.

    Returns:
        A function that returns a context manager, which restores the captured context for recompute. Parameters are the local
        weights of forward, not the stored DTensors, which may have another dtype. Dropout gets the rows and seed of this
        forward. Router statistics are not recorded a second time.
    """
    weights = [
        (part._parameters, name, value)
        for part in _own_modules(module)
        for name, value in part._parameters.items()
        if value is not None
    ]
    return partial(_restored, router_stats, weights, dropout, dropout and replace(dropout), lanes)


@contextmanager
def _restored(
    router_stats: RouterStats,
    weights: Weights,
    dropout: DropoutContext | None,
    captured: DropoutContext | None,
    lanes: Lanes | None,
) -> Iterator[None]:
    current_weights = [(table, name, table[name]) for table, name, _ in weights]
    current = dropout and replace(dropout)
    _set(weights, dropout, captured)
    router_stats.recording = False
    try:
        with lanes.held() if lanes else nullcontext():
            yield
    finally:
        _set(current_weights, dropout, current)
        router_stats.recording = True


def _set(weights: Weights, dropout: DropoutContext | None, values: DropoutContext | None) -> None:
    for table, name, value in weights:
        table[name] = value
    if dropout is not None:
        vars(dropout).update(vars(values))


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, except nested FSDP2 units, which gather their own weights."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
