"""1-bit Adam (Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training, 2021).

    first `freeze_steps` updates    AdamW with uncompressed gradient reduction
    later updates                   frozen second moment; each rank keeps a momentum of its local gradients, and the momenta are
                                    reduced as signs: their mean is Adam's first moment

With a frozen second moment the update is linear in the gradients, so that error feedback compensates for the compression error
of signs. An unfrozen second moment would measure the noise of the signs. Four details differ from the paper:

- Momenta of the ranks start at zero at the freeze. The first moment up to then is kept separately (`carried`) and decays while
  they grow. After a change of layout, the mean of the momenta is carried over in the same way.
- The bias of the frozen second moment is corrected once. The frozen moment is a single sample: an element that happened to be
  small would cause updates of any size. Therefore no element changes by more than Adam's own bound of
  (1 - b1) / sqrt((1 - b2)(1 - b1^2 / b2)) learning rates, which follows from the Cauchy-Schwarz inequality.
- An element without any gradient before the freeze (an expert without tokens, an unseen token) is only decayed, because signs
  have no zero and the scale of the element is unknown.
- Clipping limits the reduced momentum; the error feedback is scaled by the same factor (`Feedback.commit`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from weft.comm.compression.feedback import Feedback
from weft.errors import JobError
from weft.memory.storages import local_part
from weft.optimizers.adamw import adamw_state, update_with_adamw

SMALLEST = 1e-12


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam optimizer for sharded and unsharded parameters; all operations are elementwise.

    Args:
        groups: parameter groups; the "weight_decay" of a group is decoupled, as in AdamW.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: term added to the root of the second moment.
        freeze_steps: number of updates before the second moment is frozen.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, freeze_steps: int
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.freeze_steps, self.is_frozen = freeze_steps, False

    def begin_step(self) -> float | None:
        """Prepare for a step, before its first backward.

        Returns:
            Decay rate of the momenta that the step reduces; None if it reduces gradients.
        """
        steps = [state["step"] for state in self.state.values() if "step" in state]
        self.is_frozen = bool(steps) and int(torch.stack(steps).max()) >= self.freeze_steps
        return self.param_groups[0]["betas"][0] if self.is_frozen else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient; after the freeze, `grad` holds the mean momentum."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.is_frozen:
                settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                for parameter in parameters:
                    _frozen_update(parameter, self._frozen_state(parameter), **settings)
            else:
                update_with_adamw(self, parameters, group)

    def restart_momenta(self) -> None:
        """Carry over the first moment when the momenta of the ranks restart at zero."""
        for state in self.state.values():
            if "carried" in state:
                state["carried"].copy_(state["exp_avg"])

    def _frozen_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = adamw_state(self.state[parameter], parameter)
        if "carried" not in state:
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
    """Upper bound of Adam's quotient of moments for any gradients."""
    b1, b2 = betas
    return max(1.0, (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))) if b1**2 < b2 else math.inf


def momentum_decay(optimizer: torch.optim.Optimizer, feedback: Feedback) -> float | None:
    """Decay rate of the momenta that the next step reduces; None if it reduces gradients.

    Raises:
        JobError: the plan has 1-bit compression, and the optimizer is not 1-bit Adam.
    """
    if not feedback.takes_momentum:
        return None
    if not isinstance(optimizer, OneBitAdam):
        raise JobError(
            f"an optimizer {type(optimizer).__name__} with plan.comm.compression = 1-bit",
            where="plan.comm.compression",
            rule="only 1-bit Adam, which freezes its second moment, can use signs",
            fix='build the optimizer with optimizer.name = "onebit-adam"',
        )
    return optimizer.begin_step()
