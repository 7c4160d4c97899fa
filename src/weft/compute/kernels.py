"""The table of fused operators, their implementations, and the modules of a model that they replace.

An operator of the optimizer (`adamw.py`) replaces no module: the plan chooses its implementation, and
`weft.optimizers.one_pass` uses it.

Families compute the same operator with small differences: eps, a weight stored minus one, the order of casts. The variant of a
module is found by running its own forward on small random inputs, in float32, bfloat16 and float16, and comparing outputs
and gradients with each variant of the operator. A module that agrees with none keeps its own code.

Two operators are not in the table. LayerNorm is one kernel of torch already. RoPE cannot be replaced on an instance: the
forward of an attention calls a function of its file, which neither a hook nor an attribute reaches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from weft.anatomy.roles import Anatomy
from weft.compute.jit import has_triton
from weft.compute.variants import Variant, find_experts, find_gated_mlp, find_norm, in_16_bits, projections
from weft.errors import PlanError, nearest


@dataclass(frozen=True)
class Operator:
    """Fused operator, and what can compute it."""

    refusal: Mapping[str, Callable[[str], str]]
    """By implementation: the reason why it does not run on a device type; "" if it does."""


@dataclass(frozen=True)
class ForwardOperator(Operator):
    """Operator of the forward of a model: where it occurs."""

    modules: Callable[[nn.Module, Anatomy], dict[str, nn.Module]]
    """Modules that may contain the operator, by name."""
    find_variant: Callable[[nn.Module, Any], "Variant | str"]
    """Variant of a module, or the reason why there is none; called with the module and the configuration of the model."""


@dataclass(frozen=True)
class KernelRow:
    """Choice for the modules that share a variant, or the reason for none."""

    op: str
    modules: tuple[str, ...]
    implementation: str
    """Name of the implementation; "reference" is the model's own code, or torch's optimizer."""
    variant: str
    """Variant of the operator; "" where the model's own code runs."""
    reason: str
    """Reason for the reference; "" where an operator replaces it."""
    forwards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Forward of the variant, called with the module, by name of a module; empty for the reference."""


def choose_kernels(
    model: nn.Module, anatomy: Anatomy, chosen: str | Mapping[str, str], device_type: str
) -> list[KernelRow]:
    """Choose fused operators for the norms, gated MLPs and experts of a model, which is not changed.

    Args:
        model: full model on any device, including meta, before anything has replaced its forwards.
        chosen: "auto" for the fastest implementation of each operator that the device and the modules allow, "reference" for
            the model's own code, or implementations by operator; operators that a table leaves out are "auto".
        device_type: type of the devices that run the model.

    Returns:
        The choices, for `replace_forwards` and for the log.

    Raises:
        PlanError: an operator or an implementation does not exist, or one that is asked for by name does not apply.
    """
    names = resolve_kernels(chosen, device_type)
    rows = []
    for op, name in names.items():
        operator = OPERATORS[op]
        reasons = {known: refusal(device_type) for known, refusal in operator.refusal.items()}
        if name == "auto":
            name = next((known for known, reason in reasons.items() if not reason), "reference")
            reason = "; ".join(reasons.values())
        else:
            reason = "the plan asks for it"
        modules = operator.modules(model, anatomy) if isinstance(operator, ForwardOperator) else {}
        if name == "reference" or not isinstance(operator, ForwardOperator):
            rows.append(KernelRow(op, tuple(modules), name, "", reason if name == "reference" else ""))
            continue
        found = find_kernels(model, anatomy, op, name)
        if names[op] not in ("auto", "reference") and all(row.reason for row in found):
            raise PlanError(
                f"{op} = {name!r} for {anatomy.family}",
                where=f"plan.compute.kernels.{op}",
                rule="; ".join(sorted({row.reason for row in found})) or "the model has no such module",
                fix=f"leave plan.compute.kernels.{op} out, or set it to 'reference'",
            )
        rows += found
    return rows


def find_kernels(model: nn.Module, anatomy: Anatomy, op: str, implementation: str) -> list[KernelRow]:
    """Modules of a model that agree with a variant of an operator, and the others with the reason why they do not."""
    operator, variants = OPERATORS[op], dict[Any, Variant | str]()
    assert isinstance(operator, ForwardOperator)
    groups: dict[tuple[str, str, str], list[str]] = {}
    forwards: dict[str, Callable[..., Any]] = {}
    for name, module in operator.modules(model, anatomy).items():
        if "forward" in vars(module):
            variant: Variant | str = "another technique or library replaced its forward"
        else:
            kind = _signature(module)
            if kind not in variants:
                found = operator.find_variant(module, getattr(model, "config", None))
                if implementation == "grouped" and isinstance(found, Variant):
                    found = in_16_bits(found)
                variants[kind] = found
            variant = variants[kind]
        if isinstance(variant, Variant):
            key = implementation, variant.label, ""
            forwards[name] = variant.forward
        else:
            key = "reference", "", f"{type(module).__name__}: {variant}"
        groups.setdefault(key, []).append(name)
    return [
        KernelRow(op, tuple(names), *key, {name: forwards[name] for name in names if name in forwards})
        for key, names in groups.items()
    ]


def replace_forwards(model: nn.Module, rows: Iterable[KernelRow]) -> None:
    """Replace the forwards of the chosen modules that a model has, in place; the tensors' device decides what runs."""
    modules: dict[str, Any] = dict(model.named_modules())
    for row in rows:
        for name, forward in row.forwards.items():
            if name in modules:  # else it belongs to another stage of a pipeline
                modules[name].forward = partial(forward, modules[name])


