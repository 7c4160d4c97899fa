"""Results of an evaluation on tasks: the records of `eval.json` and `eval.jsonl`. Imports no torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from weft.errors import DataError
from weft.evaluation.prompts import Prompts
from weft.files import replace_file

RESULTS, HISTORY = "eval.json", "eval.jsonl"
"""Files of a run folder: results of `weft eval`, and of the evaluations during training."""


@dataclass(frozen=True)
class Metric:
    """Value of one metric."""

    value: float | None
    """None if it is not finite."""
    stderr: float | None
    """Standard error; None if lm-eval has no estimate for the metric."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TaskResult:
    """Result of one task, or of a group of tasks."""

    n: int | None
    """Number of evaluated records; None for a group."""
    version: str
    """Version of the task, from its own settings."""
    metrics: dict[str, Metric]
    """By lm-eval's name: "acc"; with a filter "exact_match,FILTER"."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TaskEvaluation:
    """Results of all tasks after `step` optimizer steps: one line of `eval.jsonl`."""

    step: int
    tasks: dict[str, TaskResult]

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def values(self) -> dict[str, float]:
        """Finite values by "task/metric"."""
        return {
            f"{task}/{name}": metric.value
            for task, result in self.tasks.items()
            for name, metric in result.metrics.items()
            if metric.value is not None
        }

    def text(self) -> str:
        """Line with all finite values, for the terminal."""
        return ", ".join(f"{name} {value:.4f}" for name, value in self.values().items())


@dataclass(frozen=True)
class ModelResults:
    """Contents of `eval.json`: results of one `weft eval`."""

    model: str
    """Evaluated run folder or model folder."""
    step: int | None
    """Step of the evaluated checkpoint; None for a model folder."""
    tasks: dict[str, TaskResult]
    limit: int | None
    """Maximum records per task; None: all."""
    num_fewshot: int | None
    """Worked examples in each prompt; None: as each task says."""
    versions: dict[str, str]
    """Versions of weft, lm_eval, torch and transformers."""
    prompts: Prompts = field(default_factory=Prompts)
    """Form of the prompts."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def write(self, path: Path) -> None:
        """Write the file; an existing file is replaced when the new one is complete.

        Raises:
            OSError: the file cannot be written; an existing file is kept.
        """
        replace_file(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> "ModelResults":
        """Read an `eval.json`.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {str(error).splitlines()[0]}",
                rule=f"{RESULTS} is one JSON object, written by `weft eval`",
                fix="delete it, and evaluate the model again",
            ) from None


def task_results(found: dict[str, Any]) -> dict[str, TaskResult]:
    """Convert the result of `lm_eval.evaluate`, which names a metric "acc,none" and its standard error "acc_stderr,none"."""
    results = {}
    for task, values in found["results"].items():
        metrics = {}
        for key, value in values.items():
            name, comma, kind = key.partition(",")
            if comma and not name.endswith("_stderr"):
                stderr = values.get(f"{name}_stderr,{kind}")
                metrics[name if kind == "none" else key] = Metric(_finite(value), _finite(stderr))
        samples = found["n-samples"].get(task)
        version = found["versions"].get(task)
        results[task] = TaskResult(
            samples["effective"] if samples else None, "" if version is None else str(version), metrics
        )
    return results


def _finite(value: Any) -> float | None:
    """A finite number as float; None for other values, such as lm-eval's "N/A"."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None
