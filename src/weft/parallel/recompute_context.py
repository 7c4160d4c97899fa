"""What a module sees in forward, and must see again where backward runs it once more."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def capture_context(model: Any, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Called while a module of a parallelized model runs forward; what it returns sets the same scene again.

    Weights in flight are put in their places: what is at rest is a DTensor, or in another format. Dropout knows the rows that
    were on their way. Routers are not watched: what they say has been heard.
    """
    weights = [
        (part._parameters, name, value)
        for part in _own_modules(module)
        for name, value in part._parameters.items()
        if value is not None
    ]
    place = getattr(model, "dropout_place", None)
    return partial(_scene, model, weights, place and replace(place))


@contextmanager
def _scene(model: Any, weights: list[tuple[dict[str, Any], str, Any]], place: Any) -> Iterator[None]:
    now = [(table, name, table[name]) for table, name, _ in weights]
    places_now = place and replace(model.dropout_place)
    _set(model, weights, place, watched=False)
    try:
        yield
    finally:
        _set(model, now, places_now, watched=True)


def _set(model: Any, weights: list[tuple[dict[str, Any], str, Any]], place: Any, *, watched: bool) -> None:
    for table, name, value in weights:
        table[name] = value
    if place:
        vars(model.dropout_place).update(vars(place))
    model.router_watch.hears = watched


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those inside, but units of FSDP2 inside it, which gather their weights by themselves."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
