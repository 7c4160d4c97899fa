"""The files of a run folder, read back: what a report knows about a run.

`metrics.jsonl`, `evaluations.jsonl`, `job.toml` and `run.json`; all of them may be missing, as after a run that was
aborted. `run.json` is one object; each of its keys may be missing or null:

    model_type         str, the family of the model as its configuration names it
    parameters         int; active_parameters: int, those that one token meets
    world_size         int, number of ranks; device: str
    seconds            float, wall clock of the whole run
    environment        {name: str}
    memory             {"measured": {kind: bytes}, "predicted": {kind: bytes}}, per rank
    baselines          {"unigram": nats, "bigram": nats}
    anatomy            {role: names or their number}
    sample             str, generated text
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.job import Job
from weft.train.metrics import Evaluation, StepMetrics, read_evaluations, read_metrics


@dataclass(frozen=True)
class Run:
    """What a run folder holds; an absent file leaves its field empty."""

    rows: list[StepMetrics]
    evaluations: list[Evaluation]
    job: Job | None
    facts: dict[str, Any]
    """run.json, without its null values."""


def read_run(folder: Path) -> Run:
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
    return Run(
        rows=read_metrics(steps) if steps.exists() else [],
        evaluations=read_evaluations(evaluations) if evaluations.exists() else [],
        job=Job.load(job) if job.exists() else None,
        facts=_read_facts(folder / "run.json"),
    )


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return {key: value for key, value in json.loads(path.read_bytes()).items() if value is not None}
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged: {error}", rule="run.json is one JSON object", fix="remove it; the page goes without"
        ) from None


def missing(run: Run) -> list[str]:
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
