"""`WeftAccelerator`: `accelerate.Accelerator` whose models run under a plan.

    accelerator = WeftAccelerator(plan="plan.toml")                     # the one line that changes
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()

`weft run --plan plan.toml script.py` replaces `accelerate.Accelerator` by it, so that no line changes.
"""

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.huggingface import gather_weights
from weft.comm.objects import broadcast_json
from weft.compat import find_hook
from weft.device.detect import detect
from weft.errors import CheckpointError, ModelError
from weft.integrations.auto_plan import AutoPlan, plan_or_auto
from weft.integrations.data_ranks import DataRankAccelerator
from weft.integrations.full_copy import structure_of
from weft.integrations.full_outputs import prepare_outputs
from weft.integrations.main_process import AnnouncedRandomStates, MainProcessCalls, collective_call
from weft.integrations.models import (
    ForwardOwner,
    core_of,
    parallelize_for_script,
    plan_for_script,
    refuse_other_runtimes,
    refuse_pipeline,
    refuse_shards,
    refuse_trained_parts,
    requested_precision,
    save_full_weights,
)
from weft.integrations.optimizer import PlacedOptimizer, loss_scale_of, refuse_scaled, replace_parameters
from weft.integrations.script_state import STATE_FOLDER, ScriptState
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import begin_micro_batch, free_gathered_weights
from weft.parallel.data.gradients import clip_grad_norm_
from weft.parallel.runtime import find_runtime, runtime, set_dropout_seed
from weft.plan import Plan
from weft.training.prepare import init


