"""Choices of a plan for a model, made and refused before it is changed; they need neither weights nor ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import kind_of_model, read_any_anatomy
from weft.comm.overlap import reason_against_chunks
from weft.compute.kernels import OPERATORS, KernelRow, choose_kernels
from weft.device.device import Device
from weft.errors import ModelError, Refusal, raise_if_refused
from weft.parallel.experts.capacity import reason_against_capacity
from weft.parallel.experts.checks import reason_against_ep, reason_against_etp
from weft.parallel.experts.late_gradients import find_late
from weft.parallel.loss.head_loss import LogitTransform, choose_linear_loss
from weft.parallel.model_checks import reason_against_layer_drop, reason_without_head
from weft.parallel.pipeline.plan_schedule import splits_backward
from weft.parallel.pipeline.probe import Shapes
from weft.parallel.pipeline.stages import find_stages
from weft.parallel.pipeline.taint import BlockChain
from weft.parallel.precision.fp8_layers import choose_fp8_experts
from weft.parallel.precision.frozen_weights import reason_against_frozen_weights
from weft.parallel.precision.quantized_layers import reason_against_quantization
from weft.parallel.sequence.context_heads import reason_against_stacks
from weft.parallel.sequence.documents import reason_against_masks
from weft.parallel.sequence.dropout import has_attention_dropout
from weft.parallel.sequence.rows import row_multiple, uses_context_attention
from weft.parallel.sequence.stacks import Stacks, head_stacks
from weft.parallel.sequence.varlen import uses_varlen
from weft.parallel.tensor.checks import reason_against_tp, splittable
from weft.plan import ResolvedPlan
from weft.precision.dtypes import check_dtypes, check_row_format


@dataclass(frozen=True)
class Choices:
    """Choices of a plan for a model; made by `choose`, and read by startup, dry runs and ranks alike."""

    plan: ResolvedPlan
    anatomy: Anatomy
    """Anatomy of the full model."""
    chain: BlockChain | None
    shapes: Shapes
    """Chain of blocks, and shapes of what stages exchange; None and () without pipeline parallelism."""
    attention: Literal["library", "documents", "context"]
    """By Transformers; document by document; or for tokens that are split over cp, or that attention dropout identifies."""
    head_stacks: Stacks
    """Stacks of blocks whose heads ranks of cp divide; () where their attention is replaced instead."""
    transform: LogitTransform | None
    """Transform from the outputs of the head to logits; None if the loss is computed from logits."""
    kernels: tuple[KernelRow, ...] = ()
    """Implementation of each fused operator, and the reason for the reference."""
    fp8_experts: Mapping[str, str] = field(default_factory=dict)
    """By name of an experts module: "" if it computes in FP8, or the reason why not; empty without FP8 matmuls."""
    late_experts: frozenset[str] = frozenset()
    """Experts modules whose weight gradients overlap with the all-to-all of the gradients of rows."""

    @property
    def splits_experts(self) -> bool:
        """True if experts have a mesh of their own."""
        p = self.plan.parallel
        return self.anatomy.has_experts and p.ep * p.etp * p.tp > 1

    @property
    def takes_full_rows(self) -> bool:
        """True if callers pass full rows, which hooks of the model shard for tp or cp, and for which they build masks."""
        return (self.plan.parallel.tp > 1 and self.anatomy.is_decoder) or self.attention == "context"

    @property
    def row_multiple(self) -> int:
        """Number of tokens of which the row length of a split model must be a multiple."""
        return row_multiple(self.anatomy, self.plan)

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline schedule runs the gradients of weights apart."""
        return self.plan.parallel.pp > 1 and splits_backward(self.plan)


