"""Functions of the user's own code in a job: a check before the ranks start, and callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import DataError, JobError
from weft.evaluation.results import TaskEvaluation
from weft.job import DISTILLATION, Job, ResolvedJob
from weft.own_code import digest_module, load_function, shorten
from weft.parallel.runtime import runtime
from weft.training.metrics import Evaluation, StepMetrics
from weft.training.optimizer import learning_rate
from weft.training.teacher import build_teacher

EVENTS = ("on_step", "on_evaluation", "on_tasks", "on_checkpoint", "on_end")


def check_functions(job: Job) -> None:
    """Import all functions that a job names, and try the loss on two tokens and the schedule on the first and the last step.

    Raises:
        JobError: a module or a function does not exist, or the module cannot be imported.
        DataError: the loss is no tensor of one element, or a rate is no finite number.
    """
    named = {"data.source": job.data.source}
    named |= {f"train.callbacks[{index}]": name for index, name in enumerate(job.train.callbacks)}
    for key, name in {**_of_updates(job), **named}.items():
        if ":" in name:
            load_function(name, key)
    for step in (1, job.train.steps):
        learning_rate(step, job.train.steps, job.optimizer)
    if ":" in job.train.loss and job.train.loss != DISTILLATION:
        logits = torch.zeros(1, 2, 4, requires_grad=True)
        try:
            checked_loss(job.train.loss)(logits, torch.ones(1, 2, dtype=torch.int64))
        except Exception as error:
            if isinstance(error, DataError):
                raise  # any other error may be due to the trial: a loss of the user may need more tokens, or ranks


def checked_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss of a job by a function of the user, as a scalar.

    Args:
        name: value of `train.loss`, "package.module:function".

    Raises:
        JobError: the function does not exist.
    """
    function = load_function(name, "train.loss")

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        value = function(logits, targets)
        is_scalar = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        if not is_scalar or (torch.is_grad_enabled() and not value.requires_grad):
            problem = "a tensor without a gradient" if is_scalar else _describe(value)
            raise DataError(
                f"{name} returns {problem} for logits {tuple(logits.shape)}",
                where="train.loss",
                rule="a loss is a tensor with one element, computed from the logits: the sum over the targets",
                fix="return, for example, torch.nn.functional.cross_entropy(..., reduction='sum')",
            )
        return value.reshape(())

    return loss


def _describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else shorten(value)


def digest_functions(job: Job) -> dict[str, str]:
    """Digest of the file of each function that determines updates, by key of the job.

    Raises:
        JobError: a module cannot be imported.
    """
    return {key: digest_module(name, key) for key, name in _of_updates(job).items()}


def _of_updates(job: Job) -> dict[str, str]:
    """Functions of the user that determine updates, by key of the job."""
    named = {"optimizer.name": job.optimizer.name, "optimizer.schedule": job.optimizer.schedule}
    named |= {"train.loss": job.train.loss}
    named |= {f"plan.techniques[{index}]": name for index, name in enumerate(job.plan.techniques)}
    return {key: name for key, name in named.items() if ":" in name and name != DISTILLATION}


def use_loss(model: nn.Module, job: ResolvedJob) -> None:
    """Let a parallelized model train with the loss of a job: `train.loss` and `train.router_z_loss`. Collective.

    Args:
        model: parallelized model.
        job: job. The teacher of a distillation is on the meta device afterwards.

    Raises:
        JobError: the function does not exist.
    """
    train, found = job.train, runtime(model)
    if train.loss == DISTILLATION:
        found.teacher = build_teacher(job, model, found.mesh)
    elif train.loss != "cross_entropy":
        found.loss = checked_loss(train.loss)
    found.router_stats.use_z_loss(train.router_z_loss)


class Callback:
    """Callback of a job: wraps a user's object that has any of the methods in `EVENTS`."""

    def __init__(self, target: Any):
        self.target = target

    @classmethod
    def load(cls, name: str, job: Job) -> "Callback":
        """Create a callback: call the named function with the job.

        Raises:
            JobError: the function does not exist, or its result has none of the methods.
        """
        target = load_function(name, "train.callbacks")(job)
        if not any(hasattr(target, event) for event in EVENTS):
            raise JobError(
                f"{name} returned {type(target).__name__}, which has none of {', '.join(EVENTS)}",
                where="train.callbacks",
                rule="a callback has a method for each event that it follows",
                fix="return an object with, for example, on_step(metrics)",
            )
        return cls(target)

    def step(self, metrics: StepMetrics) -> None:
        """Report a step."""
        self._call("on_step", metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Report an evaluation."""
        self._call("on_evaluation", evaluation)

    def tasks(self, evaluation: TaskEvaluation) -> None:
        """Report the results of tasks."""
        self._call("on_tasks", evaluation)

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint that is complete on the disk."""
        self._call("on_checkpoint", folder)

    def end(self, folder: Path) -> None:
        """Report the end of training, with the run folder."""
        self._call("on_end", folder)

    def _call(self, event: str, value: Any) -> None:
        if method := getattr(self.target, event, None):
            method(value)
