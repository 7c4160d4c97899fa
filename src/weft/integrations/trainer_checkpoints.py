"""Saving and loading of a trainer under a plan: its checkpoints have the training state of Weft, for any plan."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from weft.checkpoint.together import ask_rank_0
from weft.errors import CheckpointError
from weft.integrations.models import refuse_shards
from weft.integrations.script_state import from_text_keys, is_complete, with_text_keys
from weft.integrations.trainer_state import load_state, restore_log, save_state

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class CheckpointMixin(Base):
    """Part of a trainer that saves and loads; see `trainer.TrainerMixin`."""

    accelerator: Any
    _resumed: dict[str, Any] | None = None
    """State since the last log, of a checkpoint that was loaded; None after it was restored."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in the format of the Trainer: full weights that `from_pretrained` loads. Collective."""
        if not self.accelerator.is_parallelized(self.model):
            super().save_model(output_dir, _internal_call)
            return
        weights = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        refuse_shards(state_dict, output_dir or str(self.args.output_dir))
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        extra = {"scheduler": with_text_keys(scheduler), "trainer": save_state(self, output_dir)}
        self.accelerator.training_state.save(output_dir, self.state.global_step, extra)
        if self.args.save_total_limit or self.args.push_to_hub:
            self.accelerator.training_state.finish()  # the Trainer removes older checkpoints now, or uploads this one

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with `resume_from_checkpoint=True`, from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            newest = ask_rank_0(partial(newest_complete, Path(self.args.output_dir or ".")))
            resume_from_checkpoint = newest or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch, or its part after a checkpoint; nothing, where the checkpoint is of the last step."""
        if self._resumed is not None:
            restore_log(self, self._resumed)
            self._resumed = None
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.accelerator.training_state.is_in(resume_from_checkpoint):
            return  # `_load_optimizer_and_scheduler` loads the weights too, straight into the shards
        if self.accelerator.is_parallelized(self.model):
            raise CheckpointError(
                "a checkpoint without the training state of Weft, for a model that is parallelized already",
                where=resume_from_checkpoint,
                rule="plain weights are loaded before the first train() of a trainer",
                fix="make a new trainer, and pass resume_from_checkpoint to its first train()",
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not self.accelerator.training_state.is_in(checkpoint):
            if os.path.exists(os.path.join(checkpoint, "optimizer.pt")):
                raise CheckpointError(
                    "a checkpoint of a Trainer without Weft",
                    where=checkpoint,
                    rule="the optimizer state of a checkpoint is in its folder weft, in the layout of any plan",
                    fix="continue it without Weft, or start from its weights: from_pretrained of the folder",
                )
            return
        extra = self.accelerator.training_state.load(checkpoint)
        self._resumed = load_state(self, checkpoint, extra.get("trainer"))
        if extra.get("scheduler") and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(from_text_keys(extra["scheduler"]))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self.accelerator.is_parallelized(self.model):
            super()._load_best_model()
        else:
            self.accelerator.training_state.load_weights(best)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.training_state.finish()  # the best checkpoint is loaded now, and the process may end soon
        return super()._finalize_training(*args, **kwargs)


def newest_complete(folder: Path) -> str:
    """Newest checkpoint of a trainer whose training state is complete; "" without one.

    Args:
        folder: output folder of the trainer.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    by_step = sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((str(path) for path in by_step if is_complete(path, TRAINER_STATE_NAME)), "")
