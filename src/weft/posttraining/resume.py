"""Comparison of a job that resumes with the job of its checkpoint: changed inputs are refused, changed settings printed."""

import json
from pathlib import Path
from typing import Any

from weft.checkpoint.folders import newest_checkpoint
from weft.checkpoint.manifest import read_manifest
from weft.errors import JobError
from weft.integrations.script_state import STATE_FOLDER
from weft.own_code import digest_module
from weft.posttraining.job import TrainerJob
from weft.posttraining.rows import digest_rows
from weft.posttraining.trainers import default_options
from weft.training.same_inputs import READ_BY_LIBRARIES, digest_files

ROW_OPTIONS = (
    *("seed", "data_seed", "shuffle_dataset", "train_sampling_strategy", "dataloader_drop_last", "length_column_name"),
    *("max_length", "max_prompt_length", "truncation_mode", "num_generations", "generation_batch_size"),
    *("steps_per_generation", "num_iterations"),
)
"""Options that determine the rows of each step."""
RESTORED_OPTIONS = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("optim_target_modules", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
)
"""Options of the optimizer and its schedule, whose state a checkpoint restores: another value would have no effect."""
KEPT = ("trainer.kind", "data.held_out", "data.chat_template_args")
"""Settings that determine the rows of each step."""


def job_facts(job: TrainerJob) -> dict[str, Any]:
    """Settings and digests of the inputs of a job, which each of its checkpoints has.

    Raises:
        WeftError: an input is missing.
    """
    options = {**default_options(job.trainer.kind), **job.trainer.options}
    tables = job.model_dump(include={"model", "adapter", "data", "trainer"})
    settings = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    folders: dict[str, str | None] = {"model.path": job.model.path, "trainer.reference": job.trainer.reference}
    folders |= {"trainer.teacher": job.trainer.teacher, "adapter.path": job.adapter.path}
    for key in ("data.path", "data.eval_path", "trainer.options", *folders):  # compared by content, or below
        del settings[key]
    settings |= {f"trainer.options.{name}": value for name, value in options.items()}
    inputs = {key: _digest_folder(Path(folder)) if folder else "" for key, folder in folders.items()}
    inputs["data.path"] = digest_rows(job.data.path, "data.path")
    if job.data.eval_path:
        inputs["data.eval_path"] = digest_rows(job.data.eval_path, "data.eval_path")
    for reward in job.trainer.rewards:
        is_folder = Path(reward).is_dir()
        digest = _digest_folder(Path(reward)) if is_folder else digest_module(reward, "trainer.rewards")
        inputs[f"trainer.rewards {reward}"] = digest
    facts: dict[str, Any] = json.loads(json.dumps({"settings": settings, "inputs": inputs}, default=str))
    return facts


def check_resume(facts: dict[str, Any], folder: str) -> list[str]:
    """Refuse inputs and settings that a resumed run cannot change. Changes no files.

    Args:
        facts: `job_facts` of the job that resumes.
        folder: checkpoint of a trainer.

    Returns:
        Lines about changed settings, which take effect from here on, and about a run that is finished.

    Raises:
        JobError: lists the changes, with both values.
        CheckpointError: the checkpoint has no training state.
    """
    position = read_manifest(newest_checkpoint(Path(folder) / STATE_FOLDER)).position
    saved = position.extra or {}
    if "settings" not in saved:
        return [f"resume      the settings of {folder} are not known, and not compared: a script has made it"]
    now, before = facts["settings"], saved["settings"]
    changed = {
        key: f"{key} = {now.get(key)!r}; the checkpoint was made with {before.get(key)!r}"
        for key in {**before, **now}
        if now.get(key) != before.get(key)
    }
    if refused := [key for key in changed if _rule(key)]:
        raise JobError(
            "\n".join(changed[key] for key in refused),
            where=folder,
            rule=_rule(refused[0]),
            fix=f"restore the earlier value, or start a new run from the model in {folder} (model.path = ...)",
        )
    others = [key for key, digest in saved["inputs"].items() if facts["inputs"].get(key, digest) != digest]
    if refused := [key for key in others if key != "data.eval_path"]:
        raise JobError(
            f"the contents of {' and '.join(refused)} have changed since the checkpoint",
            where=folder,
            rule="a resumed run keeps its rows, its rewards, and the models that it started from, with their tokenizers",
            fix=f"restore the files, or start a new run from the model in {folder} (model.path = ...)",
        )
    lines = [f"changed     {text}" for text in changed.values()]
    lines += [f"changed     the contents of {key}: evaluations before and after it have other rows" for key in others]
    steps = now["trainer.options.max_steps"]
    if 0 < steps <= position.step:
        lines.append(f"resume      {folder} is of step {position.step} of {steps}: nothing is left to train")
    return lines


def _rule(key: str) -> str:
    """Rule against a change of a setting; "" where it may change."""
    name = key.removeprefix("trainer.options.")
    if key in KEPT or (name != key and name in ROW_OPTIONS):
        return "a resumed run keeps the rows of its steps and their order"
    if name != key and name in RESTORED_OPTIONS:
        return "a checkpoint restores the optimizer and its schedule, so that another value would have no effect"
    return "a checkpoint has the weights of one set of adapters" if key.startswith("adapter.") else ""


def _digest_folder(folder: Path) -> str:
    """Digest of the files of a model folder that training reads, of large ones sampled."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name.endswith(READ_BY_LIBRARIES)]
    return digest_files((file, file.name) for file in files)
