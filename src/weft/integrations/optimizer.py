"""Optimizer of a script under a plan: `accelerate`'s wrapper around the optimizer that the script has made."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import ModelError, NumericError, PlanError
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.data.gradients import clip_factor
from weft.training.own_step import StepGradients

NOT_ELEMENTWISE = (
    "Adafactor",
    "GaLoreAdamW",
    "GaLoreAdafactor",
    "APOLLOAdamW",
    "Lomo",
    "AdaLomo",
    "Shampoo",
    "SOAP",
    "LBFGS",
)
"""Optimizers of other libraries whose update of an element depends on the full matrix."""


class PlacedOptimizer(AcceleratedOptimizer):
    """Updates through `DistributedOptimizer`: clipping, loss scale, placement and dtype of states as the plan says.

    An update whose gradients are not finite on any rank is skipped, and `step_was_skipped` is true.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, distributed: DistributedOptimizer, device: torch.device):
        """
        Args:
            optimizer: optimizer of the script, over parameters of the parallelized model.
            distributed: its wrapper.
            device: device of this rank.
        """
        super().__init__(optimizer, device_placement=False)
        self.distributed, self.device = distributed, device
        self.steps = 0
        """Updates so far, with those that were skipped."""
        self.is_trained = False
        """True if an update was not skipped, or if a state was loaded."""
        self.is_fresh = True
        """True before the first forward of a step."""
        self._gradients = StepGradients()

    def grad_norm(self) -> float:
        """Global norm of the unscaled gradients, of all ranks. Collective."""
        if self._gradients.norm is None:
            self._gradients.norm = self.distributed.grad_norm()
        return self._gradients.norm

    def scale_gradients(self, max_norm: float, norm: float) -> None:
        """Let the next `step` scale the gradients so that a global norm of `norm` becomes `max_norm`, if it is larger."""
        self._gradients.clip = clip_factor(norm, max_norm)

    def begin_forward(self) -> None:
        """Prepare for a forward with gradients: the first one of a step begins the step."""
        if self.is_fresh:
            self.distributed.begin_step()
        self.begin_pipelined()

    def begin_pipelined(self) -> None:
        """Prepare for the schedule of a pipeline, which begins the step of the optimizer itself."""
        self.is_fresh, self._gradients = False, StepGradients()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the weights if this micro-batch is the last one of a step. Collective.

        Raises:
            ModelError: a closure is given.
        """
        if closure is not None:
            raise ModelError(
                "optimizer.step with a closure",
                where="optimizer.step",
                rule="gradients are reduced in the backward before the update",
                fix="run forward and backward, then call optimizer.step()",
            )
        if not self.gradient_state.sync_gradients:
            return
        self._is_overflow = not math.isfinite(self.grad_norm())
        if not self._is_overflow:
            free_gathered_weights(self.distributed.model)  # of a forward between backward and step
            self.is_trained = True
        self.distributed.update(not self._is_overflow, self._gradients.clip)
        self.steps, self.is_fresh, self._gradients = self.steps + 1, True, StepGradients()

    def restart(self, steps: int) -> None:
        """Continue after `steps` updates, whose state has been loaded."""
        self.optimizer.zero_grad()
        self.steps, self.is_fresh, self._gradients = steps, True, StepGradients()
        self.is_trained = True


def refuse_untrained(optimizers: Sequence[Any], where: str) -> None:
    """Refuse to end training in order if it has changed nothing.

    Args:
        optimizers: optimizers of a script; those without a plan are not looked at.
        where: trainer or script.

    Raises:
        NumericError: the updates of all steps were skipped; the same on every rank.
    """
    placed = [optimizer for optimizer in optimizers if isinstance(optimizer, PlacedOptimizer)]
    steps = max((optimizer.steps for optimizer in placed), default=0)
    if steps and not any(optimizer.is_trained for optimizer in placed):
        raise NumericError(
            f"the updates of all {steps} steps were skipped: the weights are those of the start",
            where=where,
            rule="an update whose gradients are not finite is skipped",
            fix="check the weights of the model, the loss and the data; a smaller learning rate may help",
        )


def replace_parameters(optimizer: torch.optim.Optimizer, shards: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Let an optimizer update the shards of a parallelized model instead of the parameters that it was made with, in place.

    Groups and their settings are kept, so that schedulers that exist already go on with them.

    Args:
        optimizer: optimizer that has not stepped yet.
        shards: parameter of this rank for each parameter of the model before; None on a rank of a pipeline without it.

    Raises:
        ModelError: the optimizer has states, or a parameter that the model does not have, or it is not elementwise.
    """
    problem = ""
    if optimizer.state:
        problem = "the optimizer has stepped before accelerator.prepare"
    elif any(parameter not in shards for group in optimizer.param_groups for parameter in group["params"]):
        problem = "the optimizer has parameters that no prepared model has"
    if problem:
        raise ModelError(
            problem,
            where="accelerator.prepare",
            rule="the optimizer is new, and has the parameters of the model that is prepared with it",
            fix="make the optimizer from model.parameters(), and pass both to accelerator.prepare(model, optimizer)",
        )
    refuse_not_elementwise(type(optimizer).__name__, any(isinstance(shard, DTensor) for shard in shards.values()))
    for group in optimizer.param_groups:
        kept = [shards[parameter] for parameter in group["params"]]
        group["params"] = [parameter for parameter in kept if parameter is not None]


def refuse_not_elementwise(name: str, is_sharded: bool) -> None:
    """Refuse an optimizer that needs full matrices, over shards of matrices.

    Args:
        name: class of the optimizer.
        is_sharded: True if ranks hold parts of matrices.

    Raises:
        ModelError: names the optimizer.
    """
    if name in NOT_ELEMENTWISE and is_sharded:
        raise ModelError(
            f"{name} over shards of matrices",
            where="accelerator.prepare",
            rule="an optimizer updates each element by its own gradient and state, because ranks hold parts of matrices",
            fix='use another optimizer, such as optim="adamw_torch"; or plan.parallel.zero = 0 without tp',
        )


def loss_scale_of(optimizers: Sequence[PlacedOptimizer]) -> float:
    """Loss scale of a backward.

    Raises:
        PlanError: the optimizers have different ones.
    """
    scales = {optimizer.distributed.loss_scale.value for optimizer in optimizers} or {1.0}
    if len(scales) > 1:
        raise PlanError(
            f"optimizers with the loss scales {sorted(scales)}",
            where="plan.precision.loss_scale",
            rule="one backward has one loss scale",
            fix="set plan.precision.loss_scale to a number",
        )
    return scales.pop()


def refuse_scaled(optimizers: Sequence[PlacedOptimizer], where: str) -> None:
    """Refuse a method that reads gradients, if they have a loss scale.

    Args:
        optimizers: optimizers of the script.
        where: name of the method.

    Raises:
        PlanError: the gradients have a loss scale.
    """
    if any(optimizer.distributed.loss_scale.value != 1 for optimizer in optimizers):
        raise PlanError(
            f"{where.rpartition('.')[2]} of gradients with a loss scale",
            where=where,
            rule="gradients are unscaled in the update",
            fix='clip the 2-norm of all parameters by clip_grad_norm_, or set plan.precision.loss_scale = "none"',
        )