def choose(
    model: Any,
    plan: ResolvedPlan,
    device_type: str,
    device: Device | None,
    *,
    anatomy: Anatomy | None = None,
    seq_len: int | None = None,
    num_micro_batches: int | None = None,
) -> Choices:
    """Choose what `parallelize` will do to a model, which is not changed, and refuse a plan that it does not support.

    Args:
        model: full model; may be on the meta device.
        plan: plan.
        device_type: type of the devices that run the model.
        device: device that computes, which may lack some matmuls; None: operators are not chosen.
        anatomy: anatomy of the model, if it has been read.
        seq_len: tokens per row, if known.
        num_micro_batches: micro-batches per step, if known.

    Raises:
        PlanError: an axis does not fit the model, ranks would skip other blocks, or an operator that the plan names does not
            apply to the model or the device.
        ModelError: the model's anatomy cannot be read.
    """
    anatomy = anatomy or _read_anatomy(model, plan)
    stacks = head_stacks(model, anatomy, plan.parallel.cp)
    refused = None if anatomy.has_roles else _reason_without_roles(model, anatomy, plan, stacks)
    refused = refused or reason_against_layer_drop(model, plan)
    if plan.memory.parameters_device == "disk" and device_type != "cpu":
        refused = refused or _reason_against_disk(device_type)
    if plan.precision.quantize != "none":
        refused = refused or reason_against_quantization(model, anatomy, plan)
    if plan.precision.frozen_weights == "nf4":
        refused = refused or reason_against_frozen_weights(model, anatomy)
    raise_if_refused(refused)
    if anatomy.has_roles:
        chain, shapes = check_axes(model, anatomy, plan, seq_len, num_micro_batches)
    else:
        chain, shapes = find_stages(model, anatomy, plan, num_micro_batches)
    attention = _choose_attention(model, anatomy, plan, device_type)
    transform = choose_linear_loss(model, anatomy, plan) if anatomy.has_roles and not stacks else None
    found = Choices(plan, anatomy, chain, shapes, attention, stacks, transform)
    return found if device is None else _choose_operators(model, found, device_type, device)


def _reason_against_disk(device_type: str) -> Refusal:
    return Refusal(
        f"plan.memory.parameters_device = 'disk' on {device_type}",
        where="plan.memory.parameters_device",
        rule="weights on disk are mapped into the memory of the host, in which only ranks on CPU compute",
        fix='set plan.memory.parameters_device = "device", and plan.memory.optimizer_device = "host" or "disk"',
    )


def _choose_operators(model: Any, found: Choices, device_type: str, device: Device) -> Choices:
    plan, anatomy = found.plan, found.anatomy
    named = {operator: plan.compute.kernel(operator) for operator in OPERATORS}
    kernels = tuple(choose_kernels(model, anatomy, named, device_type))
    fp8_experts: dict[str, str] = {}
    if plan.precision.matmul != "forward":
        check_dtypes(plan.precision, device)
        fp8_experts = choose_fp8_experts(model, anatomy, plan, device)
    found = replace(found, kernels=kernels, fp8_experts=fp8_experts)
    if not found.splits_experts:
        return found
    check_row_format(plan.comm, device)
    if found.splits_backward or plan.parallel.etp > 1 or plan.precision.quantize != "none":
        return found  # weight gradients are deferred by the pipeline, or come from gathered or rounded weights
    late = find_late(anatomy, kernels)
    return replace(found, late_experts=late - {name for name, reason in fp8_experts.items() if not reason})


def _choose_attention(
    model: Any, anatomy: Anatomy, plan: ResolvedPlan, device_type: str
) -> Literal["library", "documents", "context"]:
    if not anatomy.has_roles:
        return "library"
    if uses_context_attention(model, anatomy, plan):
        return "context"
    return "documents" if uses_varlen(model, anatomy, plan, device_type) else "library"


def _read_anatomy(model: nn.Module, plan: ResolvedPlan) -> Anatomy:
    """Anatomy of a causal language model; that of any module, if the plan needs no roles."""
    known = isinstance(model, PreTrainedModel) and kind_of_model(model.config)
    return read_any_anatomy(model, needs_roles=bool(_needs_roles(plan)) and not known)


def _reason_without_roles(model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan, stacks: Stacks) -> Refusal | None:
    """Reason against a plan that needs roles, for a model without those of a language model.

    Args:
        model: any module.
        anatomy: its anatomy, of `read_blocks`.
        plan: plan.
        stacks: stacks of blocks whose heads ranks of cp divide.
    """
    if refusal := reason_against_stacks(model, anatomy, plan, stacks):
        return refusal
    tp = plan.parallel.tp
    splits_blocks = tp > 1 and bool(splittable(model, anatomy, tp))
    if splits_blocks and plan.parallel.sp and not isinstance(model, PreTrainedModel):
        return Refusal(
            f"sequence parallelism of a {type(model).__name__}",
            where="plan.parallel.sp",
            rule="blocks of Diffusers get features of the time step, whose gradients come from whole sequences",
            fix="set plan.parallel.sp = false",
        )
    applies = ("tp",) * splits_blocks + ("cp",) * bool(stacks) + ("pp",) * isinstance(model, PreTrainedModel)
    if needed := _needs_roles(plan, but=applies):
        return _unknown_roles(needed, model, "a module")
    if not anatomy.blocks and (plan.memory.recompute or plan.memory.offload):
        key = "recompute" if plan.memory.recompute else "offload"
        return Refusal(
            f"plan.memory.{key} for a {type(model).__name__}, which has no blocks",
            where=f"plan.memory.{key}",
            rule="blocks are the members of a list (ModuleList) of modules of one class",
            fix=f"leave plan.memory.{key} out",
            error=ModelError,
        )
    return None


