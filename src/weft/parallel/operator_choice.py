"""Choice of the operators of a model: the implementation of each, and the reason where it is the model's own code."""

from collections import Counter
from typing import Any, NamedTuple

from weft.anatomy.roles import Anatomy
from weft.compute.kernels import OPERATORS, apply_kernels
from weft.device.device import Device
from weft.parallel.fp8_layers import apply_fp8, apply_fp8_experts
from weft.parallel.linear_loss import choose_linear_loss, find_transform
from weft.parallel.sequence_sharding import uses_context_attention
from weft.parallel.varlen import kernel_of, reason_against, uses_varlen
from weft.plan import ResolvedPlan


class OperatorChoice(NamedTuple):
    """Implementation of an operator."""

    operator: str
    implementation: str
    detail: str
    """Variant or number of modules; the reason where the model's own code runs."""


def choose_operators(
    model: Any, anatomy: Anatomy, plan: ResolvedPlan, device_type: str, device: Device | None = None
) -> list[OperatorChoice]:
    """Choices of a plan for a model on a type of device, as `parallelize` makes them.

    Args:
        model: full model on the meta device; its forwards are replaced, so that it cannot be used afterwards.
        anatomy: its roles.
        plan: plan.
        device_type: "cpu", "cuda" or "npu".
        device: device that computes, which may lack some matmuls; None for one that has all of its type.

    Raises:
        PlanError: an implementation that the plan names does not apply.
    """
    rows = [_attention(model, anatomy, plan, device_type), _loss(model, anatomy, plan)]
    chosen = {operator: plan.compute.kernel(operator) for operator in OPERATORS}
    for row in apply_kernels(model, anatomy, chosen, device_type):
        if row.op == "adamw":
            detail = row.reason or "clipping, loss scale, moments and weights of Adam and AdamW in one pass"
            rows.append(OperatorChoice(row.op, row.implementation, detail))
            continue
        if plan.compute.compile == "blocks" and getattr(plan.compute.kernels, row.op) == "auto":
            rows.append(OperatorChoice(row.op, "compiled", "with the operators beside it, by torch.compile"))
            continue
        count = f"{len(row.modules)} module{'s' * (len(row.modules) != 1)}"
        rows.append(OperatorChoice(row.op, row.implementation, f"{count}, {row.variant or row.reason}"))
    if plan.precision.matmul != "forward":  # after the kernels, as in `parallelize`
        rows += _fp8_matmuls(model, anatomy, plan, device)
    return rows


def _fp8_matmuls(model: Any, anatomy: Anatomy, plan: ResolvedPlan, device: Device | None) -> list[OperatorChoice]:
    """Choices for the matmuls of linear layers and of experts; for experts by the reason why they are not in FP8."""
    emulated = " (in float32 on devices without FP8)" if plan.precision.emulate_fp8 else ""
    reasons = apply_fp8_experts(model, anatomy, plan, device)
    layers = apply_fp8(model, anatomy, plan, has_fp8_experts=not all(reasons.values()))
    rows = [OperatorChoice("matmul", plan.precision.matmul, f"{len(layers)} linear layers of blocks{emulated}")]
    for reason, count in Counter(reasons.values()).items():
        name = "in param_dtype" if reason else f"{plan.precision.matmul} by row"
        modules = f"{count} module{'s' * (count != 1)}"
        rows.append(OperatorChoice("matmul of experts", name, f"{modules}{f', {reason}' if reason else emulated}"))
    return rows


def _attention(model: Any, anatomy: Anatomy, plan: ResolvedPlan, device_type: str) -> OperatorChoice:
    why = ""
    if uses_context_attention(model, anatomy, plan):
        why = "context parallelism" if plan.parallel.cp > 1 else "attention dropout of every layout alike"
    elif uses_varlen(model, anatomy, plan, device_type):
        why = "packed rows without masks"
    if why:
        kernel, reason = kernel_of(model, plan, device_type)
        detail = f"document by document, for {why}{f'; by {kernel.name}: {reason}' if reason else ''}"
        return OperatorChoice("attention", f"varlen ({kernel.name})", detail)
    asked, own = plan.compute.attention, model.config._attn_implementation
    reason = "the plan asks for it"
    if asked == "auto":
        reason = reason_against(model, anatomy, plan) or f"no faster operator for {device_type} in this dtype"
    return OperatorChoice("attention", own if asked == "auto" else asked, reason)


def _loss(model: Any, anatomy: Anatomy, plan: ResolvedPlan) -> OperatorChoice:
    name = "linear_cross_entropy"
    transform = choose_linear_loss(model, anatomy, plan)
    if transform is not None:
        scale = f", scale {transform.scale:g}" if transform.scale != 1 else ""
        softcap = f", softcap {transform.softcap:g}" if transform.softcap is not None else ""
        return OperatorChoice(name, "chunked", f"inside of the head, without logits{scale}{softcap}")
    if plan.compute.kernel(name) == "reference":
        return OperatorChoice(name, "reference", "the plan asks for it")
    return OperatorChoice(name, "reference", find_transform(model, anatomy, plan)[1])
