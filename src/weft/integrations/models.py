"""Models of a user's script: the plan with the dtype that the script asks for, and the model that it parallelizes."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.checkpoint.huggingface import with_state
from weft.compat import begin_fsdp
from weft.errors import CheckpointError, JobError, ModelError, PlanError, raise_if_refused
from weft.integrations.full_outputs import ReadOutputs
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.model_checks import reason_against_views
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Plan
from weft.precision.dtypes import DTYPES, dtype_of_forward
from weft.training.prepare import set_update_dtype

OTHER_RUNTIMES = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"),
    "parallelism_config",
)
"""Arguments of `accelerate.Accelerator` that ask for another runtime than the plan."""


def core_of(model: Any) -> Any:
    """Module that is parallelized: the model of a script itself, or the base of a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_other_runtimes(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of an Accelerator that ask for another runtime.

    Raises:
        JobError: names the first one.
    """
    asked = [name for name in OTHER_RUNTIMES if arguments.get(name) is not None]
    if asked:
        raise JobError(
            f"{asked[0]} in the Accelerator of a script that runs under Weft",
            where="Accelerator",
            rule="the plan of Weft decides about parallelism",
            fix=f"leave {asked[0]} out, and set the parallelism in [parallel] of the plan",
        )


def refuse_trained_parts(model: nn.Module, core: nn.Module) -> None:
    """Refuse trained parameters of a wrapper outside of the model that is parallelized, such as the prompts of PEFT.

    Raises:
        ModelError: names the first one.
    """
    inside = {id(parameter) for parameter in core.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise ModelError(
                f"the trained parameter {name} outside of the {type(core).__name__}",
                where="accelerator.prepare",
                rule="a plan reduces gradients of the parameters inside of a model of Transformers",
                fix="use an adapter inside of the model, such as LoRA, instead of trained prompts or prefixes",
            )


def refuse_shards(values: Any, where: str) -> None:
    """Refuse to save a dictionary with shards, as `state_dict()` of a parallelized model has them.

    Raises:
        CheckpointError: names the first one.
    """
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{name} is a shard of this rank",
                where=where,
                rule="a file of weights has full weights",
                fix="save accelerator.get_state_dict(model), which all ranks call; or trainer.save_model()",
            )


def refuse_pipeline(plan: Plan) -> None:
    """Refuse a pipeline under a loop that calls the model for each micro-batch.

    Raises:
        PlanError: the plan has a pipeline.
    """
    if plan.parallel.pp > 1:
        raise PlanError(
            f"accelerator.prepare of a model under plan.parallel.pp = {plan.parallel.pp}",
            where="plan.parallel.pp",
            rule="the schedule of a pipeline runs all micro-batches of a step together, and a loop calls it for each one",
            fix="set plan.parallel.pp = 1; or use transformers.Trainer, or weft.prepare with run.train_batch",
        )


def save_full_weights(model: Any, gather: Callable[[], dict[str, Tensor]]) -> None:
    """Let `model.save_pretrained(...)` of a script write the full weights, if all ranks call it, as they do with DDP.

    Args:
        model: prepared model; its method, if it has one, is replaced on this object.
        gather: returns the full weights on rank 0. Collective.
    """
    if not hasattr(model, "save_pretrained"):
        return

    @wraps(model.save_pretrained)  # a pipeline of diffusers reads its signature
    def save_pretrained(*args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
        weights = gather() if state_dict is None else state_dict
        refuse_shards(weights, "save_pretrained")
        return with_state(model, weights).save_pretrained(*args, **kwargs) if weights else None  # None: another rank

    model.save_pretrained = save_pretrained


class ForwardOwner:
    """Forward hooks of a parallelized model, which hand each forward to the accelerator that has prepared it last."""

    def __init__(self, model: nn.Module):
        """
        Args:
            model: parallelized model.
        """
        self.begin: Callable[[nn.Module, dict[str, Any]], None]
        """Function of the accelerator, called before each forward with the model and its keyword arguments."""
        self.outputs: list[ReadOutputs] = []
        """Hooks on the outputs of the model."""
        self.only_evaluates = False
        """True: no optimizer updates the model, and nothing else frees the weights that its last forward has gathered."""
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._end)

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.begin(model, kwargs)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.only_evaluates:
            free_gathered_weights(model)


def parallelize_for_script(core: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
    """Parallelize a model that has its weights, in place; `num_items_in_batch` keeps the meaning of Transformers.

    Recompute that the script has switched on stays on, unless the plan recomputes.
    """
    if plan.memory.recompute and any(getattr(module, "gradient_checkpointing", False) for module in core.modules()):
        any_version: Any = core  # the name of the method before Transformers 5.20 is deprecated since
        getattr(any_version, "activation_checkpointing_disable", any_version.gradient_checkpointing_disable)()
    raise_if_refused(reason_against_views(core))  # before it is moved, which makes copies
    nn.Module.to(core, device)
    set_update_dtype(core, DTYPES[plan.precision.update])
    parallelize(core, plan, mesh, library_num_items=True)
    if runtime(core).plan.parallel.zero > 0:
        begin_fsdp(core)
    LeaveInferenceMode(core)


class LeaveInferenceMode:
    """Hooks that run a forward under `torch.no_grad` where a script runs it under `torch.inference_mode`.

    Gathered weights would be inference tensors, which FSDP2 refuses, and which no later forward with gradients could use.
    """

    def __init__(self, model: nn.Module):
        """
        Args:
            model: parallelized model.
        """
        self._contexts: list[ExitStack] = []
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self._contexts.append(ExitStack())
        if torch.is_inference_mode_enabled():
            self._contexts[-1].enter_context(torch.inference_mode(False))
            self._contexts[-1].enter_context(torch.no_grad())

    def _leave(self, *_: Any) -> None:
        self._contexts.pop().close()


def plan_for_script(plan: Plan, mixed_precision: str, model: nn.Module) -> Plan:
    """Plan with the dtypes of a script. A plan that leaves them open takes what the script asks for.

    Args:
        plan: plan of the user.
        mixed_precision: "no", "bf16" or "fp16", from `Accelerator(mixed_precision=...)`, or bf16 and fp16 of TrainingArguments.
        model: model of the script; its dtype counts where the script does not ask for mixed precision.

    Raises:
        PlanError: the script asks for another dtype than the plan, or for one that Weft does not have.
    """
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise PlanError(
            f"the script asks for {mixed_precision}",
            where="mixed_precision",
            rule="forward runs in fp32, bf16 or fp16",
            fix='pass mixed_precision="bf16"',
        )
    precision = plan.precision
    if precision.param_dtype == "auto":
        chosen = dtype_of_forward(precision, model) if mixed_precision == "no" else mixed_precision
        precision = precision.model_copy(update={"param_dtype": chosen})
        if mixed_precision == "fp16" and precision.loss_scale == "none":
            precision = precision.model_copy(update={"loss_scale": "dynamic"})  # as the script's GradScaler
    elif mixed_precision not in ("no", precision.param_dtype):
        raise PlanError(
            f"the script asks for {mixed_precision}, and the plan for {precision.param_dtype}",
            where="plan.precision.param_dtype",
            rule="forward has one dtype",
            fix=f'set plan.precision.param_dtype = "auto", which takes {mixed_precision} from the script, or remove the flag '
            "from the script",
        )
    return plan.model_copy(update={"precision": precision})


def requested_precision(arguments: Mapping[str, Any]) -> str:
    """Dtype that the arguments of an Accelerator ask for: "no", "bf16" or "fp16"."""
    return str(arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
