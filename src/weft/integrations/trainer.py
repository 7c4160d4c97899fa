"""Weft under `transformers.Trainer` and the trainers that inherit from it, such as TRL's.

    trainer = weft.turn_on(Trainer(...), "plan.toml")        # one line
    trainer = weft.with_weft(SFTTrainer, "plan.toml")(...)   # or a class
    weft run --plan plan.toml train.py                       # or no line: `script.py` replaces Trainer

The mixin is a class between `Trainer` and the classes that inherit from it; no class of a library is changed. It hands the
model to `WeftAccelerator`, which parallelizes it. A checkpoint of the trainer has the training state of Weft, which resumes
under any plan.
"""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from weft.comm.objects import broadcast_json
from weft.data import IGNORED
from weft.errors import CheckpointError, JobError, PlanError
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.auto_plan import AutoPlan, plan_or_auto
from weft.integrations.auto_trainer import plan_for_trainer
from weft.integrations.generation import generates, with_generation
from weft.integrations.models import core_of, refuse_shards, requested_precision
from weft.integrations.script_state import from_text_keys, with_text_keys
from weft.integrations.trainer_pipeline import PipelinedSteps, check_pipeline, has_own_loss
from weft.integrations.versions import check_methods, check_versions
from weft.plan import Plan
from weft.training.prepare import init

