"""Reader for the files of a run folder: metrics, evaluations, results of tasks, `job.toml` and `run.json`.

Each file may be missing, for example after an aborted run.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.errors import DataError
from weft.evaluation.results import HISTORY, RESULTS, ModelResults, TaskEvaluation
from weft.job import Job
from weft.training.metrics import (
    Attempt,
    Evaluation,
    StepMetrics,
    read_evaluations,
    read_history,
    read_task_evaluations,
    sort_by_step,
)
from weft.training.run_folder import SUMMARY, check_run, read_table


class Facts(BaseModel):
    """Contents of run.json: totals of a run. Each entry may be missing or null."""

    run_id: str | None = None
    """Random id of the run; unchanged by a resume."""
    model_type: str | None = None
    """Model family, from its configuration."""
    parameters: int | None = None
    active_parameters: int | None = None
    """Active parameters per token."""
    world_size: int | None = None
    """Number of ranks."""
    device: str | None = None
    steps: int | None = None
    seconds: float | None = None
    """Wall-clock time of the full run."""
    environment: dict[str, str] | None = None
    """Versions of libraries, operating system and number of cores."""
    memory: dict[str, dict[str, float]] | None = None
    """Bytes of rank 0 by kind, under "measured" and "predicted"."""
    baselines: dict[str, float] | None = None
    """Held-out cross entropy in nats of the count-based baselines, unigram and bigram."""
    anatomy: dict[str, str | int | list[str]] | None = None
    """Module names, or their number, by role."""
    sample: str | None = None
    """Generated text, or examples of answers."""
    task: str | None = None
    """`task.kind` of the job, of tasks other than causal."""
    accuracy: float | None = None
    """Fraction of right answers on held-out records."""
    metrics: dict[str, float] | None = None
    """Other metrics of held-out records, by name."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder; the field of a missing file is empty."""

    rows: list[StepMetrics]
    evaluations: list[Evaluation]
    job: Job | None
    facts: dict[str, Any]
    """Entries of run.json that are not null; see `Facts`."""
    task_evaluations: list[TaskEvaluation] = field(default_factory=list)
    """Results of tasks during training."""
    model_results: ModelResults | None = None
    """Results of the last `weft eval`."""
    attempts: list[Attempt] = field(default_factory=list)
    """Starts of the ranks."""
    history: list[StepMetrics] = field(default_factory=list)
    """All steps in the order in which they ended, repeated ones included."""


def read_run(folder: Path) -> RunRecord:
    """Read the existing files of a run folder.

    Raises:
        DataError: the folder is no run folder, or a file in it is damaged.
        JobError: `job.toml` is not a job of this version.
    """
    check_run(folder)
    evaluations, job = folder / "evaluations.jsonl", folder / "job.toml"
    attempts, history = read_history(folder)
    return RunRecord(
        rows=sort_by_step(history),
        evaluations=read_evaluations(evaluations) if evaluations.exists() else [],
        job=Job.load(job) if job.exists() else None,
        facts=_read_facts(folder / SUMMARY),
        task_evaluations=read_task_evaluations(folder / HISTORY) if (folder / HISTORY).exists() else [],
        model_results=ModelResults.read(folder / RESULTS) if (folder / RESULTS).exists() else None,
        attempts=attempts,
        history=history,
    )


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return Facts.model_validate(read_table(path)).model_dump(exclude_none=True)
    except (OSError, ValueError) as error:
        problem = ": ".join(str(error).splitlines()[1:3]) if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{path} is damaged: {problem}",
            rule="run.json is one JSON object, written by Weft",
            fix="delete run.json; the report can be generated without it",
        ) from None


def missing(run: RunRecord) -> list[str]:
    """List the data that are missing compared with a complete run, one sentence each."""
    found = []
    if not run.rows:
        found.append("metrics.jsonl contains no steps: there are no plots over steps.")
    elif run.job and run.rows[-1].step < run.job.train.steps:
        found.append(f"The last recorded step is {run.rows[-1].step} of {run.job.train.steps}.")
    if not run.evaluations:
        found.append("evaluations.jsonl contains no evaluations: the held-out loss is not known.")
    if run.job is None:
        found.append("job.toml is missing: the job and its plan are not known.")
    if not run.facts:
        found.append("run.json is missing: memory by kind, baselines, environment and sample text are not known.")
    return found
