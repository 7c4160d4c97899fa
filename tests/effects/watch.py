"""Counters that a test installs in the process of a rank before the first step, and removes after the last one."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.lab.families import family
from weft.parallel.experts import path
from weft.training.session import Session

MOE = {**family("qwen3_moe"), "vocab_size": 300, "num_experts": 8}
"""Configuration of a model with two layers of eight experts, of which each token takes two."""
SEEN: list[Any] = []
"""Notes of this rank in the current run."""
_patches: list[Any] = []


def watch(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Call `note` with the arguments of each call of a function, before the call, until `unwatch`.

    Args:
        owner: module or class of the function. A module that imports the function by name has its own.
        name: name of the function.
        note: appends to `SEEN`.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    _patches.append(mock.patch.object(owner, name, watched))
    _patches[-1].start()


def unwatch() -> list[Any]:
    """Restore all functions; return the notes of the run."""
    while _patches:
        _patches.pop().stop()
    notes = SEEN.copy()
    SEEN.clear()
    return notes


def route_tokens(session: Session, count: int) -> None:
    """Send the copies of tokens to the first experts in turn, whatever the router chooses.

    Args:
        session: session of a rank with a model `MOE`.
        count: number of experts.
    """

    def choose(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, index, weights = (*args, *kwargs.values())
        return (hidden, torch.arange(index.numel()).view_as(index) % count, weights), {}

    for block in session.anatomy.blocks:
        for name in block.experts:
            session.model.get_submodule(name).register_forward_pre_hook(choose, with_kwargs=True, prepend=True)


def route_to_the_first_half(session: Session) -> None:
    """Send the copies of tokens to experts 0 to 3, which the first of two ranks has, and note the rows of each forward."""
    route_tokens(session, 4)
    watch(path, "run_experts", lambda forward, rows, index: SEEN.append(len(rows)))