def _unknown_roles(key: str, model: nn.Module, other: str) -> Refusal:
    kind = kind_of_model(model.config) if isinstance(model, PreTrainedModel) else None
    return Refusal(
        f"plan.{key} for {kind or other}: {type(model).__name__}",
        where=f"plan.{key}",
        rule="this key applies to models of Transformers whose parts have known roles; all models take data parallelism, and "
        "recompute and offload of blocks",
        fix=f"leave plan.{key} out; plan.parallel.zero = 0 to 3 works",
        error=ModelError,
    )


def _needs_roles(plan: ResolvedPlan, *, but: tuple[str, ...] = ()) -> str:
    """First key of a plan that asks for the roles of modules, other than the axes `but`; "" without one."""
    memory, precision = plan.memory, plan.precision
    axes = (axis for axis in ("tp", "cp", "pp", "ep") if axis not in but)
    settings = {f"parallel.{axis}": getattr(plan.parallel, axis) > 1 for axis in axes}
    settings |= {f"memory.recompute = {name}": True for name in memory.recompute if name != "block"}
    settings |= {f"memory.offload = {name}": True for name in memory.offload if name != "block"}
    settings |= {"precision.fp32_modules": bool(precision.fp32_modules)}
    settings |= {"precision.backward": precision.backward == "fp16"}
    return next((key for key, is_set in settings.items() if is_set), "")


def check_axes(
    model: PreTrainedModel,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    seq_len: int | None = None,
    num_micro_batches: int | None = None,
) -> tuple[BlockChain | None, Shapes]:
    """Refuse a plan whose parallel axes the model does not support; needs neither weights nor ranks.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
        plan: plan.
        seq_len: tokens per row, if known.
        num_micro_batches: micro-batches per step, if known.

    Returns:
        Result of `find_stages`.

    Raises:
        PlanError: an axis does not fit the model.
    """
    p, stacks = plan.parallel, head_stacks(model, anatomy, plan.parallel.cp)
    refusal = reason_against_stacks(model, anatomy, plan, stacks)
    if p.cp > 1 and not stacks and not anatomy.is_decoder:
        refusal = _unknown_roles("parallel.cp", model, type(model).__name__)
    refusal = refusal or reason_without_head(anatomy, plan, divides_heads=bool(stacks))
    refusal = refusal or reason_against_ep(model, anatomy, p.ep) or reason_against_etp(model, anatomy, p.etp)
    refusal = refusal or reason_against_capacity(model, anatomy, p.expert_capacity)
    if p.tp > 1 and refusal is None:
        drops = anatomy.is_decoder and has_attention_dropout(model)  # computed by Weft for split heads
        refusal = reason_against_tp(model, anatomy, p.tp, p.sp, replicates=p.cp == 1 and not drops)
    refusal = refusal or reason_against_masks(model, anatomy, plan, seq_len)
    if seq_len is not None:
        refusal = refusal or _reason_against_length(seq_len, anatomy, plan)
        if p.tp > 1 and plan.comm.overlap_chunks != "auto":
            rows = seq_len // p.cp // (p.tp if p.sp else 1)
            refusal = refusal or reason_against_chunks(plan.comm.overlap_chunks, rows)
    raise_if_refused(refusal)
    return find_stages(model, anatomy, plan, num_micro_batches)


def _reason_against_length(seq_len: int, anatomy: Anatomy, plan: ResolvedPlan) -> Refusal | None:
    """Reason against a row length that tp and cp do not divide; the fix prefers a longer row: a shorter one may lose tokens."""
    p, multiple = plan.parallel, row_multiple(anatomy, plan)
    if seq_len % multiple == 0:
        return None
    longer = seq_len + -seq_len % multiple
    fits = anatomy.max_positions is None or longer <= anatomy.max_positions
    rest = "" if fits else f", because the model has {anatomy.max_positions} positions and {longer} would exceed them"
    return Refusal(
        f"rows of {seq_len} tokens cannot be divided by tp = {p.tp} and cp = {p.cp}",
        where="data.seq_len",
        rule=f"all tp and cp ranks hold the same number of tokens of a row: its length must be a multiple of {multiple}",
        fix=f"set data.seq_len = {longer if fits else longer - multiple}{rest}",
    )
