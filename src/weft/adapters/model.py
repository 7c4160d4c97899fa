"""Models with the adapters of PEFT: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024) and QLoRA (Dettmers et al., 2023).

PEFT replaces a linear layer W by a wrapper that computes W x + (alpha / r) B A x. W is frozen, A and B are trained. DoRA
also trains the norm of each row of W. All arithmetic is PEFT's own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.errors import JobError, Refusal, nearest, raise_if_refused
from weft.job import Adapter, Job, packs_base
from weft.memory.nf4 import BLOCK, packed
from weft.own_code import import_extra
from weft.parallel.experts.adapters import WRAPPER

ALL_LINEAR = "all-linear"
NAME = "default"
"""Name of the adapter in PEFT, which allows several."""


def build_model(job: Job, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a job on the meta device, with the adapters of the job.

    Raises:
        ModelError: the model cannot be built.
        JobError: see `add_adapters`.
    """
    config = read_config(job.model, job.task.kind, job.task.classes, in_4_bits=packs_base(job))
    model = build_on_meta(config, dtype, job.task.kind)
    add_adapters(model, job.adapter)
    return model


def add_adapters(model: Any, adapter: Adapter, seed: int | None = None) -> None:
    """Add the adapters of a job to a model, in place, and freeze all other weights. Nothing to do for kind = "none".

    Args:
        model: unmodified model. On the meta device the adapters are on the meta device too.
        adapter: table of the job.
        seed: the adapters are equal to those of `peft.get_peft_model` after torch.manual_seed(seed); None: any random state.

    Raises:
        JobError: peft is not installed, a target is no linear layer of a block, or the model has no linear layers.
    """
    if adapter.kind == "none":
        return
    peft = import_peft()
    raise_if_refused(_reason_against_targets(model, adapter))
    if seed is not None:
        torch.manual_seed(seed)
    layers = [name for name in _linear_layers(model) if is_target(name, adapter)]
    on_meta = next(model.parameters()).is_meta
    try:
        peft.inject_adapter_in_model(peft_config(adapter), model, NAME, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise _refused_by_peft(str(error)) from None
    _check_conversion(model, adapter, layers)


def round_targets(model: PreTrainedModel, adapter: Adapter) -> None:
    """Round the weights of linear layers that get an adapter to 4 bits, in place; to pack them later changes no value."""
    for name in (name for name in _linear_layers(model) if is_target(name, adapter)):
        weight: Any = model.get_submodule(name).weight
        if weight.shape[-1] % BLOCK == 0:
            weight.data.copy_(packed(weight.data, weight.dtype).unpack())


def _check_conversion(model: nn.Module, adapter: Adapter, layers: list[str]) -> None:
    """Refuse adapters elsewhere than the targets say: PEFT takes names of the layers of experts before Transformers 5, such as
    w1 or gate_proj, for the weights of all experts.

    Args:
        model: model with adapters.
        adapter: table of the job.
        layers: linear layers that the targets name.
    """
    for name in layers:
        if not hasattr(model.get_submodule(name), "lora_A"):
            raise _refused_by_peft(f"PEFT gives {name} no adapter, because it takes its name for that of experts")
    named = {target.rpartition(".")[2] for target in _expert_targets(adapter)}
    for name, module in model.named_modules():
        if type(module).__name__ == WRAPPER:
            wrapper: Any = module
            if wrapper.parameter_name not in named or wrapper.r[NAME] != adapter.r:
                raise _refused_by_peft(f"{name} holds the weights of all its experts in one tensor")


def _refused_by_peft(problem: str) -> JobError:
    return JobError(
        problem,
        where="adapter.targets",
        rule="adapters are around linear layers, and around weights of experts as they are named in the model",
        fix='name the layers without experts, for example adapter.targets = ["q_proj", "k_proj", "v_proj", "o_proj"]',
    )


def peft_config(adapter: Adapter) -> Any:
    """Configuration of PEFT, a new `LoraConfig`, for the adapters of a job."""
    return import_peft().LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        target_modules=ALL_LINEAR if adapter.targets == ALL_LINEAR else _linear_targets(adapter),
        target_parameters=_expert_targets(adapter) or None,
        lora_dropout=adapter.dropout,
        use_dora=adapter.kind == "dora",
        task_type="CAUSAL_LM",
    )


def import_peft() -> Any:
    """Module peft.

    Raises:
        JobError: it is not installed.
    """
    return import_extra("peft", "hf", "adapter.kind", "adapters are those of PEFT")