class WeftAccelerator(DataRankAccelerator):
    """Drop-in for `accelerate.Accelerator`: the same arguments and methods, and a plan.

    The plan decides about parallelism, dtypes, memory and communication. `prepare` parallelizes models in place, lets their
    optimizers update the shards, and gives the ranks of tp, cp and pp the same batches.
    """

    default_plan: Plan | AutoPlan | None = None
    """Plan without the argument `plan`; `weft run` makes a subclass with it."""
    newest: list[Any] | None = None
    """Receives the newest accelerator, of a script that `weft run` runs."""
    runs_pipelines = False
    """True if the owner of the accelerator runs the micro-batches of a step together, as the Trainer of Weft does."""
    keeps_structures = False
    """True if the owner generates rows: `structures` has the structure of each model before it is parallelized."""

    def __init__(self, *args: Any, plan: Plan | AutoPlan | str | Path | None = None, **kwargs: Any):
        """
        Args:
            args: arguments of `accelerate.Accelerator`.
            plan: plan, the path of a TOML file with a plan, or "auto", which lets the planner choose when the first model is
                prepared; None: ZeRO stage 3 over all ranks, 0 for one.
            kwargs: arguments of `accelerate.Accelerator`.

        Raises:
            JobError: an argument asks for another runtime, such as DeepSpeed.
            PlanError: the plan does not fit the number of ranks.
        """
        bound = inspect.signature(Accelerator).bind_partial(*args, **kwargs)
        refuse_other_runtimes(bound.arguments)
        requested = requested_precision(bound.arguments)
        bound.arguments["mixed_precision"] = "no"  # neither autocast nor a scaler on top of the plan
        init()
        chosen = plan_or_auto(self.default_plan if plan is None else plan)
        self.weft_device = detect()
        super().__init__(chosen, self.weft_device.type, *bound.args, **bound.kwargs)
        self._models: list[Any]
        self._optimizers: list[PlacedOptimizer]
        self.step: int
        self._requested_precision = requested
        self.seed = broadcast_json(torch.initial_seed() % 2**31)  # of dropout: that of the script on rank 0
        self._in_no_sync = False
        self._cores: dict[nn.Module, Any] = {}
        """Parallelized model of each prepared model, which may be a wrapper around it."""
        self.structures: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """Structure of each prepared model whose parameters are sharded; see `full_copy.py`."""
        own: Any = weakref.ref(self)  # a cycle would keep an unused accelerator until the next garbage collection
        self.training_state = ScriptState(lambda: own()._optimizers, self.weft_device, self.device)
        services: dict[str, Any] = {
            "save_state": lambda args, kwargs: own().save_state(*args, **kwargs),
            "get_state_dict": lambda index: own().get_state_dict(list(own()._cores)[index]),
        }
        self.main_process_calls = MainProcessCalls(services, lambda index: list(own()._cores.values())[index])
        self.rng_types: list[str] = AnnouncedRandomStates(self.rng_types, self.main_process_calls)
        if self.newest is not None:
            self.newest[:] = [self]

    @property
    def mixed_precision(self) -> str:
        """Dtype that the script asks for: "no", "bf16" or "fp16"."""
        return self._requested_precision

    def autocast(self, autocast_handler: Any = None) -> Any:
        """Context without effect: the plan decides about dtypes."""
        return contextlib.nullcontext()

    # Preparation

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Parallelize models, and wrap optimizers, data loaders and schedulers. Collective; see `accelerate`.

        Raises:
            PlanError: the plan does not fit a model.
            ModelError: a model cannot be read, or an optimizer has other parameters than the models.
        """
        before: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several names
        for model in args:
            if isinstance(model, nn.Module):
                for name, parameter in model.named_parameters(remove_duplicate=False):
                    before.setdefault(parameter, []).append((model, name))
        self.choose_plan(*args)
        for model, placement in zip(args, device_placement or [None] * len(args), strict=True):
            if isinstance(model, nn.Module):
                self.prepare_model(model, placement)
                free_gathered_weights(self._cores[model])  # an evaluation may have left them
        after = {m: dict(m.named_parameters(remove_duplicate=False)) for m in self._models}
        shards = {
            parameter: next((after[m][name] for m, name in names if name in after[m]), None)
            for parameter, names in before.items()
        }
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, PlacedOptimizer):
                known = {p: p for m in self._models for p in m.parameters()} | shards
                replace_parameters(optimizer, known)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Parallelize a model in place, and return it. Collective.

        Args:
            model: causal language model of Transformers, or a PEFT model of one; under data parallelism alone, any module.
            device_placement: ignored; the shards are always on the device.
            evaluation_mode: True: the model will not be trained, such as the reference model of a preference loss.
        """
        self.choose_plan(model)
        core = core_of(model)
        refuse_trained_parts(model, core)
        if not self.runs_pipelines:
            refuse_pipeline(self.plan)
            self.main_process_calls.open()
        if find_runtime(core) is None:
            plan = plan_for_script(self.plan, self._requested_precision, core)
            structure = structure_of(model) if self.keeps_structures else None
            parallelize_for_script(core, plan, self.mesh, self.device)
            if structure is not None and any(isinstance(parameter, DTensor) for parameter in core.parameters()):
                self.structures[model] = structure
        owner = find_hook(core, ForwardOwner)
        if owner is None:
            owner = ForwardOwner(core)
            is_mixed = self._requested_precision != "no" or self.plan.precision.param_dtype != "auto"
            owner.outputs = prepare_outputs(core, is_mixed)
        owner.begin, owner.only_evaluates = self._begin_forward, evaluation_mode
        if model not in self._cores:
            self._cores[model] = core
            save_full_weights(model, partial(self.get_state_dict, model))
        if not any(model is other for other in self._models):
            self._models.append(model)
        return model

    def _begin_forward(self, core: Any, inputs: dict[str, Any]) -> None:
        """Tell a model, before its forward, whether gradients are complete after the backward of this forward."""
        parallelized = runtime(core)
        if parallelized.pipeline is not None:
            return
        if not torch.is_grad_enabled():
            if any(optimizer.distributed.model is core for optimizer in self._optimizers):
                self.main_process_calls.evaluate(list(self._cores.values()).index(core))
            return
        with self.main_process_calls.collective("a forward with gradients"):
            self.check_rows(inputs)
        steps = 0
        for optimizer in self._optimizers:
            if optimizer.distributed.model is core:
                optimizer.begin_forward()
                steps = optimizer.steps
        set_dropout_seed(core, self.seed, steps + 1)
        last = self.sync_gradients and not self._in_no_sync
        begin_micro_batch(core, parallelized.plan, parallelized.gradient_reducer, last=last)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer over parameters of a prepared model."""
        if isinstance(optimizer, PlacedOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        cores = [
            self._cores[model]
            for model in self._models
            if {id(p) for p in model.parameters()}
            & {id(p) for group in optimizer.param_groups for p in group["params"]}
        ]
        if len(cores) != 1:
            raise ModelError(
                f"an optimizer with parameters of {len(cores)} prepared models",
                where="accelerator.prepare",
                rule="an optimizer updates one model",
                fix="prepare the model together with its optimizer, one optimizer for each model",
            )
        placed = PlacedOptimizer(optimizer, DistributedOptimizer(optimizer, cores[0], self.weft_device), self.device)
        self._optimizers.append(placed)
        return placed

    # Forward, backward and update

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Context of micro-batches before the last one of a step: gradients are accumulated and not reduced."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from a loss, divided by the number of accumulation steps."""
        wide = torch.promote_types(loss.dtype, torch.float32)  # a loss scale of 65536 is infinite in fp16
        (loss.to(wide) * (loss_scale_of(self._optimizers) / self.gradient_accumulation_steps)).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the global gradient norm; the next `optimizer.step` applies it. Collective.

        Returns:
            Norm before clipping, without loss scale, float64 scalar, the same on every rank.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = {id(parameter) for parameter in parameters}
        trained = [{id(p) for p in optimizer.distributed.parameters} for optimizer in self._optimizers]
        clipped = [one for one, known in zip(self._optimizers, trained, strict=True) if known <= own]
        is_split = any(known & own and not known <= own for known in trained)
        outside = own.difference(*trained)
        other = any(parameter.grad is not None for parameter in parameters if id(parameter) in outside)
        if clipped and norm_type == 2 and not is_split and not other:
            norm = sum(optimizer.grad_norm() ** 2 for optimizer in clipped) ** 0.5
            for optimizer in clipped:
                optimizer.scale_gradients(max_norm, norm)
            return torch.tensor(norm, dtype=torch.float64)
        refuse_scaled(self._optimizers, "accelerator.clip_grad_norm_")
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient.

        Raises:
            PlanError: the gradients have a loss scale.
        """
        refuse_scaled(self._optimizers, "accelerator.clip_grad_value_")
        super().clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing, because gradients have no loss scale.

        Raises:
            PlanError: they have one.
        """
        refuse_scaled(self._optimizers, "accelerator.unscale_gradients")

    @contextlib.contextmanager
    def logits_of_rank(self, wanted: bool = True) -> Iterator[None]:
        """Context in which outputs have the logits of this rank alone, because nobody reads them; a loss is not affected."""
        with contextlib.ExitStack() as stack:
            owners = filter(None, (find_hook(core, ForwardOwner) for core in self._cores.values() if wanted))
            for outputs in chain.from_iterable(owner.outputs for owner in owners):
                stack.enter_context(outputs.off())
            yield

    def is_parallelized(self, model: Any) -> bool:
        """True if a model, or the model inside of a PEFT model, runs under the plan."""
        return model in self._cores

    # Checkpoints

    @collective_call
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save the training state. Collective.

        Weights and optimizer states are written in the background, see `ScriptState`. Schedulers, samplers, random numbers and
        registered objects are in accelerate's own files. Hooks of `register_save_state_pre_hook` get no models and no weights.

        Returns:
            Folder of the checkpoint.
        """
        with self.training_state.place_of(output_dir, self.project_configuration) as place:
            with self._without_models():
                folder = str(super().save_state(place, safe_serialization, **save_model_func_kwargs))
            step = max((optimizer.steps for optimizer in self._optimizers), default=0)
            self.training_state.save(folder, step, {"accelerator_step": broadcast_json(self.step)})
        return str(output_dir) if place else folder

    @collective_call
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load what `save_state` has saved under any plan. Collective.

        Raises:
            CheckpointError: see `ScriptState.load`; or the folder has the state of an Accelerator without Weft.
        """
        self.training_state.finish()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]), default=""))
        if input_dir and not self.training_state.is_in(input_dir):
            raise CheckpointError(
                "a checkpoint without the training state of Weft",
                where=input_dir,
                rule=f"WeftAccelerator.save_state writes weights and optimizer states to the folder {STATE_FOLDER}",
                fix="start from weights that were saved by save_pretrained",
            )
        with self._without_models():
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        extra = self.training_state.load(str(input_dir))
        self.step = extra.get("accelerator_step", self.step)

    @contextlib.contextmanager
    def _without_models(self) -> Iterator[None]:
        """Context in which accelerate knows no models and optimizers, whose shards it would save as they are."""
        before = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = before

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on one rank of each host.

        Raises:
            CheckpointError: it has shards of tensors.
        """
        refuse_shards(obj, str(f))
        super().save(obj, f, safe_serialization)

    def free_memory(self, *objects: Any) -> Any:
        """Forget all prepared objects, after their checkpoints are written."""
        self.training_state.forget()
        self._cores.clear()
        return super().free_memory(*objects)

    @collective_call
    def wait_for_everyone(self) -> None:
        """Wait for all ranks. Collective."""
        super().wait_for_everyone()

    def end_training(self) -> None:
        """Wait until all checkpoints are written, and end the trackers.

        The ranks stay connected, as what a script does then (save, push, evaluate) may need all of them.
        """
        if self.newest is None:  # `weft run` takes part in the calls of rank 0 until the end of the script
            self.main_process_calls.end()
        self.training_state.finish()
        for tracker in self.trackers:
            tracker.finish()

    # Results

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Full weights of a prepared model by name, in host memory of rank 0; empty on the other ranks. Collective."""
        if (core := self._cores.get(model)) is None:
            return super().get_state_dict(model, unwrap)
        index = list(self._cores).index(model)
        with self.main_process_calls.collective("get_state_dict", index, key=index):
            free_gathered_weights(core)
            weights = gather_weights(core)
        if core is model or not weights:
            return weights
        prefix = next(name for name, module in model.named_modules() if module is core)
        return {f"{prefix}.{name}": weight for name, weight in weights.items()}
