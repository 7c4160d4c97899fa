"""Checkpoints and exports of a custom training loop; the same as those of `weft train`."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from weft.checkpoint.export_files import source_of
from weft.checkpoint.huggingface import export_model
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import Position
from weft.checkpoint.parameter_groups import check_kind, restore_settings
from weft.checkpoint.remote import require_local
from weft.checkpoint.restore import Reader, check_model, restore_training, restore_weights, verify_together
from weft.checkpoint.snapshot import Snapshots, Target
from weft.checkpoint.together import check_same_folder, new_folder
from weft.comm.objects import all_gather_json, broadcast_json, same_on_all
from weft.device.device import Device
from weft.errors import CheckpointError, ModelError
from weft.job import Job, Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale

EXPORT_MARK = ".weft-export"
"""Empty file in an export of a custom loop: a later export may replace the folder."""
STEP_FOLDER = re.compile(r"step-(\d+)")


class OwnCheckpoints:
    """Saves and loads the training state of a model and its optimizer; methods and errors as in `weft.Run`. Collective."""

    def __init__(self, model: Any, optimizer: DistributedOptimizer, device: Device, torch_device: torch.device):
        self.model, self.optimizer, self.device, self.torch_device = model, optimizer, device, torch_device
        self.snapshots: Snapshots | None = None
        """Writer of checkpoints, made by the first `save`."""

    def save(self, folder: Path, steps: int, extra: dict[str, Any] | None, keep: int = 0) -> None:
        """Start to write a checkpoint; one of the same name is replaced when the new one is complete.

        Args:
            folder: folder of the checkpoint, "step-N".
            steps: number of steps so far.
            extra: values that JSON can hold.
            keep: number of newest checkpoints that are kept beside each other; 0 keeps all.
        """
        require_local(folder)
        step = STEP_FOLDER.fullmatch(folder.name)
        own = _json_problem(extra) or [json.dumps(extra)]
        problems = [own] if same_on_all(own) else all_gather_json(own)
        if problem := next((text for text in problems if isinstance(text, str)), ""):
            raise CheckpointError(
                f"extra cannot be saved: {problem}",
                where=str(folder),
                rule="extra is a dict that JSON returns unchanged",
                fix="use lists, text keys, numbers and text",
            )
        if any(text != problems[0] for text in problems):
            raise CheckpointError(
                "extra differs between the ranks",
                where=str(folder),
                rule="a checkpoint has one extra, which every rank gets back",
                fix="pass the same values on every rank, for example a list of the values of all ranks",
            )
        if step is None:
            raise CheckpointError(
                f"a checkpoint named {folder.name}",
                where=str(folder),
                rule="a checkpoint is named after its step, so that the newest is known",
                fix='name it "step-100", in a folder for checkpoints',
            )
        self.finish()
        check_same_folder(folder.parent, "folder of the checkpoint")
        if self.snapshots is None:
            known = getattr(self.model, "config", None)
            config = {"model_type": type(self.model).__name__}  # of a module that is no model of Transformers
            if isinstance(known, PretrainedConfig):
                config = json.loads(known.to_json_string(use_diff=False))
            job = Job(model=Model(config=config), plan=runtime(self.model).plan)
            self.snapshots = Snapshots(job, self.model, self.optimizer, self.device, self.torch_device)
        scale = self.optimizer.loss_scale
        position = Position(step=int(step[1]), next_batch=steps, loss_scale=scale, extra=extra)
        target = Target(folder.parent, dist.get_rank() == 0, keep=keep, keep_hours=0, replace=True)
        self.snapshots.take(position, target)

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        if self.snapshots is None:
            return
        self.snapshots.finish()
        failed = [text for text in self.snapshots.take_messages() if text.startswith("no checkpoint")]
        if failed := broadcast_json(failed):
            raise CheckpointError(failed[-1], where="weft.Run.save", fix="mend the cause, and save again")

    def load(self, folder: Path, key_file: str | Path | None = None) -> Position:
        """Load a checkpoint."""
        require_local(folder)
        self.finish()
        dist.barrier()
        if (step := STEP_FOLDER.fullmatch(folder.name)) and not folder.exists():
            folder = folder.with_name(f"step-{int(step[1]):08d}")
        manifest = verify_together(folder, read_key(str(key_file)) if key_file else None)
        position = manifest.position
        check_kind(self.optimizer.inner, position.parameter_groups, folder)
        free_gathered_weights(self.model)
        self.optimizer.finish_offload()
        with Reader(folder, manifest) as reader:
            check_model(self.model, reader)  # before the states are lost
            self.optimizer.state.clear()
            message = restore_training(self.model, self.optimizer, self.device, reader)
        if message and dist.get_rank() == 0:
            warnings.warn(message, stacklevel=3)
        if self.snapshots is not None:
            self.snapshots.reset()
        restore_settings(self.model, self.optimizer.inner, position.parameter_groups)
        initial = LossScale.from_plan(runtime(self.model).plan.precision.loss_scale)
        self.optimizer.loss_scale = initial.resumed(position.loss_scale)
        return position

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint, and leave the optimizer as it is."""
        self.finish()
        manifest = verify_together(folder)
        free_gathered_weights(self.model)
        with Reader(folder, manifest) as reader:
            restore_weights(self.model, reader)


def _json_problem(extra: dict[str, Any] | None) -> str:
    """Reason why JSON cannot hold `extra`; "" if it can."""
    try:
        if extra is not None and (not isinstance(extra, dict) or json.loads(json.dumps(extra)) != extra):
            return "JSON would change it: keys become text, and tuples become lists"
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def export(model: Any, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Write the weights of a parallelized model as a Hugging Face folder, which `from_pretrained` loads. Collective.

    Args:
        model: parallelized model with its weights.
        folder: folder to write; an earlier export is replaced when the new one is complete.
        tokenizer: folder whose tokenizer files are copied; default: the folder from which the model was loaded.

    Raises:
        CheckpointError: the folder has something else than an export, or cannot be written; the same on every rank.
        ModelError: the library of the model has no format of folders.
    """
    if not hasattr(model, "save_pretrained"):
        raise ModelError(
            f"an export of a {type(model).__name__}",
            where="weft.Run.export",
            rule="models of Transformers and Diffusers have a format of folders, which their from_pretrained loads",
            fix="save a checkpoint with run.save, or the weights with torch.distributed.checkpoint",
        )
    folder, tokenizer = Path(folder), Path(tokenizer) if tokenizer else None
    require_local(folder)
    if broadcast_json(_has_other_files(folder)):
        raise CheckpointError(
            "the folder has other files than an export",
            where=str(folder),
            rule=f"an export replaces an earlier export only, which has the file {EXPORT_MARK}",
            fix="choose another folder",
        )
    dtype = DTYPES[runtime(model).plan.precision.update]
    with new_folder(folder, lambda part: (part / EXPORT_MARK).touch()) as part:
        if problem := export_model(model, part, tokenizer, dtype, source_of(model)):
            raise CheckpointError(
                f"the weights cannot be written: {problem}",
                where=str(folder),
                rule="rank 0 writes the folder beside its final name, and renames it when it is complete",
                fix="choose a folder on a disk with free space, which rank 0 may write",
            )


def _has_other_files(folder: Path) -> bool:
    """True if a folder exists and is neither empty nor an earlier export."""
    found = list(folder.iterdir()) if folder.is_dir() else [folder] * folder.exists()
    return bool(found) and not (folder / EXPORT_MARK).is_file()