GENERATING = (
    "OnlineDPOTrainer",
    "NashMDTrainer",
    "XPOTrainer",
    "PPOTrainer",
    "GKDTrainer",
    "GOLDTrainer",
    "DistillationTrainer",
    "SDFTTrainer",
    "SDPOTrainer",
)
"""Trainers of TRL that generate rows during training, other than those of `generation.py`."""
OVERRIDDEN = (
    *(
        "_build_accelerator_args",
        "create_accelerator_and_postprocess",
        "get_total_train_batch_size",
        "train",
        "predict",
    ),
    *("training_step", "prediction_step", "compute_loss", "save_model", "_save", "_save_optimizer_and_scheduler"),
    *(
        "_prepare_for_training",
        "_prepare_inputs",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_best_model",
        "_finalize_training",
    ),
)
"""Methods of Trainer that the mixin overrides or calls."""

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class TrainerMixin(Base):
    """Part of a trainer that runs its model under a plan."""

    weft_plan: Plan | AutoPlan
    _pipelined_steps: PipelinedSteps | None = None
    _given: Mapping[str, Any] = MappingProxyType({})
    """Arguments of `Trainer.__init__` while it runs: the Trainer makes its accelerator before it stores them."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Arguments of `transformers.Trainer`."""
        self._given = inspect.signature(Trainer).bind_partial(*args, **kwargs).arguments
        super().__init__(*args, **kwargs)
        del self._given

    # Accelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        self._weft_arguments = dict(arguments)
        return {**arguments, "mixed_precision": "no"}  # the state of accelerate is shared: no autocast beside the plan

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the accelerator, for which the Trainer has checked its arguments, by that of the plan."""
        super().create_accelerator_and_postprocess()
        chosen = self.weft_plan
        if isinstance(chosen, AutoPlan):
            init()
            requested = requested_precision(self._weft_arguments)
            chosen = plan_for_trainer(self, chosen, self._given, requested, self._check_auto_plan)
        self._check_plan(chosen.resolve(max(int(self.args.world_size), 1)))
        own = getattr(self.gather_function, "keywords", {})
        self.accelerator: Any = WeftAccelerator(plan=chosen, **self._weft_arguments)
        self.accelerator.runs_pipelines = True
        if generates(type(self)):
            self.__class__ = with_generation(type(self))
            self.accelerator.keeps_structures = True
        gather = self.accelerator.gather_for_metrics

        def gather_function(data: Any) -> Any:
            return gather(data, **own)

        self.gather_function = gather_function

    def _check_plan(self, plan: Plan) -> None:
        noise = getattr(self.args, "neftune_noise_alpha", None)
        check_trainer(type(self), plan, getattr(self.args, "train_sampling_strategy", ""), bool(noise))

    def _check_auto_plan(self, plan: Plan) -> None:
        """Refuse a plan that the trainer cannot run under, before it has stored its arguments."""
        self._check_plan(plan)
        if plan.parallel.pp > 1:
            functions = [self._given.get(n, getattr(self, n, None)) for n in ("compute_loss_func", "compute_metrics")]
            check_pipeline(type(self), functions[0], self.args.label_smoothing_factor != 0, functions[1])

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step over all data ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.data_ranks)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # the accelerator takes the norm over all meshes

    # Forward and backward

    def _reads_logits(self) -> bool:
        """True if the loss of the trainer may read logits: it is not that of the model."""
        return has_own_loss(type(self)) or self.compute_loss_func is not None or self.label_smoother is not None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch; in a pipeline, of all micro-batches with the last one."""
        if steps := self._pipelined():
            model.train()
            self.accelerator.check_rows(inputs)
            loss = steps.add(self._prepare_inputs(inputs))
            optimizer: Any = self.optimizer
            return steps.run(optimizer) if self.accelerator.sync_gradients else loss
        with self.accelerator.logits_of_rank(not self._reads_logits()):
            return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Run forward of a batch of an evaluation.

        The loss is the mean over the targets of all data ranks, without the rows that fill up the last batch: that of one
        process with the same number of rows in a batch.
        """
        labels: Any = inputs.get("labels") if hasattr(inputs, "get") else None
        is_exact = isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()
        is_exact = is_exact and self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices
        if is_exact and (repeated := self.accelerator.repeated_rows(len(labels))):
            inputs["labels"] = labels.clone()
            inputs["labels"][len(labels) - repeated :] = IGNORED
        if steps := self._pipelined():
            return steps.evaluate(self._prepare_inputs(inputs)), None, None
        with self.accelerator.logits_of_rank(prediction_loss_only and not self._reads_logits()):
            loss, logits, found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if is_exact and loss is not None:
            loss = self.accelerator.mean_over_data_ranks(loss)
        return loss, logits, found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; each row counts once, also where Seq2SeqTrainer keeps the rows that fill up the last batch."""
        if self.gather_function == self.accelerator.gather:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict.

        Raises:
            PlanError: no rank of a pipeline has the outputs of a full model.
        """
        if self.accelerator.plan.parallel.pp > 1:
            raise PlanError(
                f"trainer.predict under plan.parallel.pp = {self.accelerator.plan.parallel.pp}",
                where="plan.parallel.pp",
                rule="no rank of a pipeline has the outputs of a full model",
                fix="predict in one process from the saved model, or set plan.parallel.pp = 1",
            )
        return super().predict(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.plan.parallel.pp > 1:
            check_pipeline(type(self), self.compute_loss_func, self.label_smoother is not None, self.compute_metrics)
        return super()._prepare_for_training(*args, **kwargs)

    def _pipelined(self) -> PipelinedSteps | None:
        """Steps of the pipeline; None for a model without one."""
        if self.accelerator.plan.parallel.pp == 1 or not self.accelerator.is_parallelized(self.model):
            return None
        core = core_of(self.model)  # a new one in each train() with model_init
        if self._pipelined_steps is None or self._pipelined_steps.model is not core:
            self._pipelined_steps = PipelinedSteps(core, self.accelerator.seed)
        return self._pipelined_steps

    # Saving and loading

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
        extra = {"scheduler": with_text_keys(scheduler)}
        self.accelerator.training_state.save(output_dir, self.state.global_step, extra)
        if self.args.save_total_limit or self.args.push_to_hub:
            self.accelerator.training_state.finish()  # the Trainer removes older checkpoints now, or uploads this one

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with `resume_from_checkpoint=True`, from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_complete() or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest_complete(self) -> str:
        """Newest checkpoint whose training state is complete; "" without one. Collective."""
        found = broadcast_json([str(path) for path in Path(self.args.output_dir or ".").glob("checkpoint-*")])
        by_step = sorted(
            (path for path in found if path.rpartition("-")[2].isdigit()), key=lambda path: int(path.rpartition("-")[2])
        )
        state = self.accelerator.training_state
        return next((path for path in reversed(by_step) if state.is_complete(path, also=TRAINER_STATE_NAME)), "")

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


def check_trainer(trainer_class: type, plan: Plan, sampling: str = "", noise: bool = False) -> None:
    """Refuse a plan under which a trainer would be silently wrong.

    Args:
        trainer_class: class of the trainer.
        plan: resolved plan.
        sampling: `train_sampling_strategy` of its arguments.
        noise: True if it adds noise to embeddings (NEFTune).

    Raises:
        PlanError: the plan lets ranks share rows, and the trainer generates rows in training, balances rows over all ranks, or
            adds noise that depends on the length of rows.
    """
    generates = next((kind.__name__ for kind in trainer_class.__mro__ if kind.__name__ in GENERATING), None)
    p = plan.parallel
    shared = {axis: degree for axis, degree in (("tp", p.tp), ("cp", p.cp), ("pp", p.pp)) if degree > 1}
    if generates and shared:
        axis, degree = next(iter(shared.items()))
        raise PlanError(
            f"{generates} with plan.parallel.{axis} = {degree}",
            where=f"plan.parallel.{axis}",
            rule="each rank samples its own completions, and ranks that share rows would train on different ones",
            fix=f"set plan.parallel.{axis} = 1: ZeRO works, for example [parallel] zero = 3",
        )
    if noise and (p.cp > 1 or (p.tp > 1 and p.sp)):
        raise PlanError(
            "neftune_noise_alpha with plan.parallel.cp or sp",
            where="neftune_noise_alpha",
            rule="the noise depends on the length of rows, and each rank embeds a part of their tokens",
            fix="set plan.parallel.cp = 1 and plan.parallel.sp = false, or leave neftune_noise_alpha out",
        )
    if sampling == "batch_rebalance" and shared:
        raise PlanError(
            f'train_sampling_strategy = "{sampling}" with ranks that share rows',
            where="train_sampling_strategy",
            rule="this sampler gives each rank its own rows, and ranks of tp, cp and pp share rows",
            fix='set train_sampling_strategy="random"',
        )


def with_weft(trainer_class: type[Any], plan: Plan | AutoPlan | str | Path | None = None) -> type[Any]:
    """Class of a trainer that runs its model under a plan.

    Args:
        trainer_class: `transformers.Trainer`, or a class that inherits from it.
        plan: plan, the path of a TOML file with a plan, or "auto", which lets the planner choose; None: ZeRO stage 3 over all
            ranks.

    Raises:
        JobError: the class does not inherit from `transformers.Trainer`, has another plan already, or the plan cannot be read.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise JobError(
            f"{getattr(trainer_class, '__name__', trainer_class)} is no transformers.Trainer",
            where="weft.with_weft",
            rule="Weft runs the trainers of Transformers, and trainers that inherit from them, as in TRL",
            fix="pass the class of the trainer, or use weft.prepare in a loop of your own",
        )
    if issubclass(trainer_class, TrainerMixin):
        if plan is not None:
            raise JobError(
                f"a second plan for {trainer_class.__name__}",
                where="weft.with_weft",
                rule="a trainer has one plan, and this one has the plan of weft run or of an earlier call",
                fix="leave the plan out here, or run the script without weft run",
            )
        return trainer_class
    check_versions()
    check_methods("transformers", Trainer, OVERRIDDEN)
    base = type("WeftTrainer", (TrainerMixin, Trainer), {"weft_plan": plan_or_auto(plan)})
    if trainer_class is Trainer:
        return base
    # The mixin comes after the methods of the class, which call those of Trainer by super().
    return type(f"Weft{trainer_class.__name__}", (trainer_class, base), {"__module__": trainer_class.__module__})


def turn_on(trainer: Any, plan: Plan | AutoPlan | str | Path | None = None) -> Any:
    """Let a trainer run its model under a plan. Call it on every rank, after the trainer was made and before `train()`.

    Args:
        trainer: object of `transformers.Trainer`, or of a class that inherits from it.
        plan: as in `with_weft`.

    Returns:
        The same object.

    Raises:
        JobError: see `with_weft`; or the trainer has trained already.
    """
    changed = with_weft(type(trainer), plan)
    if changed is type(trainer):
        return trainer
    if trainer.state.global_step or trainer.model_wrapped is not trainer.model:
        raise JobError(
            "a trainer that has trained already",
            where="weft.turn_on",
            rule="the model is parallelized when training begins",
            fix="call weft.turn_on(trainer, plan) before trainer.train()",
        )
    trainer.__class__ = changed
    AcceleratorState._reset_state()  # it has the accelerator that the trainer made, with its precision
    trainer.create_accelerator_and_postprocess()
    if getattr(trainer, "ref_model", None) is not None:  # TRL has prepared it with that accelerator
        trainer.ref_model = trainer.accelerator.prepare_model(trainer.ref_model, evaluation_mode=True)
    return trainer