def _reason_against_targets(model: PreTrainedModel, adapter: Adapter) -> Refusal | None:
    """Reason against targets that are neither linear layers of the model's blocks nor weights of its experts.

    Args:
        model: model without adapters.
        adapter: table of the job.
    """
    linear = _linear_layers(model)
    if not linear:
        return Refusal(
            f"adapter.kind = {adapter.kind} for a {model.config.model_type} model without linear layers in its blocks",
            where="adapter.kind",
            rule="adapters are around linear layers",
            fix='set adapter.kind = "none"',
            error=JobError,
        )
    if adapter.targets == ALL_LINEAR:
        return None
    if refusal := _reason_against_expert_targets(model, adapter):
        return refusal
    for target in _linear_targets(adapter):
        found = [(name, module) for name, module in model.named_modules() if _matches(name, target)]
        fused = _fused_experts(model, target)
        wrong = next((name for name, _ in found if name not in linear), None)
        if found and wrong is None:
            continue
        what = f"the target {target!r} matches no module of the model"
        rule, fix = "a target is the end of the name of a linear layer in a block", nearest(target, _last_names(linear))
        if fused:
            what = f"the target {target!r} is the weight of all experts of a layer, {fused}"
            rule = "weights of experts are named with the module in front, and linear layers by their names alone"
            fix = f"write {'.'.join(fused.split('.')[-2:])!r}; linear layers are {', '.join(_last_names(linear))}"
        elif wrong is not None:
            what = f"the target {target!r} matches {wrong}, which is no linear layer of a block"
        return Refusal(what, where="adapter.targets", rule=rule, fix=fix, error=JobError)
    return None


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of the blocks of a model without adapters."""
    blocks = tuple(f"{block.name}." for block in read_anatomy(model).blocks)
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear | Conv1D) and name.startswith(blocks)]


def _reason_against_expert_targets(model: PreTrainedModel, adapter: Adapter) -> Refusal | None:
    """Reason against targets that are no weights of experts, or adapters that PEFT does not have for them."""
    for target in _expert_targets(adapter):
        if _fused_experts(model, target) is None:
            ends = {".".join(name.split(".")[-2:]) for name, p in model.named_parameters() if p.ndim == 3}
            stacked = sorted(end for end in ends if end.startswith("experts."))
            return Refusal(
                f"the target {target!r} matches no weight of experts of the model",
                where="adapter.targets",
                rule="experts.NAME is a weight of all experts of a layer, [experts, rows, columns]",
                fix=f"name one of {', '.join(stacked)}" if stacked else "remove it: the model has no such weight",
                error=JobError,
            )
        for key, is_set, allowed in (
            ("kind", adapter.kind == "dora", "lora"),
            ("dropout", adapter.dropout > 0, 0.0),
        ):
            if is_set:
                return Refusal(
                    f"adapter.{key} = {getattr(adapter, key)!r} with the target {target!r}",
                    where=f"adapter.{key}",
                    rule="adapters on weights of experts are those of LoRA without dropout, in PEFT as well",
                    fix=f"set adapter.{key} = {allowed!r}, or remove the target",
                    error=JobError,
                )
    return None


def is_target(name: str, adapter: Adapter) -> bool:
    """True if a linear layer of a block gets an adapter.

    Args:
        name: full name of the layer.
        adapter: table of the job.
    """
    return adapter.targets == ALL_LINEAR or any(_matches(name, target) for target in _targets(adapter))


def _targets(adapter: Adapter) -> list[str]:
    return [adapter.targets] if isinstance(adapter.targets, str) else list(adapter.targets)


def _expert_targets(adapter: Adapter) -> list[str]:
    """Targets that are weights of experts, which PEFT calls `target_parameters`."""
    return [target for target in _targets(adapter) if target.split(".")[-2:-1] == ["experts"]]


def _linear_targets(adapter: Adapter) -> list[str]:
    return [target for target in _targets(adapter) if target not in _expert_targets(adapter)]


def _matches(name: str, target: str) -> bool:
    """True if PEFT finds a module by an entry of its list `target_modules`."""
    return name == target or name.endswith(f".{target}")


def _last_names(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _fused_experts(model: nn.Module, target: str) -> str | None:
    """Parameter with the weights of several experts that a target names."""
    return next((name for name, p in model.named_parameters() if p.ndim == 3 and _matches(name, target)), None)
