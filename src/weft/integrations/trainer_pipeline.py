"""Steps of a Trainer under pipeline parallelism, whose schedule runs the micro-batches of a step together.

The Trainer calls `training_step` for each micro-batch. Here the micro-batches wait until the last one of the step has arrived.
Each row is then a micro-batch of the schedule.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer

from weft.data import IGNORED
from weft.errors import PlanError
from weft.integrations.optimizer import PlacedOptimizer
from weft.parallel.runtime import runtime, set_dropout_seed
from weft.training.own_batches import OnDevice, split_batches
from weft.training.step import compute_gradients, evaluate

KEPT = ("input_ids", "labels", "attention_mask", "position_ids")


def has_own_loss(trainer_class: Any) -> bool:
    """True if a class of trainers has a `compute_loss` of its own."""
    return trainer_class.compute_loss is not Trainer.compute_loss


def check_pipeline(trainer_class: type, compute_loss_func: Any, smooths_labels: bool, compute_metrics: Any) -> None:
    """Refuse a trainer whose loss is not that of the model, which the last stage computes.

    Args:
        trainer_class: class of the trainer.
        compute_loss_func: argument of the trainer.
        smooths_labels: True with `label_smoothing_factor`.
        compute_metrics: argument of the trainer.

    Raises:
        PlanError: names what the trainer computes itself.
    """
    settings = {
        f"compute_loss of {trainer_class.__name__}": has_own_loss(trainer_class),
        "compute_loss_func": compute_loss_func is not None,
        "label_smoothing_factor": smooths_labels,
        "compute_metrics": compute_metrics is not None,
    }
    own = [name for name, is_set in settings.items() if is_set]
    if own:
        raise PlanError(
            f"{own[0]} under plan.parallel.pp > 1",
            where="plan.parallel.pp",
            rule="the last stage of a pipeline computes the loss of the model, and no rank has the outputs of a full model",
            fix="set plan.parallel.pp = 1; tp, cp and ZeRO work with a loss of your own",
        )


class PipelinedSteps:
    """Micro-batches of the step that a Trainer is collecting."""

    def __init__(self, model: Any, seed: int):
        """
        Args:
            model: parallelized model of Transformers.
            seed: seed of dropout.
        """
        self.model, self.seed = model, seed
        self.waiting: list[Mapping[str, Tensor]] = []

    def add(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Keep a micro-batch; returns the loss that the Trainer adds up, which is zero until the last micro-batch."""
        self.waiting.append(inputs)
        return torch.zeros((), device=inputs["input_ids"].device)

    def run(self, optimizer: PlacedOptimizer) -> Tensor:
        """Run forward and backward of the micro-batches of the step. Collective.

        Returns:
            Mean loss over the targets of all micro-batches of all data ranks, without loss scale.
        """
        batches, self.waiting = self.waiting, []
        device = batches[0]["input_ids"].device
        split = split_batches(_equally_long(self.model, batches), 1, self.model, "train_batch")
        set_dropout_seed(self.model, self.seed, optimizer.steps + 1)
        optimizer.begin_pipelined()
        found = compute_gradients(self.model, optimizer.distributed, [batch.to(device) for batch in split])
        return torch.tensor(found.loss, device=device)

    def evaluate(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Mean loss over the targets of a batch of all data ranks. Collective."""
        device = inputs["input_ids"].device
        split = split_batches(_equally_long(self.model, [inputs]), 1, self.model, "evaluate")
        return torch.tensor(evaluate(self.model, OnDevice(split, device)), device=device)


def _equally_long(model: Any, batches: list[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Batches whose rows of tokens are padded at the end to the longest row."""
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    found = []
    for batch in batches:
        tokens = batch["input_ids"].shape[1]
        tensors = {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}
        unknown = sorted(tensors.keys() - set(KEPT)) if runtime(model).anatomy.is_decoder else []
        if unknown:
            raise PlanError(
                f"the key {unknown[0]} of a batch under plan.parallel.pp > 1",
                where="plan.parallel.pp",
                rule=f"a pipeline passes {', '.join(KEPT)} to the model",
                fix=f"leave {unknown[0]} out of the batches, or set plan.parallel.pp = 1",
            )
        padded = {
            name: F.pad(tensor, (0, longest - tokens), value=IGNORED if name == "labels" else 0)
            for name, tensor in tensors.items()
            if tensor.ndim == 2 and tensor.shape[1] == tokens
        }
        found.append(tensors | padded)
    return found
