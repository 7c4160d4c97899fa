"""Activation recompute (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).

What a block saves for backward, by the entries of `plan.memory.recompute`:

    block         its input; the full block runs forward a second time
    attention     the input of the attention, instead of everything inside it
    mlp           the input of the feed-forward part (or experts), instead of everything inside it
    activation    everything but the outputs of activation functions and of gating: `output_recompute.py`, nearly free
    norm          everything but the outputs of norms, and their float32 copies

"attention" can be combined with "activation" and "norm". Whatever a module saves can also be offloaded (`offload.py`), even the
input from which a block is recomputed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from weft.anatomy.roles import Anatomy, Block
from weft.memory.offload import Offload
from weft.memory.output_recompute import Tape
from weft.plan import Memory

RecomputeContext = AbstractContextManager[Any]
CaptureContext = Callable[[nn.Module], Callable[[], RecomputeContext]]


def apply_recompute(
    model: nn.Module, anatomy: Anatomy, own: set[str], memory: Memory, capture_context: CaptureContext, offload: Offload
) -> None:
    """Apply recompute and activation offload to the blocks of a model, in place. Gradients stay bit-equal.

    Args:
        model: model, sharded over all axes but data.
        anatomy: anatomy of the full model.
        own: names of the blocks on this rank.
        memory: memory settings of the plan.
        capture_context: called with a module in forward. It returns a function that backward calls for a context in which the
            module runs forward again with the same gathered weights, dropout positions and random numbers.
        offload: offload manager for the activations of `memory.offload`.
    """
    if memory.offload:
        model.register_forward_pre_hook(offload.begin_forward)
    if anatomy.has_roles or "use_cache" in signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    own_blocks = [pair for stack in (anatomy.encoder_blocks, anatomy.blocks) for pair in enumerate(stack)]
    own_blocks = [(index, block) for index, block in own_blocks if block.name in own]
    for index, block in [*enumerate(anatomy.tower_blocks), *own_blocks]:
        is_recomputed = index % memory.recompute_interval == 0
        checkpointed = modules_of(block, memory.recompute) if is_recomputed else ()
        recorded = output_recompute_modules(block, memory) if is_recomputed else ()
        offloaded = modules_of(block, memory.offload)
        tapes: list[Tape] = []
        for name in checkpointed:
            module = model.get_submodule(name)
            module.forward = partial(_checkpointed, module.forward, module, capture_context)
        for name in recorded:
            module = model.get_submodule(name)
            module.forward = partial(_recording, module.forward, tapes)
        for name in offloaded:
            module = model.get_submodule(name)
            module.forward = partial(_offloading, module.forward, module, tapes, offload)
        if recorded or offloaded:
            module = model.get_submodule(block.name)
            module.forward = partial(_with_tape, module.forward, tapes)


def _without_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: no key-value cache in training, because a second forward of an attention would add to it."""
    return (args, kwargs | {"use_cache": False}) if model.training else None


def patch_library_recompute(model: nn.Module, capture_context: CaptureContext) -> None:
    """Make the recompute of Transformers (`model.gradient_checkpointing_enable`) use the weights of forward, in place.

    That recompute runs the forward of a layer a second time without its hooks, which provide the gathered weights.

    Args:
        model: model, sharded over all axes but data.
        capture_context: as in `apply_recompute`.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def wrap(*_: object) -> None:
        for layer in layers:  # at each forward, because the user may change the function between two forwards
            own = getattr(layer, "_gradient_checkpointing_func", None)
            if own is not None and getattr(own, "func", None) is not _recompute_layer:
                layer._gradient_checkpointing_func = partial(_recompute_layer, own, layer, capture_context)

    model.register_forward_pre_hook(wrap)


def _recompute_layer(
    recompute: Callable[..., Any],
    layer: nn.Module,
    capture_context: CaptureContext,
    forward: Callable[..., Any],
    *args: Any,
) -> Any:
    if isinstance(getattr(forward, "func", None), MethodType):
        return _recompute_call(recompute, layer, capture_context, forward, *args)
    context, runs = capture_context(layer), [nullcontext()]

    def run(*inputs: Any) -> Any:
        with runs.pop() if runs else context():  # the first run is forward itself, which needs no context
            return forward(*inputs)

    return recompute(run, *args)


def _recompute_call(
    recompute: Callable[..., Any],
    layer: nn.Module,
    capture_context: CaptureContext,
    call: Callable[..., Any],
    *args: Any,
) -> Any:
    """Recompute the forward of a layer where the library recomputes its call, with hooks (Transformers before 5.20).

    Hooks gather weights, so that they must run before the context is captured, and only once.
    """
    before = vars(layer).get("forward")
    forward = layer.forward

    def recomputed(*inputs: Any, **kwargs: Any) -> Any:
        return _recompute_layer(recompute, layer, capture_context, partial(_call, forward, kwargs), *inputs)

    layer.forward = recomputed
    try:
        return call(*args)
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def _call(forward: Callable[..., Any], kwargs: dict[str, Any], *inputs: Any) -> Any:
    return forward(*inputs, **kwargs)


def recomputed_experts(anatomy: Anatomy, memory: Memory) -> frozenset[str]:
    """Names of the experts modules that backward recomputes."""
    blocks = anatomy.blocks[:: memory.recompute_interval] if {"block", "mlp"} & set(memory.recompute) else ()
    return frozenset(name for block in blocks for name in block.experts)


def modules_of(block: Block, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the modules with one of these roles."""
    names = {"block": (block.name,), "attention": block.attention, "mlp": block.mlp}
    return tuple(name for role, own in names.items() if role in roles for name in own)


def output_recompute_modules(block: Block, memory: Memory) -> tuple[str, ...]:
    """Names of the outermost modules whose outputs of cheap operations are recomputed."""
    roles = {"norm": block.norms, "activation": block.mlp}
    names = [name for role, names in roles.items() if role in memory.recompute for name in names]
    return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))


def _checkpointed(forward: Any, module: nn.Module, capture_context: CaptureContext, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    context = capture_context(module)
    kwargs["preserve_rng_state"] = False  # the context sets random numbers, which lanes exchange
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), context()), **kwargs)


def _with_tape(forward: Any, tapes: list[Tape], *args: Any, **kwargs: Any) -> Any:
    """Forward of a block with output recompute or offload inside."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    tapes.append(Tape())
    try:
        with tapes[-1].packing():
            return forward(*args, **kwargs)
    finally:
        tapes.pop()


def _recording(forward: Any, tapes: list[Tape], *args: Any, **kwargs: Any) -> Any:
    """Forward of a module with output recompute."""
    if not tapes:
        return forward(*args, **kwargs)
    with tapes[-1].recording():
        return forward(*args, **kwargs)


def _offloading(forward: Any, module: nn.Module, tapes: list[Tape], offload: Offload, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module whose activations are offloaded."""
    if not tapes:
        return forward(*args, **kwargs)
    with tapes[-1].packing_others_with(offload.begin_module(module)):
        return forward(*args, **kwargs)
