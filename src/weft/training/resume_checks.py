"""Checks of a resumed run against its checkpoint: batches, optimizer settings and functions of the user are the same."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from weft.checkpoint.manifest import Manifest
from weft.errors import JobError
from weft.job import Job, Task
from weft.training.optimizer import learning_rate

SAME_BATCHES = (
    "train.global_batch_size",
    "train.seed",
    "data.source",
    "data.seq_len",
    "data.packing",
    "data.shuffle",
    "data.held_out",
    "task.kind",
    "task.fields",
    "task.mask_fraction",
    "task.noise",
    "task.scheduler",
    "task.timesteps",
)
"""Keys that determine the rows of each global batch."""
SAME_UPDATE = ("optimizer", "adapter", "model.config", "train.loss", "distillation", "plan.techniques")
"""Keys and tables that determine updates, besides train.steps, which matters if past learning rates depend on it."""
MAX_COMPARED_RATES = 10_000


def check_same_update(job: Job, before: dict[str, Any], step: int, where: str) -> None:
    """Refuse to resume with other optimizer settings than before. Layout and dtypes may change.

    A change of train.steps is allowed if the learning rates of all past steps stay the same, as with a constant schedule, and
    with wsd before its decay.

    Args:
        job: job that resumes.
        before: job of the past updates, as a table.
        step: number of past updates.
        where: checkpoint or job file to resume from.

    Raises:
        JobError: lists every changed key with its old and new value.
    """
    if step == 0:
        return
    now = job.model_dump(mode="json")
    changed = []
    for key in SAME_UPDATE:
        table, _, name = key.partition(".")
        then_table = before.get(table, {})
        names = [name] if name else [name for name in now[table] if name in then_table]
        changed += [
            f"{table}.{name} = {now[table][name]!r}, it was {then_table.get(name)!r}"
            for name in names
            if now[table][name] != then_table.get(name)
            and (name in then_table or now[table][name])  # empty, and absent in an earlier version: no change
        ]
    steps = before.get("train", {}).get("steps")
    if isinstance(steps, int) and not changed and steps != job.train.steps:
        past_steps = range(1, step + 1, step // MAX_COMPARED_RATES + 1)
        if any(
            learning_rate(past, steps, job.optimizer) != learning_rate(past, job.train.steps, job.optimizer)
            for past in (*past_steps, step)
        ):
            schedule = job.optimizer.schedule
            changed = [f"train.steps = {job.train.steps}, it was {steps}: the {schedule} schedule depends on it"]
    if changed:
        raise JobError(
            "\n".join(changed),
            where=where,
            rule="a resumed run keeps its optimizer settings, unless --accept-changes is given",
            fix="restore the earlier values, or add --accept-changes",
        )


def check_same_code(code: dict[str, str], manifest: Manifest, folder: Path | str) -> None:
    """Refuse to resume with a function of the user whose file has changed.

    Args:
        code: digests of the functions of the job that resumes, see `Manifest`.
        folder: folder of the checkpoint.

    Raises:
        JobError: names the key of the function.
    """
    for key, digest in manifest.code.items():
        if digest and code.get(key, digest) != digest:
            raise JobError(
                f"the file of the function {key} has changed since the checkpoint",
                where=str(folder),
                rule="a resumed run keeps the functions that determine its updates, unless --accept-changes is given",
                fix="restore the file, or add --accept-changes",
            )


def check_same_batches(job: Job, data: Collection[str], manifest: Manifest, folder: Path | str) -> None:
    """Refuse to resume with other batches than those of a checkpoint, unless it precedes the first batch.

    Args:
        job: job that resumes.
        data: `identity` of its prepared tokens, and accepted identities.
        folder: folder of the checkpoint.

    Raises:
        JobError: names the first key that differs, or the data source.
    """
    if manifest.position.next_batch == 0:
        return
    now, changed = job.model_dump(mode="json"), ""
    for key in SAME_BATCHES:
        table, _, name = key.partition(".")
        if table == "task" and name != "kind" and job.task.kind == "causal":
            continue  # has no effect
        default = Task().model_dump() if table == "task" else {}  # of checkpoints from before there was the key
        before = {**default, **manifest.job.get(table, {})}.get(name)
        if before != now[table][name]:
            changed = changed or f"{key} = {now[table][name]!r}; the checkpoint was made with {before!r}"
    if not changed and manifest.data not in data:
        raise JobError(
            f"the tokens of {_name_source(job)} differ from the tokens that the checkpoint was made with",
            where=str(folder),
            rule="a resumed run keeps its global batches and their order, unless --accept-changes is given",
            fix="restore the contents of the source and its tokenizer, or add --accept-changes",
        )
    if changed:
        raise JobError(
            changed,
            where=str(folder),
            rule="a resumed run keeps its global batches and their order",
            fix="restore the earlier value, or start a new run from the export of this run (model.path = ...)",
        )


def _name_source(job: Job) -> str:
    path = f"data.path = {job.data.path!r}" if job.data.path else f"data.source = {job.data.source!r}"
    return path if job.data.source == "tokens" else f"{path}, under data.tokenizer = {job.data.tokenizer!r},"