def resolve_kernels(chosen: str | Mapping[str, str], device_type: str) -> dict[str, str]:
    """Implementation of each operator as the plan names it, checked without a model; arguments as for `choose_kernels`.

    Raises:
        PlanError: an operator or an implementation does not exist, or does not run on the device type.
    """
    where = "plan.compute.kernels"
    if isinstance(chosen, str):
        if chosen not in ("auto", "reference"):
            raise PlanError(
                f"kernels = {chosen!r}",
                where=where,
                rule='"auto", "reference" or a table of implementations by operator',
                fix=nearest(chosen, ("auto", "reference")),
            )
        return dict.fromkeys(OPERATORS, chosen)
    for op, name in chosen.items():
        if op not in OPERATORS:
            rule = f"the operators are {', '.join(OPERATORS)}"
            raise PlanError(f"the operator {op!r}", where=where, rule=rule, fix=nearest(op, OPERATORS))
        known = ("auto", "reference", *OPERATORS[op].refusal)
        if name not in known:
            rule = f"the implementations are {', '.join(known)}"
            raise PlanError(f"{op} = {name!r}", where=f"{where}.{op}", rule=rule, fix=nearest(name, known))
        if name in OPERATORS[op].refusal and (reason := OPERATORS[op].refusal[name](device_type)):
            fix = f"leave {where}.{op} out, or set it to 'reference'"
            raise PlanError(f"{op} = {name!r} on {device_type}", where=f"{where}.{op}", rule=reason, fix=fix)
    return {op: chosen.get(op, "auto") for op in OPERATORS}


def _reason_against_triton(device_type: str) -> str:
    if device_type != "cuda":
        return f"the Triton kernels run on cuda, not on {device_type}"
    return "" if has_triton() else "Triton is not installed"


def _reason_against_grouped(device_type: str) -> str:
    return "" if device_type == "cpu" else f"groups of few sizes are for oneDNN on a cpu, not for {device_type}"


# Modules


def _norms(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    names = {name for block in anatomy.blocks for name in block.norms} | {anatomy.final_norm}
    return {name: module for name, module in model.named_modules() if name in names}


def _gated_mlps(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """Modules in the feed-forward parts with a gate and an up projection: dense MLPs and shared experts."""
    tops = {name for block in anatomy.blocks for name in block.mlp}
    below = tuple(f"{name}." for name in tops)
    config = getattr(model, "config", None)
    return {
        name: module
        for name, module in model.named_modules()
        if (name in tops or name.startswith(below)) and projections(module, config)
    }


def _experts(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    names = {name for block in anatomy.blocks for name in block.experts}
    return {name: module for name, module in model.named_modules() if name in names}


def _signature(module: nn.Module) -> Any:
    """Key of modules that compute in the same way: class, settings, shapes, and classes of the children."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters(recurse=False)]
    children = [(name, str(child)) for name, child in module.named_children()]
    return type(module), repr(sorted(settings.items())), repr(shapes), repr(children)


OPERATORS: dict[str, Operator] = {
    "rms_norm": ForwardOperator({"triton": _reason_against_triton}, _norms, find_norm),
    "gated_activation": ForwardOperator({"triton": _reason_against_triton}, _gated_mlps, find_gated_mlp),
    "experts": ForwardOperator(
        {"triton": _reason_against_triton, "grouped": _reason_against_grouped}, _experts, find_experts
    ),
    "adamw": Operator({"triton": _reason_against_triton}),
}
"""Operators with their implementations beside "reference", the model's own code or torch's optimizer; "auto" takes the first
that runs."""
