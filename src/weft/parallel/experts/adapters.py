"""Adapters of PEFT on the weights of experts, which are stacked in one tensor of a layer (`target_parameters`).

PEFT puts the experts module into a wrapper (`ParamWrapper`) for each adapted weight. While the wrapper runs forward, torch's
parametrization lets the module compute with W + scaling B A, for all experts. It replaces the stored parameter, which under
ZeRO, ep and tp is a shard that hooks gather. Here hooks of the experts module add scaling B A to the weight of this rank, after
all other hooks, and the wrapper only calls the module.

    W     [experts, out, in], or [experts, in, out]     split over ep, like the experts
    A     [experts * r, in]                             on every rank, like the other weights of a block
    B     [out, r * experts], expert by expert inside   on every rank

A rank of ep uses the slices of its experts: its gradients of A and B have the tokens of all ranks for these experts, and zeros
for the others. Their mean over the data ranks is the gradient, as for the other weights of a block.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.errors import ModelError, PlanError
from weft.topology.mesh import ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build

WRAPPER = "ParamWrapper"
"""Name of PEFT's class of a wrapper around a parameter."""


def apply_expert_adapters(model: nn.Module, anatomy: Anatomy, expert_mesh: DeviceMesh | None) -> None:
    """Let the experts of a model compute with the adapters around them, in place. Call it after other hooks are registered on
    the experts, and before FSDP2.

    Args:
        model: model, with or without adapters.
        anatomy: its roles.
        expert_mesh: device mesh of the experts, if they are split; see `split_experts`.

    Raises:
        ModelError: PEFT adapts another parameter than the stacked weight of experts.
        PlanError: there are adapters, and the matrices of experts are split over ranks.
    """
    wrappers = {name: module for name, module in model.named_modules() if type(module).__name__ == WRAPPER}
    rank = expert_mesh.get_local_rank("ep") if expert_mesh is not None else 0
    for name in (name for block in anatomy.blocks for name in block.experts):
        experts = model.get_submodule(name)
        around = [other for other in wrappers if name.startswith(f"{other}.")]
        if around and expert_mesh is not None and ranks_along(expert_mesh, "etp") > 1:
            raise PlanError(
                f"etp = {ranks_along(expert_mesh, 'etp')} with an adapter on {name}",
                where="plan.parallel.etp",
                rule="adapters of experts are added to complete matrices",
                fix="leave plan.parallel.etp at 1, or leave the experts out of the adapter's targets",
            )
        if around:
            ExpertAdapters(experts, [_checked(other, wrappers.pop(other), experts) for other in around], rank)
    if wrappers:
        raise _refusal(next(iter(wrappers)), next(iter(wrappers.values())))


def _checked(name: str, wrapper: Any, experts: nn.Module) -> Any:
    weight = experts.get_parameter(wrapper.parameter_name)
    if weight.ndim != 3:
        raise _refusal(name, wrapper)
    return wrapper


def _refusal(name: str, wrapper: Any) -> ModelError:
    return ModelError(
        f"an adapter of PEFT on the parameter {wrapper.parameter_name} of {name}",
        where="target_parameters",
        rule="parameters with adapters are weights of experts, [experts, rows, columns], of a module that has the role experts",
        fix="name linear layers in target_modules, and weights such as experts.gate_up_proj in target_parameters",
    )


class ExpertAdapters:
    """Forward hooks that add adapters to the weights of an experts module during its forward."""

    def __init__(self, experts: nn.Module, wrappers: list[Any], rank: int):
        """
        Args:
            experts: experts module.
            wrappers: wrappers of PEFT around it.
            rank: rank of its ep group; 0 without one.
        """
        self.experts, self.wrappers, self.rank = experts, wrappers, rank
        self.stored: list[list[tuple[nn.Module, str, Any]]] = []
        """Weights before the change in each forward of the module that is running: a recompute may run inside of one."""
        experts.register_forward_pre_hook(self._enter)
        experts.register_forward_hook(self._leave, always_call=True)
        for wrapper in wrappers:  # not a hook, because a hook cannot leave out the parametrization
            wrapper.forward = wrapper.base_layer.__call__

    def _enter(self, *_: object) -> None:
        self.stored.append([])
        for wrapper in self.wrappers:
            name = wrapper.parameter_name
            stored = weight = self.experts._parameters[name]
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in (adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A):
                weight = self._add(wrapper, adapter, weight)
            self.stored[-1].append((self.experts, name, stored))
            self.experts._parameters[name] = weight

    def _leave(self, *_: object) -> None:
        for owner, name, stored in self.stored.pop():
            owner._parameters[name] = stored

    def _add(self, wrapper: Any, adapter: str, weight: Any) -> Any:
        """Weight of the experts of this rank plus the matmul of their matrices B and A."""
        experts, own = wrapper.num_experts, slice(self.rank * len(weight), (self.rank + 1) * len(weight))
        a: Tensor = wrapper.lora_A[adapter].weight.unflatten(0, (experts, -1))[own].to(weight.dtype)
        b: Tensor = wrapper.lora_B[adapter].weight.unflatten(1, (-1, experts))[..., own].permute(2, 0, 1)
        b = b.to(weight.dtype)
        if getattr(self.experts, "is_transposed", False):
            return torch.baddbmm(weight, a.mT, b.mT, alpha=wrapper.scaling[adapter])
        return torch.baddbmm(weight, b, a, alpha=wrapper.scaling[adapter])


def adapt_experts(build: "Build") -> None:
    """Step of `parallelize`: adapters of PEFT on experts, whose hooks run after those that gather and round weights."""
    build.begin("adapt_experts", "spread_experts")
    apply_expert_adapters(build.model, build.anatomy, build.expert_mesh)
