"""1-bit Adam (Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training, 2021).

    until `freeze_steps` updates    AdamW; gradients are reduced as they are
    from then on                    the second moment stays what it is; every rank keeps a momentum of its own gradients,
                                    and these are reduced, as signs: their mean is Adam's first moment

With the second moment frozen the update is linear in the gradients, so that error feedback makes up for what signs leave out;
Adam's own second moment would be that of the signs' noise. Four things are ours:

- Momenta of the ranks begin at zero with the freeze. What the first moment was until then goes on beside them (`carried`), and
  decays as they grow; so does what they were on the mean, when a run goes on under another layout.
- The frozen second moment is corrected for its bias once. It is one moment of a changing thing: a number that happened to be
  small would make steps of any size. No number moves further than Adam ever moves one, (1 - b1) / sqrt((1 - b2)(1 - b1^2 / b2))
  rates at most, by Cauchy and Schwarz.
- A number that had no gradient at all before the freeze (of an expert no token went to, of a token that was not seen) stays
  where it is, but for its decay: signs have no zero, and nothing is known of its scale.
- Clipping bounds what is reduced, the momentum; what was carried on with it is scaled alike (`Feedback.commit`).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weft.comm.compression.feedback import Feedback
from weft.errors import JobError
from weft.memory.storages import local_part

SMALLEST = 1e-12


class OneBitAdam(torch.optim.Optimizer):
    """Treats each parameter by itself, sharded or not.

    Args:
        groups: of parameters; "weight_decay" of each is decoupled, as in AdamW.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        freeze_steps: updates before the second moment is frozen.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, freeze_steps: int
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.freeze_steps, self.is_frozen = freeze_steps, False

    def begin_step(self) -> float | None:
        """Before a step's first backward: the decay of the momenta that are to be reduced; None for gradients."""
        steps = [state["step"] for state in self.state.values() if "step" in state]
        self.is_frozen = bool(steps) and int(torch.stack(steps).max()) >= self.freeze_steps
        return self.param_groups[0]["betas"][0] if self.is_frozen else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; after the freeze, what they have is the mean momentum."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            if self.is_frozen:
                for parameter, state in zip(parameters, states, strict=True):
                    _frozen_update(
                        parameter, state, **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                    )
            elif parameters:
                first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
                adamw(
                    parameters,
                    [parameter.grad for parameter in parameters],
                    first,
                    second,
                    [],
                    steps,
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )

    def restart_momenta(self) -> None:
        """Go on from the first moment alone, when the momenta of the ranks begin at zero again."""
        for state in self.state.values():
            if "carried" in state:
                state["carried"].copy_(state["exp_avg"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        if self.is_frozen and "carried" not in state:
            state["carried"] = state["exp_avg"].clone()
            bias = 1 - self.param_groups[0]["betas"][1] ** state["step"]
            local_part(state["exp_avg_sq"]).div_(bias.clamp(min=SMALLEST))
        return state


def _frozen_update(
    parameter: Tensor, state: dict[str, Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    weight, first, second, carried = map(
        local_part, (parameter, state["exp_avg"], state["exp_avg_sq"], state["carried"])
    )
    state["step"] += 1
    carried.mul_(betas[0])
    first.copy_(carried + local_part(parameter.grad))  # type: ignore[arg-type]
    change = first / (second.sqrt() + eps) / (1 - betas[0] ** state["step"])
    change = change.clamp_(-largest_change(betas), largest_change(betas)) * (second > 0)
    weight.mul_(1 - lr * weight_decay).sub_(change, alpha=lr)


def largest_change(betas: tuple[float, float]) -> float:
    """What Adam's quotient of moments cannot exceed, whatever the gradients are."""
    b1, b2 = betas
    return max(1.0, (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))) if b1**2 < b2 else math.inf


def momentum_decay(optimizer: torch.optim.Optimizer, feedback: Feedback) -> float | None:
    """The decay of the momenta that are reduced in the step that begins; None where gradients are.

    Raises:
        JobError: the plan sends signs, and the optimizer needs more than that.
    """
    if not feedback.takes_momentum:
        return None
    if not isinstance(optimizer, OneBitAdam):
        raise JobError(
            f"an optimizer {type(optimizer).__name__} with plan.comm.compression = 1-bit",
            where="plan.comm.compression",
            rule="signs suit 1-bit Adam, which freezes its second moment",
            fix='make the optimizer with optimizer.name = "onebit-adam"',
        )
    return optimizer.begin_step()
