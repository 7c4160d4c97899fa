"""Boundaries of tensor-parallel regions: forward hooks that run the collectives of tensor and sequence parallelism."""

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from weft.comm import collectives
from weft.errors import PlanError, raise_if_refused
from weft.parallel.tensor.adapters import linear_parts
from weft.parallel.tensor.async_tp import RegionBoundary, fuse_reduction, is_plain, share_gather
from weft.parallel.tensor.rules import DOWN, KEY_VALUE, PACKED_QUERY_KEY_VALUE, PACKED_UP, QUERY, UP
from weft.parallel.tensor.vocabulary import SEQUENCE, reason_against_length

# Linear layers whose input is the input of their region.
FIRST_OF_ATTENTION = (QUERY, KEY_VALUE, PACKED_QUERY_KEY_VALUE)
FIRST_OF_MLP = (UP, PACKED_UP)
ENCODED = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "key")
"""Arguments of an attention with the outputs of an encoder, which are whole on all ranks; Wan passes them by position."""
HIDDEN = ("hidden_states", "query")
"""Names of the argument of an attention or MLP with the hidden states; the second is that of FSMT."""


def input_hook(
    region: nn.Module,
    config: Any,
    group: dist.ProcessGroup,
    sp: bool,
    dim: int,
    first: tuple[re.Pattern[str], ...],
    boundary: RegionBoundary | None,
    own_name: str = "",
) -> Callable[..., Any]:
    """Forward pre-hook of a region: gather the sequence in forward, sum gradients over ranks in backward."""
    if boundary is not None and share_gather(region, config, own_name, first, DOWN, boundary.split):
        return lambda _, args, kwargs: map_hidden(args, kwargs, boundary.enter)

    def enter(hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, group, dim) if sp else collectives.copy(group, hidden)[0]

    def enter_all(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        encoded = {name: kwargs[name] for name in ENCODED if isinstance(kwargs.get(name), Tensor)}
        encoded = {name: states for name, states in encoded.items() if states is not hidden}
        kwargs = kwargs | {name: collectives.copy(group, states)[0] for name, states in encoded.items()}
        # In an MLP, it is the residual stream, which is added to complete sums.
        is_encoded = first is FIRST_OF_ATTENTION and len(args) > 1 and isinstance(args[1], Tensor)
        if is_encoded and args[1].requires_grad and args[1] is not hidden:
            args = (args[0], collectives.copy(group, args[1])[0], *args[2:])
        return map_hidden(args, kwargs, enter)

    return enter_all


def positions_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward pre-hook of an attention of `SHARED_POSITIONS`: sum gradients of the features of positions over ranks."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        features = kwargs.get("position_bias")
        return args, kwargs if features is None else kwargs | {"position_bias": collectives.copy(group, features)[0]}

    return enter


def map_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the hidden states in the arguments of a module: the first argument, positional or by name.

    Other arguments that are the same tensor, such as keys and values in self-attention, change with it.
    """
    hidden = hidden_of(args, kwargs)
    if hidden is None:
        raise PlanError(
            f"an attention or MLP that is called with {', '.join(kwargs)}",
            where="plan.parallel",
            rule=f"tp and cp split the first argument, or the one with the name {' or '.join(HIDDEN)}",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    changed = change(hidden)
    own_args = tuple(changed if value is hidden else value for value in args)
    return own_args, {name: changed if value is hidden else value for name, value in kwargs.items()}


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hidden states in the arguments of a module; None if no argument has a known name."""
    return args[0] if args else next((kwargs[name] for name in HIDDEN if name in kwargs), None)


def map_output(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the hidden states that a module returns: alone, or first in a tuple (GPT-OSS adds router scores)."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def is_output_layer(region: nn.Module, config: Any, name: str) -> bool:
    """True for a region that is the output layer alone, whose input its rank has made; see `regions_of`."""
    first = next(linear_parts(region, config, name), None)
    return first is not None and first.layer is region and DOWN.fullmatch(first.last) is not None


def reduce_output(
    region: nn.Module,
    config: Any,
    group: dist.ProcessGroup,
    sp: bool,
    dim: int,
    boundary: RegionBoundary | None,
    own_name: str = "",
) -> None:
    """Reduce the outputs of the row-parallel layers of a region over ranks (reduce-scatter with sequence parallelism).

    The reduction comes directly after the layer, not at the end of the region: the following modules (dropout in GPT-2) need
    complete sums.
    """

    def reduce(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return collectives.reduce_scatter(out, group, dim) if sp else collectives.reduce(out, group)

    for _, module, last, matrix, layer in linear_parts(region, config, own_name):
        if matrix == "weight" and DOWN.fullmatch(last):
            if boundary is not None and is_plain(module):
                fuse_reduction(module, boundary)
            else:
                layer.register_forward_hook(reduce)


def split_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    def split(hidden: Tensor) -> Tensor:
        raise_if_refused(reason_against_length(hidden.shape[SEQUENCE], group.size()))
        return collectives.split(hidden, group, SEQUENCE)

    return lambda _, args, kwargs: map_hidden(args, kwargs, split)


def gather_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward pre-hook of a part that all ranks compute for whole sequences.

    Each rank keeps a part of its output. The gradients of weights and arguments come from this part, and are summed over ranks.
    Arguments of the shape of the hidden states are parts of the residual stream (Bloom adds it inside its attention; MobileBERT
    has a stream of another width).
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        shape = getattr(hidden, "shape", None)

        def share(value: Any, name: str = "") -> Any:
            if not isinstance(value, Tensor) or value is hidden:
                return value
            if shape is not None and value.shape[:-1] == shape[:-1] and name not in ENCODED:
                return collectives.gather(value, group, SEQUENCE)
            return collectives.copy(group, value)[0] if value.requires_grad else value

        args, kwargs = tuple(map(share, args)), {name: share(value, name) for name, value in kwargs.items()}
        return map_hidden(args, kwargs, lambda x: collectives.gather(x, group, SEQUENCE))

    return enter


def own_part_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward hook of a part that all ranks compute for whole sequences: keep the part of this rank."""
    return lambda _, args, out: map_output(out, lambda x: x.chunk(group.size(), SEQUENCE)[group.rank()])


def own_tokens_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward pre-hook of an MLP with experts that chooses them by token id: keep the ids of this rank."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = kwargs.get("input_ids")
        if tokens is not None:
            kwargs = kwargs | {"input_ids": tokens.chunk(group.size(), SEQUENCE)[group.rank()]}
        return args, kwargs

    return enter


def unsplit_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    return lambda _, args, out: map_output(out, lambda x: collectives.unsplit(x, group, SEQUENCE))


def unsplit_tokens_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward hook of an MLP with experts, which may return tokens of all rows in one dim (Llama 4)."""

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        rows = len(hidden_of(args, kwargs))

        def whole(x: Tensor) -> Tensor:
            if x.ndim > 2:
                return collectives.unsplit(x, group, SEQUENCE)
            return collectives.unsplit(x.unflatten(0, (rows, -1)), group, SEQUENCE).flatten(0, 1)

        return map_output(out, whole)

    return leave
