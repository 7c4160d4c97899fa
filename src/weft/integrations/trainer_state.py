"""State of a trainer that its next step or its next log reads, and that neither Transformers nor TRL saves in a checkpoint.

| state | trainers |
|---|---|
| weights of a reference model that moves (`sync_ref_model`) | DPO, GRPO, RLOO |
| completions on which later steps train too (`num_iterations`, `steps_per_generation`), and the position in them | GRPO, RLOO |
| tokens so far; losses and metrics since the last log | all |
| seed of dropout of the last step, which log-probabilities before a step read | RLOO |

Weights, optimizer, schedule, steps, best metric, and the random numbers of each rank are in a checkpoint already.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import scatter_weights
from weft.comm.objects import all_gather_json, broadcast_json, run_together
from weft.data.digests import digest_file
from weft.errors import CheckpointError
from weft.integrations.models import core_of
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.runtime import set_dropout_seed

FOLDER = "weft-trainer"
"""Folder in a checkpoint of a trainer with the tensors of its state."""
REFERENCE = "reference.safetensors"
COUNTERS = ("_step", "_total_train_tokens")
"""Attributes of trainers of TRL that count."""
METRICS = ("_metrics", "_stored_metrics")
"""Attributes of trainers of TRL with lists of the values since the last log, by mode and name; `stats` has them by name."""
Files = dict[str, dict[str, Tensor]]


def save_state(trainer: Any, checkpoint: str | Path) -> str:
    """Write the tensors of the state of a trainer into a checkpoint. Collective.

    Args:
        trainer: trainer that trains under a plan.
        checkpoint: folder of the checkpoint; the caller completes it afterwards.

    Returns:
        JSON text for `load_state`, the same on every rank; with NaN, which metrics may be.

    Raises:
        CheckpointError: a file cannot be written; the same on every rank.
    """
    files: Files = {}
    if _moves_reference(trainer):
        weights = gather_weights(core_of(trainer.ref_model))
        once = {id(weight): name for name, weight in reversed(weights.items())}  # a tied weight has several names
        if weights:
            files[REFERENCE] = {name: weights[name].contiguous() for name in once.values()}
    others: list[dict[str, Any]] = []
    if is_within := _is_within_generation(trainer):
        named = [batch.items() for batch in trainer._buffered_inputs]
        others = [{key: value for key, value in batch if not isinstance(value, Tensor)} for batch in named]
        if dist.get_rank() in trainer.accelerator.leaders:
            files[_completions(trainer)] = {
                f"{index}.{key}": value.cpu().clone()  # slices of one memory, which a file does not take
                for index, batch in enumerate(named)
                for key, value in batch
                if isinstance(value, Tensor)
            }
    folder = Path(checkpoint) / FOLDER
    written = all_gather_json(run_together(partial(_write, folder, files, json.dumps(others))))
    own = {
        "files": {name: digest for table in written for name, digest in table.items()},
        "rows_per_step": trainer.get_total_train_batch_size(trainer.args),
        "generation": _generation(trainer) if is_within else None,
        "counters": {name: getattr(trainer, name) for name in COUNTERS if hasattr(trainer, name)},
        "metrics": {name: getattr(trainer, name).get("train", {}) for name in METRICS if hasattr(trainer, name)},
        "stats": getattr(trainer, "stats", {}),
        "logged_step": trainer._globalstep_last_logged,
    }
    text = broadcast_json(json.dumps(own, default=float))  # times and tensors of metrics are those of rank 0
    return json.dumps({**json.loads(text), "losses": all_gather_json(trainer._tr_loss.item())})


def load_state(trainer: Any, checkpoint: str | Path, text: str | None) -> dict[str, Any] | None:
    """Restore the state of a trainer, before its first step. Collective.

    Args:
        trainer: trainer whose model is parallelized.
        checkpoint: folder of the checkpoint.
        text: result of `save_state`; None if an earlier version has written the checkpoint.

    Returns:
        State for `restore_log`; None without one.

    Raises:
        CheckpointError: a file is missing or damaged, or the trainer takes other batches; the same on every rank.
    """
    where = str(checkpoint)
    if text is None and not _moves_reference(trainer) and not hasattr(trainer, "_buffered_inputs"):
        return None
    if text is None:
        raise CheckpointError(
            "a checkpoint without the state of its trainer",
            where=where,
            rule="a resumed trainer continues with its batches, its reference model and its completions",
            fix="resume with the version of Weft that has written the checkpoint, or start from its weights",
        )
    saved = json.loads(text)
    _check_batches(trainer, saved, where)
    folder, is_within = Path(checkpoint) / FOLDER, saved["generation"] is not None
    own = [REFERENCE] * (REFERENCE in saved["files"]) + [_completions(trainer)] * is_within
    run_together(partial(_verify, folder, own, saved["files"]))
    if REFERENCE in own and trainer.ref_model is not None:
        reference = core_of(trainer.ref_model)
        free_gathered_weights(reference)
        scatter_weights(reference, load_file(folder / REFERENCE) if dist.get_rank() == 0 else {})
    if hasattr(trainer, "_buffered_inputs"):
        trainer._buffered_inputs = _read_batches(folder / _completions(trainer), trainer) if is_within else None
    for name, value in saved["counters"].items():
        setattr(trainer, name, value)
    for optimizer in trainer.accelerator._optimizers:  # of forwards without gradients before the first step
        set_dropout_seed(optimizer.distributed.model, trainer.accelerator.seed, optimizer.steps)
    return saved


def restore_log(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore losses and metrics since the last log, which `Trainer.train` resets.

    Args:
        trainer: trainer that begins its first epoch after a resume.
        saved: result of `load_state`.
    """
    losses = saved["losses"]
    is_same = len(losses) == dist.get_world_size()  # other ranks begin with the mean, which is all that a log reads
    trainer._tr_loss += losses[dist.get_rank()] if is_same else sum(losses) / len(losses)
    trainer._globalstep_last_logged = saved["logged_step"]
    for name, metrics in saved["metrics"].items():
        for key, values in metrics.items():
            getattr(trainer, name)["train"][key] = values
    if saved["stats"]:
        trainer.stats.update(saved["stats"])


