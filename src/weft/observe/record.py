"""The files of a run folder, read back: what a report knows about a run.

`metrics.jsonl`, `evaluations.jsonl`, `job.toml` and `run.json`; all of them may be missing, as after a run that was
aborted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.errors import DataError
from weft.job import Job
from weft.train.metrics import Evaluation, StepMetrics, read_evaluations, read_metrics
from weft.train.run_folder import SUMMARY, read_table


class Facts(BaseModel):
    """Contents of run.json: totals of a run. Each entry may be missing or null."""

    run_id: str | None = None
    """Random name of the run, kept when it is resumed."""
    model_type: str | None = None
    """Family of the model, as its configuration names it."""
    parameters: int | None = None
    active_parameters: int | None = None
    """Parameters that one token meets."""
    world_size: int | None = None
    """Number of ranks."""
    device: str | None = None
    steps: int | None = None
    seconds: float | None = None
    """Wall clock of the whole run."""
    environment: dict[str, str] | None = None
    """Versions of libraries, system and cores."""
    memory: dict[str, dict[str, float]] | None = None
    """Bytes of rank 0 by kind, under "measured" and "predicted"."""
    baselines: dict[str, float] | None = None
    """Held-out cross entropy of counting models, in nats: unigram and bigram."""
    anatomy: dict[str, str | int | list[str]] | None = None
    """Names of modules, or their number, by role."""
    sample: str | None = None
    """Generated text."""


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; an absent file leaves its field empty."""

    rows: list[StepMetrics]
    evaluations: list[Evaluation]
    job: Job | None
    facts: dict[str, Any]
    """Entries of run.json that are not null; see `Facts`."""


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run folder that are there.

    Raises:
        DataError: there is no such folder, or a file in it is damaged.
        JobError: `job.toml` is no job of this version.
    """
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}",
            rule="a report is made from the folder a run wrote",
            fix="name the job's `out` folder",
        )
    steps, evaluations, job = folder / "metrics.jsonl", folder / "evaluations.jsonl", folder / "job.toml"
    return RunRecord(
        rows=read_metrics(steps) if steps.exists() else [],
        evaluations=read_evaluations(evaluations) if evaluations.exists() else [],
        job=Job.load(job) if job.exists() else None,
        facts=_read_facts(folder / SUMMARY),
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
            fix="remove it; the page goes without",
        ) from None


def missing(run: RunRecord) -> list[str]:
    """What a complete run would have left in the folder, one sentence each."""
    found = []
    if not run.rows:
        found.append("metrics.jsonl holds no step: nothing can be plotted over steps.")
    elif run.job and run.rows[-1].step < run.job.train.steps:
        found.append(f"The last step on record is {run.rows[-1].step} of {run.job.train.steps}.")
    if not run.evaluations:
        found.append("evaluations.jsonl holds no evaluation: the held-out loss is not known.")
    if run.job is None:
        found.append("job.toml is missing: the job and its plan are not known.")
    if not run.facts:
        found.append("run.json is missing: memory by kind, baselines, environment and sample text are not known.")
    return found
