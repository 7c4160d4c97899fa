"""Functions of the user's own code, named "package.module:function" in a job: optimizer, schedule, loss and callbacks."""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import JobError
from weft.job import Job
from weft.train.metrics import Evaluation, StepMetrics

EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


def check_functions(job: Job) -> None:
    """Import all functions that a job names.

    Raises:
        JobError: a module or a function does not exist, or the module cannot be imported.
    """
    named = {"optimizer.name": job.optimizer.name, "optimizer.schedule": job.optimizer.schedule}
    named |= {"train.loss": job.train.loss}
    named |= {f"train.callbacks[{index}]": name for index, name in enumerate(job.train.callbacks)}
    for key, name in named.items():
        if ":" in name:
            load_function(name, key)


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: "package.module:function"; modules of the current folder are found, as with `python -m`.
        where: key of the job, for the message.

    Raises:
        JobError: the module or the function does not exist, or the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            where=f"{where} = {name}" + ("" if is_missing else f", {last.filename}:{last.lineno}"),
            rule="the module of a function is found from the current folder, or is installed",
            fix="start in the folder of the module, or install its package" if is_missing else "mend the module",
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], 1)
        raise JobError(
            f"{module_name} has no function {attribute}",
            where=f"{where} = {name}",
            rule='a function is named as "package.module:function"',
            fix=f"did you mean {module_name}:{near[0]}?" if near else f"define it in {module.__file__}",
        )
    return function


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

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint that is complete on the disk."""
        self._call("on_checkpoint", folder)

    def end(self, folder: Path) -> None:
        """Report the end of training, with the run folder."""
        self._call("on_end", folder)

    def _call(self, event: str, value: Any) -> None:
        if method := getattr(self.target, event, None):
            method(value)
