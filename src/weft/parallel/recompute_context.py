"""State of a parallelized model that recompute must restore: local weights, dropout context, router statistics."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def capture_context(model: Any, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Capture the context of a module during its forward.

    Args:
        model: parallelized model.
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
    dropout = getattr(model, "dropout_place", None)
    return partial(_restored, model, weights, dropout and replace(dropout))


@contextmanager
def _restored(model: Any, weights: list[tuple[dict[str, Any], str, Any]], dropout: Any) -> Iterator[None]:
    current_weights = [(table, name, table[name]) for table, name, _ in weights]
    current_dropout = dropout and replace(model.dropout_place)
    _set(model, weights, dropout, recording=False)
    try:
        yield
    finally:
        _set(model, current_weights, current_dropout, recording=True)


def _set(model: Any, weights: list[tuple[dict[str, Any], str, Any]], dropout: Any, *, recording: bool) -> None:
    for table, name, value in weights:
        table[name] = value
    if dropout:
        vars(model.dropout_place).update(vars(dropout))
    model.router_watch.recording = recording


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, except nested FSDP2 units, which gather their own weights."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
