"""Shared experts of a Mixture-of-Experts layer, computed while the rows of the routed experts travel."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.parallel.experts.path import ExpertPath

if TYPE_CHECKING:
    from weft.parallel.build import Build


def overlap_shared_experts(
    model: nn.Module, anatomy: Anatomy, paths: Mapping[str, ExpertPath]
) -> "list[SharedExperts]":
    """Overlap shared experts with the dispatch of routed experts, in place, if the model calls shared experts after them.

    In backward, the shared experts overlap with the all-to-all of the gradients of dispatch.

    Args:
        model: model with split experts; later changes must not change the arguments of its MoE modules.
        anatomy: its roles.
        paths: paths of the routed experts, by name.

    Returns:
        The shared experts that may be computed early.
    """
    early = []
    for block in anatomy.blocks:
        for name in block.shared_experts:
            layer = next((mlp for mlp in block.mlp if name.startswith(f"{mlp}.")), None)
            routed = [paths[other] for other in block.experts if layer and other.startswith(f"{layer}.")]
            shared: Any = model.get_submodule(name)
            takes_only_tokens = len(inspect.signature(type(shared).forward).parameters) == 2  # self, tokens
            if layer is not None and len(routed) == 1 and takes_only_tokens:
                early.append(_compute_early(shared, model.get_submodule(layer), routed[0]))
    return early


def _compute_early(shared: Any, moe: Any, routed: ExpertPath) -> "SharedExperts":
    """Replace the forwards of a layer and of its shared experts; hooks would not run in a recompute."""
    early, call_layer = SharedExperts(shared.forward), moe.forward
    shared.forward = torch.compiler.disable(lambda hidden: early(hidden))
    moe.forward = torch.compiler.disable(lambda *args, **kwargs: early.call_layer(call_layer, *args, **kwargs))
    routed.meanwhile = early.compute
    return early


class SharedExperts:
    """Forward of shared experts that may be computed before the model calls it."""

    def __init__(self, forward: Callable[[Tensor], Tensor]):
        self.forward = forward
        self.hidden: Tensor | None = None
        self.out: Tensor | None = None
        self.input_is_layer_input = True
        """True unless the model has called the shared experts with another tensor than the input of the layer."""

    def take(self) -> Any:
        """See `weft.comm.lanes.Registers`."""
        return self.hidden, self.out

    def give(self, values: Any, other: Any) -> None:
        """See `weft.comm.lanes.Registers`."""
        self.hidden, self.out = values

    def call_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward of the MoE layer; stores its input, the expected input of the shared experts."""
        self.hidden, self.out = (args or tuple(kwargs.values()))[0], None
        return forward(*args, **kwargs)

    def compute(self) -> None:
        """Compute the output now, unless the model has already called the shared experts."""
        if self.hidden is not None and self.input_is_layer_input:
            self.out = self.forward(self.hidden)

    def __call__(self, hidden: Tensor) -> Tensor:
        self.input_is_layer_input, out = hidden is self.hidden, self.out
        self.hidden = self.out = None
        return out if self.input_is_layer_input and out is not None else self.forward(hidden)


def overlap_shared(build: "Build") -> None:
    """Step of `parallelize`: shared experts, split over tp, while the rows of the routed ones travel."""
    build.begin("overlap_shared", "spread_experts", "split_tensors")
    if build.plan.parallel.ep > 1:
        early = overlap_shared_experts(build.model, build.anatomy, build.runtime.experts)
        if build.lanes is not None:
            build.lanes.registers += early
