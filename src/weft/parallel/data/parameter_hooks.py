"""Hooks of parameters (`parameter.register_hook`) under FSDP2: they get the full gradient of this rank, as under DDP.

FSDP2 replaces each parameter by a shard, and autograd computes the gradient of a third tensor, the gathered weight.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.compat import fsdp_param_groups
from weft.errors import ModelError, Refusal


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with hooks of their own on their gradients, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    }


def reason_against_hooks(model: nn.Module, hooked: Mapping[str, nn.Parameter], *, defers: bool) -> Refusal | None:
    """Reason against hooks that would see another gradient than that of the parameter, or none.

    Args:
        model: model after tensor and expert parallelism, before data parallelism.
        hooked: parameters with hooks before.
        defers: True if weight gradients are computed after backward, without autograd.
    """
    own = dict(model.named_parameters())
    for name, parameter in hooked.items():
        problem = ""
        if name in own and own[name] is not parameter:
            problem = "whose ranks of tp or ep hold parts of it"
        elif name in own and defers:
            problem = "in a schedule that computes gradients of weights later"
        elif parameter._post_accumulate_grad_hooks:
            problem = "after its gradient is accumulated, and before it is reduced over the ranks"
        if problem:
            return Refusal(
                f"a hook on the parameter {name}, {problem}",
                where="plan.parallel",
                rule="a hook of register_hook gets the full gradient of this rank before it is reduced over the data ranks",
                fix="use ZeRO with tp = ep = pp = 1, and register_hook; or change the gradient between backward and the update",
            )
    return None


def keep_hooks(model: nn.Module, hooked: Mapping[str, nn.Parameter]) -> dict[Tensor, "GatheredHooks"]:
    """Let the hooks of parameters run on the gradients of the gathered weights.

    Args:
        model: model after FSDP2.
        hooked: parameters with hooks before FSDP2 replaced them.

    Returns:
        Hooks by shard, for weights that are gathered otherwise.
    """
    own = dict(model.named_parameters())
    hooks: dict[Tensor, GatheredHooks] = {
        own[name]: GatheredHooks(parameter) for name, parameter in hooked.items() if name in own
    }
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule) and hooks):
        for shard in (shard for group in fsdp_param_groups(unit) for shard in group.fsdp_params):
            if shard.sharded_param in hooks:
                unit.register_forward_pre_hook(partial(hooks[shard.sharded_param].register, shard))
    return hooks


class GatheredHooks:
    """Hooks of a parameter on its gathered weight."""

    def __init__(self, parameter: nn.Parameter):
        self.dtype = parameter.dtype  # not the parameter, whose memory FSDP2 frees
        self.hooks: Any = parameter._backward_hooks
        self.registered: Any = None

    def register(self, shard: Any, *_: Any) -> None:
        """Forward pre-hook of the unit of a parameter of FSDP2, after it has gathered the weight."""
        gathered = shard.unsharded_param
        if gathered is not self.registered and gathered.requires_grad:
            self.registered = gathered
            gathered.register_hook(self.run)

    def run(self, gradient: Tensor) -> Tensor:
        """Run the hooks on a gradient in the dtype of the parameter."""
        value = gradient.to(self.dtype)
        for hook in tuple(self.hooks.values()):
            changed = hook(value)
            value = value if changed is None else changed
        return value.to(gradient.dtype)


def reason_against_hooks_on_shards(model: nn.Module) -> Refusal | None:
    """Reason against hooks on the shards of a parallelized model, which would never run."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter._backward_hooks:
            return Refusal(
                f"a hook on {name}, which is a shard of this rank",
                where=name,
                rule="backward computes the gradients of gathered weights, and reduces them to the shards",
                fix="register the hook before the model is prepared: it then gets the full gradient of this rank",
                error=ModelError,
            )
    return None
