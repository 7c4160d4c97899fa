"""Computing again in backward what forward did not keep (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).

What a block keeps for backward, by what `plan.memory.recompute` names:

    block         its input, and what is computed again runs once more as a whole: forward a second time
    attention     in the place of all inside: the input of the attention
    mlp           the same of the feed-forward part, experts inside
    activation    all but what activation functions, and the products of gates, make: `rebuild.py`, at next to no cost
    norm          all but what norms make, the copies in float32 among it

Attention that is computed again and outputs that are made again go together; and what a module keeps may wait elsewhere
(`offload.py`), be it the input that a block is computed again from.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from weft.anatomy.roles import Anatomy, Block
from weft.memory.offload import Offload
from weft.memory.output_recompute import Tape
from weft.plan import Memory

Scene = AbstractContextManager[Any]
Remember = Callable[[nn.Module], Callable[[], Scene]]


def keep_less(
    model: nn.Module, anatomy: Anatomy, own: set[str], memory: Memory, remember: Remember, offload: Offload
) -> None:
    """Let blocks keep less for backward, or keep it elsewhere, in place. Gradients are the same, bit by bit.

    Args:
        model: split over all axes but data.
        anatomy: of the whole model.
        own: names of the blocks that are here.
        memory: of the plan.
        remember: called in forward with a module; what it returns is called in backward, and sets the scene for that forward
            again: weights in flight, places of dropout.
        offload: where activations of `memory.offload` wait.
    """
    if memory.offload:
        model.register_forward_pre_hook(offload.begin_forward)
    for number, block in enumerate(anatomy.blocks):
        if block.name not in own:
            continue
        recomputes = number % memory.recompute_interval == 0
        again = modules_of(block, memory.recompute) if recomputes else ()
        noted = noted_modules(block, memory) if recomputes else ()
        sent = modules_of(block, memory.offload)
        tapes: list[Tape] = []
        for name in again:
            module = model.get_submodule(name)
            module.forward = partial(_run_again, module.forward, module, remember)
        for name in noted:
            module = model.get_submodule(name)
            module.forward = partial(_noted, module.forward, tapes)
        for name in sent:
            module = model.get_submodule(name)
            module.forward = partial(_sent, module.forward, module, tapes, offload)
        if noted or sent:
            module = model.get_submodule(block.name)
            module.forward = partial(_taped, module.forward, tapes)


def follow_library_recompute(model: nn.Module, remember: Remember) -> None:
    """Let the recompute of Transformers (`model.gradient_checkpointing_enable`) see the weights of forward, in place.

    It runs the forward of a layer once more without its hooks, which show it its weights in flight.

    Args:
        model: split over all axes but data.
        remember: as in `keep_less`.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def wrap(*_: object) -> None:
        for layer in layers:  # the user may change the function between two forwards
            own = getattr(layer, "_gradient_checkpointing_func", None)
            if own is not None and getattr(own, "func", None) is not _recompute_layer:
                layer._gradient_checkpointing_func = partial(_recompute_layer, own, layer, remember)

    model.register_forward_pre_hook(wrap)


def _recompute_layer(
    recompute: Callable[..., Any], layer: nn.Module, remember: Remember, forward: Callable[..., Any], *args: Any
) -> Any:
    scene, runs = remember(layer), [nullcontext()]

    def run(*inputs: Any) -> Any:
        with runs.pop() if runs else scene():  # first in forward, as things are
            return forward(*inputs)

    return recompute(run, *args)


def modules_of(block: Block, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the modules of some roles."""
    names = {"block": (block.name,), "attention": block.attention, "mlp": block.mlp}
    return tuple(name for role, own in names.items() if role in roles for name in own)


def noted_modules(block: Block, memory: Memory) -> tuple[str, ...]:
    """Names of the modules inside of which results of cheap operations are made again; none is inside another."""
    roles = {"norm": block.norms, "activation": block.mlp}
    names = [name for role, names in roles.items() if role in memory.recompute for name in names]
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def _run_again(forward: Any, module: nn.Module, remember: Remember, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    scene = remember(module)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), scene()), **kwargs)


def _taped(forward: Any, tapes: list[Tape], *args: Any, **kwargs: Any) -> Any:
    """The forward of a block."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    tapes.append(Tape())
    try:
        with tapes[-1].keeping():
            return forward(*args, **kwargs)
    finally:
        tapes.pop()


def _noted(forward: Any, tapes: list[Tape], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module inside."""
    if not tapes:
        return forward(*args, **kwargs)
    with tapes[-1].recording():
        return forward(*args, **kwargs)


def _sent(forward: Any, module: nn.Module, tapes: list[Tape], offload: Offload, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module whose activations wait elsewhere."""
    if not tapes:
        return forward(*args, **kwargs)
    with tapes[-1].keeping_by(offload.begin(module)):
        return forward(*args, **kwargs)
