"""Functions of the user's own code in a job: a check before the ranks start, and callbacks."""

from pathlib import Path
from typing import Any

from torch import nn

from weft.errors import JobError
from weft.evaluation.results import TaskEvaluation
from weft.job import DISTILLATION, Job
from weft.own_code import digest_module, load_function
from weft.parallel.runtime import runtime
from weft.training.metrics import Evaluation, StepMetrics
from weft.training.teacher import build_teacher

EVENTS = ("on_step", "on_evaluation", "on_tasks", "on_checkpoint", "on_end")


def check_functions(job: Job) -> None:
    """Import all functions that a job names.

    Raises:
        JobError: a module or a function does not exist, or the module cannot be imported.
    """
    named = {"data.source": job.data.source}
    named |= {f"train.callbacks[{index}]": name for index, name in enumerate(job.train.callbacks)}
    for key, name in {**_of_updates(job), **named}.items():
        if ":" in name:
            load_function(name, key)


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


def use_loss(model: nn.Module, job: Job) -> None:
    """Let a parallelized model train with the loss of a job: `train.loss` and `train.router_z_loss`. Collective.

    Args:
        model: parallelized model.
        job: job with a resolved plan. The teacher of a distillation is on the meta device afterwards.

    Raises:
        JobError: the function does not exist.
    """
    train, found = job.train, runtime(model)
    if train.loss == DISTILLATION:
        found.teacher = build_teacher(job, model, found.mesh)
    elif train.loss != "cross_entropy":
        found.loss = load_function(train.loss, "train.loss")
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