def _read_batches(path: Path, trainer: Any) -> list[dict[str, Any]]:
    """Micro-batches of the completions of this data rank."""
    with safe_open(path, "pt") as opened:
        batches: list[dict[str, Any]] = json.loads(opened.metadata()["others"])
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            index, _, key = name.partition(".")
            batches[int(index)][key] = opened.get_tensor(name).to(trainer.accelerator.device)
    return batches


def _moves_reference(trainer: Any) -> bool:
    return bool(getattr(trainer.args, "sync_ref_model", False)) and getattr(trainer, "ref_model", None) is not None


def _is_within_generation(trainer: Any) -> bool:
    """True if the next step trains on completions that are generated already."""
    if getattr(trainer, "_buffered_inputs", None) is None:
        return False
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations))


def _generation(trainer: Any) -> dict[str, int]:
    """Numbers that must be the same for a trainer that continues within a generation."""
    return {
        "data ranks": trainer.accelerator.data_ranks,
        "per_device_train_batch_size": trainer.args.per_device_train_batch_size,
        "steps_per_generation": trainer.args.steps_per_generation,
        "num_iterations": trainer.num_iterations,
    }


def _completions(trainer: Any) -> str:
    return f"completions-{trainer.accelerator.data_rank:05d}.safetensors"


def _check_batches(trainer: Any, saved: dict[str, Any], where: str) -> None:
    """Refuse batches that differ from those of a checkpoint, whose position counts them.

    Raises:
        CheckpointError: names the number and both values.
    """
    counts = not trainer.args.ignore_data_skip
    now = {"rows of a step": trainer.get_total_train_batch_size(trainer.args)} if counts else {}
    before = {"rows of a step": saved["rows_per_step"]}
    if saved["generation"] is not None:
        now, before = now | _generation(trainer), before | saved["generation"]
    changed = [
        f"{name}: {new}; the checkpoint was made with {before[name]}"
        for name, new in now.items()
        if new != before[name]
    ]
    if changed:
        raise CheckpointError(
            "\n".join(changed),
            where=where,
            rule="a resumed trainer takes as many rows in a step as before; between two updates on the same completions, it "
            "also keeps its data ranks",
            fix="set per_device_train_batch_size and gradient_accumulation_steps so that their product with the number of data "
            "ranks is as before, or resume from a checkpoint between two generations",
        )


def _write(folder: Path, files: Files, others: str) -> dict[str, str]:
    """Write the files of this rank; return their digests by name."""
    digests = {}
    try:
        for name, tensors in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f".{name}"
            save_file(tensors, draft, metadata={"others": others})
            digests[name] = digest_file(draft)
            draft.replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the state of the trainer cannot be written: {error}",
            where=str(folder),
            rule="a checkpoint has all that the next step reads",
            fix="choose a folder on a disk with free space, which all ranks may write",
        ) from None
    return digests


def _verify(folder: Path, names: list[str], digests: dict[str, str]) -> None:
    """Refuse files that are not those of the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name in names:
        try:
            problem = "" if digest_file(folder / name) == digests[name] else "its content is not that of the checkpoint"
        except OSError as error:
            problem = str(error)
        if problem:
            raise CheckpointError(
                f"{name} cannot be used: {problem}",
                where=str(folder),
                rule="a resumed trainer continues with the reference model and the completions of its checkpoint",
                fix="resume from another checkpoint",
            )
