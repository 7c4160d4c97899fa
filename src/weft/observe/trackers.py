"""Experiment trackers as callbacks of a job: wandb, MLflow and trackio.

    [train]
    callbacks = ["weft.observe.trackers:wandb"]

Each is an extra: `pip install "weft-train[wandb]"`. The project, the server and whether there is one are set by the environment
variables of each library (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR ...); the run has the name of the run
folder, and the settings of the job as its parameters.
"""

import os
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.evaluation.results import TaskEvaluation
from weft.job import Job
from weft.observe.doctor.same import flatten
from weft.own_code import import_extra
from weft.training.metrics import Evaluation, StepMetrics

PROJECT = "weft"  # where the environment names none
LONGEST_PARAMETER = 6000  # characters; limit of MLflow


class Tracker:
    """Base of the trackers: converts the events of a callback to numbers by name."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the run."""
        raise NotImplementedError

    def on_step(self, metrics: StepMetrics) -> None:
        """Log every number of a step, under the names of `metrics.jsonl`."""
        self.log(
            {
                name: float(value)
                for name, value in asdict(metrics).items()
                if name != "step" and isinstance(value, int | float)
            },
            metrics.step,
        )

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Log the loss on held-out rows."""
        self.log({"held_out_loss": evaluation.held_out_loss}, evaluation.step)

    def on_tasks(self, evaluation: TaskEvaluation) -> None:
        """Log the values of all tasks, as "task/metric"."""
        self.log(evaluation.values(), evaluation.step)

    def on_end(self, folder: Path) -> None:
        """End the run of the tracker."""
        self.finish()


class _Wandb(Tracker):
    """Run of wandb or trackio, which have the same interface."""

    def __init__(self, library: ModuleType, project: str, job: Job):
        settings = flatten(job.model_dump(mode="json", exclude_none=True))
        self.run = library.init(project=project, name=Path(job.out).name, config=settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def finish(self) -> None:
        self.run.finish()


class _MLflow(Tracker):
    """Run of MLflow."""

    def __init__(self, library: Any, job: Job):
        self.library = library
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            library.set_experiment(PROJECT)
        library.start_run(run_name=Path(job.out).name)
        settings = flatten(job.model_dump(mode="json", exclude_none=True))
        library.log_params({key: str(value)[:LONGEST_PARAMETER] for key, value in settings.items()})

    def log(self, values: dict[str, float], step: int) -> None:
        self.library.log_metrics(values, step=step)

    def finish(self) -> None:
        self.library.end_run()


def wandb(job: Job) -> Tracker:
    """Callback that logs to Weights & Biases.

    Raises:
        JobError: the library is not installed.
    """
    return _Wandb(_load("wandb"), os.environ.get("WANDB_PROJECT", PROJECT), job)


def trackio(job: Job) -> Tracker:
    """Callback that logs to trackio. Raises as `wandb`."""
    return _Wandb(_load("trackio"), os.environ.get("TRACKIO_PROJECT", PROJECT), job)


def mlflow(job: Job) -> Tracker:
    """Callback that logs to MLflow. Raises as `wandb`."""
    return _MLflow(_load("mlflow"), job)


def _load(library: str) -> ModuleType:
    where = f"train.callbacks = weft.observe.trackers:{library}"
    return import_extra(library, library, where, "experiment trackers are extras of Weft")
