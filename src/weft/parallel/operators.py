"""Operators of a model in words: the implementation of each, and the reason where it is the model's own code."""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.compute.compile import compile_blocks
from weft.compute.kernels import replace_forwards
from weft.compute.variants import Variant, find_experts
from weft.parallel.choices import Choices
from weft.parallel.experts.path import ExpertPath
from weft.parallel.loss.head_loss import find_transform
from weft.parallel.pipeline.weight_gradients import deferred_linear
from weft.parallel.precision.fp8_layers import find_fp8_layers, fp8_experts_forward
from weft.parallel.sequence.varlen import kernel_of, reason_against

if TYPE_CHECKING:
    from weft.parallel.build import Build


LIBRARY_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
"""Implementation of Transformers by the name in `plan.compute.attention`."""


class OperatorChoice(NamedTuple):
    """Implementation of an operator."""

    operator: str
    implementation: str
    detail: str
    """Variant or number of modules; the reason where the model's own code runs."""


def explain_operators(model: Any, choices: Choices, device_type: str) -> list[OperatorChoice]:
    """Operators of a model under a plan, for the log.

    Args:
        model: full model of the choices, which is not changed.
        choices: choices for a model whose roles are known.
        device_type: "cpu", "cuda" or "npu".

    Raises:
        PlanError: no matmul of the model can be in FP8, as the plan asks for.
    """
    plan = choices.plan
    rows = [_attention(model, choices, device_type), _attention_kernel(choices, device_type), _loss(model, choices)]
    for row in choices.kernels:
        if row.op == "adamw":
            detail = row.reason or "clipping, loss scale, moments and weights of Adam and AdamW in one pass"
            rows.append(OperatorChoice(row.op, row.implementation, detail))
            continue
        if plan.compute.compile == "blocks" and getattr(plan.compute.kernels, row.op) == "auto":
            rows.append(OperatorChoice(row.op, "compiled", "with the operators beside it, by torch.compile"))
            continue
        count = f"{len(row.modules)} module{'s' * (len(row.modules) != 1)}"
        rows.append(OperatorChoice(row.op, row.implementation, f"{count}, {row.variant or row.reason}"))
    if plan.precision.matmul != "forward":
        rows += _fp8_matmuls(model, choices)
    return rows


def _fp8_matmuls(model: Any, choices: Choices) -> list[OperatorChoice]:
    """Choices for the matmuls of linear layers and of experts; for experts by the reason why they are not in FP8."""
    plan, reasons = choices.plan, choices.fp8_experts
    emulated = " (in float32 on devices without FP8)" if plan.precision.emulate_fp8 else ""
    layers = find_fp8_layers(model, choices.anatomy, plan, has_fp8_experts=not all(reasons.values()))
    rows = [OperatorChoice("matmul", plan.precision.matmul, f"{len(layers)} linear layers of blocks{emulated}")]
    for reason, count in Counter(reasons.values()).items():
        name = "in param_dtype" if reason else f"{plan.precision.matmul} by row"
        modules = f"{count} module{'s' * (count != 1)}"
        rows.append(OperatorChoice("matmul of experts", name, f"{modules}{f', {reason}' if reason else emulated}"))
    return rows


def _attention(model: Any, choices: Choices, device_type: str) -> OperatorChoice:
    plan = choices.plan
    if choices.attention != "library":
        why = "packed rows without masks"
        if choices.attention == "context":
            why = "context parallelism" if plan.parallel.cp > 1 else "attention dropout of every layout alike"
        kernel, reason = kernel_of(model, plan, device_type)
        detail = f"document by document, for {why}{f'; by {kernel.name}: {reason}' if reason else ''}"
        return OperatorChoice("attention", f"varlen ({kernel.name})", detail)
    asked, own = plan.compute.attention, model.config._attn_implementation
    reason = "the plan asks for it"
    if asked == "auto":
        reason = reason_against(model, choices.anatomy, plan) or f"no faster operator for {device_type} in this dtype"
    return OperatorChoice("attention", own if asked == "auto" else asked, reason)


def _attention_kernel(choices: Choices, device_type: str) -> OperatorChoice:
    """Kernel by its name in the plan; a measured one is only known at the start of a run."""
    name = choices.plan.compute.kernels.attention
    if name != "auto":
        return OperatorChoice("attention kernel", name, "the plan asks for it")
    if device_type == "cuda":
        why = "of SDPA and of the flash operator: the fastest at the shapes of a run, timed at its start"
        return OperatorChoice("attention kernel", "measured", why)
    why = f"timed at the start of a run on cuda; on {device_type} torch has nothing to choose"
    return OperatorChoice("attention kernel", "reference", why)


def _loss(model: Any, choices: Choices) -> OperatorChoice:
    name, transform = "linear_cross_entropy", choices.transform
    if transform is not None:
        scale = f", scale {transform.scale:g}" if transform.scale != 1 else ""
        softcap = f", softcap {transform.softcap:g}" if transform.softcap is not None else ""
        return OperatorChoice(name, "chunked", f"inside of the head, without logits{scale}{softcap}")
    if choices.plan.compute.kernel(name) == "reference":
        return OperatorChoice(name, "reference", "the plan asks for it")
    reason = "ranks of cp have whole rows" if choices.head_stacks else ""
    return OperatorChoice(name, "reference", reason or find_transform(model, choices.anatomy, choices.plan)[1])


def replace_operators(build: "Build") -> None:
    """Step of `parallelize`: fused operators, which later steps wrap, in place of the forwards of classes."""
    build.begin("replace_operators", "cut_stages")
    model, plan, choices = build.model, build.plan, build.choices
    if choices.anatomy.has_roles and plan.compute.attention in LIBRARY_ATTENTION:
        model.set_attn_implementation(LIBRARY_ATTENTION[plan.compute.attention])
    replace_forwards(model, choices.kernels)
    build.runtime.experts = {
        name: ExpertPath(model.get_submodule(name)) for block in build.anatomy.blocks for name in block.experts
    }
    for name, path in build.runtime.experts.items():
        if choices.fp8_experts.get(name) == "":
            path.compute = fp8_experts_forward
        if build.queue is not None and isinstance(find_experts(path.experts, model.config), Variant):
            linear = deferred_linear(build.queue)
            path.linear = lambda _, linear=linear: linear


def compile_regions(build: "Build") -> None:
    """Step of `parallelize`: torch.compile of blocks, with all that computes inside of them, and without their recompute."""
    build.begin("compile_regions", "replace_operators", "split_tensors", "attend_by_documents", "round_layers")
    if build.plan.compute.compile == "blocks":
        names = (block.name for block in build.anatomy.all_blocks)
        build.runtime.compiled = compile_blocks(build.model, names)
