"""Weft under `transformers.Trainer` and the trainers that inherit from it, such as TRL's.

    trainer = weft.turn_on(Trainer(...), "plan.toml")        # one line
    trainer = weft.with_weft(SFTTrainer, "plan.toml")(...)   # or a class
    weft run --plan plan.toml train.py                       # or no line: `script.py` replaces Trainer

The mixin is a class between `Trainer` and the classes that inherit from it; no class of a library is changed. It hands the
model to `WeftAccelerator`, which parallelizes it.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer

from weft.checkpoint.together import check_same_folder
from weft.device.detect import detect
from weft.errors import JobError, PlanError
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.auto_plan import AutoPlan, plan_or_auto
from weft.integrations.auto_trainer import plan_for_trainer
from weft.integrations.generation import generates, with_generation
from weft.integrations.models import core_of, requested_precision
from weft.integrations.reference_cache import ReferenceCacheMixin
from weft.integrations.trainer_checkpoints import CheckpointMixin
from weft.integrations.trainer_evaluation import EvaluationMixin
from weft.integrations.trainer_pipeline import PipelinedSteps, check_pipeline, has_own_loss
from weft.integrations.versions import check_methods, check_versions
from weft.plan import Plan, resolve_plan
from weft.training.prepare import init
from weft.training.same_inputs import compare_hosts, read_script_inputs

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
        "_run_epoch",
        "evaluation_loop",
        "_get_num_items_in_batch",
    ),
)
"""Methods of Trainer that the mixin overrides or calls."""


class TrainerMixin(EvaluationMixin, CheckpointMixin, ReferenceCacheMixin):
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
        ranks = max(int(self.args.world_size), 1)
        self._check_plan(resolve_plan(chosen, ranks, native_bf16=detect().supports("bf16")))
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
        compare_hosts(partial(read_script_inputs, self.train_dataset, self.eval_dataset))
        if self.args.save_strategy != "no" and self.args.output_dir:
            check_same_folder(Path(self.args.output_dir), "output_dir")
        return super()._prepare_for_training(*args, **kwargs)

    def _pipelined(self) -> PipelinedSteps | None:
        """Steps of the pipeline; None for a model without one."""
        if self.accelerator.plan.parallel.pp == 1 or not self.accelerator.is_parallelized(self.model):
            return None
        core = core_of(self.model)  # a new one in each train() with model_init
        if self._pipelined_steps is None or self._pipelined_steps.model is not core:
            self._pipelined_steps = PipelinedSteps(core, self.accelerator.seed)
        return self._pipelined_steps


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
            ranks, 0 for one.

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
