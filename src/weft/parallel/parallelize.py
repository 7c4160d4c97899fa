"""The straight line: apply the parallelism of a plan to a model, one technique after the other."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.comm.compression.codecs import build_feedback
from weft.comm.lanes import Lanes
from weft.comm.objects import all_gather_json
from weft.compute.compile import compile_blocks
from weft.compute.kernels import OPERATORS, apply_kernels
from weft.device.detect import detect
from weft.memory.offload import build_offload
from weft.memory.recompute import apply_recompute, patch_library_recompute, recomputed_experts
from weft.memory.weights import split_weights
from weft.own_code import load_function
from weft.parallel.attention_plan import AttentionPlans
from weft.parallel.axis_checks import check_model
from weft.parallel.context_heads import apply_head_context, find_stacks
from weft.parallel.ddp import apply_ddp
from weft.parallel.dropout import replace_dropout, share_generator
from weft.parallel.expert_adapters import apply_expert_adapters
from weft.parallel.expert_capacity import limit_capacity
from weft.parallel.expert_layers import apply_ep
from weft.parallel.expert_relocation import Relocation
from weft.parallel.fp8_gather import gather_in_fp8
from weft.parallel.fp8_layers import apply_fp8, apply_fp8_experts
from weft.parallel.fsdp import apply_fsdp, keeps_frozen_weights, prefetch_backward, prefetch_forward
from weft.parallel.fsdp_timing import time_fsdp
from weft.parallel.labels import average_loss_over_targets
from weft.parallel.lane_registers import FsdpRegisters, weights_registers
from weft.parallel.late_gradients import find_late
from weft.parallel.linear_loss import choose_linear_loss, forwards_of, install_linear_loss
from weft.parallel.moe_aux_loss import RouterStats
from weft.parallel.outside_calls import gather_outside_of_blocks, refuse_parts_alone
from weft.parallel.parameter_hooks import check_hooks, hooked_parameters, keep_hooks
from weft.parallel.pipeline.partition import install_stage_switch
from weft.parallel.pipeline.plan_schedule import runs_jointly, splits_backward
from weft.parallel.pipeline.runtime import PipelineRuntime
from weft.parallel.pipeline.stages import cut_for_rank
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue, defer_expert_gradients, defer_weight_gradients
from weft.parallel.quantized_layers import apply_quantization, quantize_experts
from weft.parallel.recompute_context import Recomputes, capture_context, capture_held_context
from weft.parallel.recurrent_context import apply_recurrent_context
from weft.parallel.replicas import SharedBuffers, share_weights
from weft.parallel.runtime import Runtime
from weft.parallel.sequence_sharding import apply_cp, row_multiple, shard_inputs, uses_context_attention
from weft.parallel.shared_experts import overlap_shared_experts
from weft.parallel.tensor import apply_tp
from weft.parallel.unit_calls import SHARING_AXES, UnitCalls, UnusedWeights
from weft.parallel.varlen import install_varlen, uses_varlen
from weft.parallel.weights import PackedLayout
from weft.plan import Plan, ResolvedPlan, resolve_plan
from weft.precision.dtypes import check_dtypes, check_row_format
from weft.precision.fp16_backward import begin_fp16_backward_at
from weft.precision.roles import compute_in_float32
from weft.topology.mesh import build_expert_mesh, check_mesh, ranks_along

LIBRARY_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
"""Implementation of Transformers by the name in `plan.compute.attention`."""


def parallelize(model: Any, plan: Plan, mesh: DeviceMesh, *, library_num_items: bool = False) -> Any:
    """Parallelize an unmodified model over the ranks of a mesh according to a plan, in place.

    The model keeps its class, its forward and its parameter names. Its parameters are sharded, so create the optimizer from
    `model.parameters()` after this call. Gradients are means over the data ranks, as with DistributedDataParallel. The loss of
    `labels` is the mean over the targets of all ranks, and so are its gradients (`labels.py`). With pipeline parallelism a rank
    keeps only the blocks of its own stages, and `weft.training.step` runs the model.

    Args:
        model: model with its weights, of which those of rank 0 count, or on the meta device (see `weft.materialize`): a causal
            language model of Transformers; or any other module, to which data parallelism, recompute and offload of blocks
            apply, and to other models of Transformers and Diffusers also the axes of the table in docs/own-loop.md.
        plan: parallelism, precision and memory options.
        mesh: device mesh from `weft.build_mesh(plan, ...)`.
        library_num_items: True: a loss with `num_items_in_batch` is the loss sum of this data rank alone, divided by it, as in
            Transformers, whose Trainer multiplies it by the number of data ranks. False: it is the sum over all data ranks.

    Returns:
        The same model; `weft.runtime(model)` holds the state of the techniques that were applied.

    Raises:
        PlanError: the plan does not fit the number of ranks, or the mesh is not the mesh of the plan.
        ModelError: the model's anatomy cannot be read, or the ranks have different models.
        JobError: a function of `plan.techniques` does not exist.
    """
    plan = resolve_plan(plan, mesh.size(), native_bf16=_native_bf16(plan))
    check_mesh(plan, mesh)
    full_anatomy, chain, shapes = check_model(model, plan)
    if mesh.size() > 1 and dist.get_backend() != "fake":
        share_weights(model)
    anatomy, p, hooked = full_anatomy, plan.parallel, hooked_parameters(model)
    stacks = find_stacks(model, anatomy, plan) if p.cp > 1 else ()
    replaces_attention = anatomy.has_roles and uses_context_attention(model, anatomy, plan)
    runtime = Runtime(plan, mesh, full_anatomy, RouterStats(model, anatomy, mesh))
    by_documents = anatomy.has_roles and set_attention(model, anatomy, plan, mesh.device_type)
    transform = None if not anatomy.has_roles or stacks else choose_linear_loss(model, anatomy, plan)
    if chain is not None:
        anatomy, stage_io = cut_for_rank(model, anatomy, chain, plan, mesh.get_local_rank("pp"))
    chosen = {operator: plan.compute.kernel(operator) for operator in OPERATORS}
    runtime.kernels = tuple(apply_kernels(model, full_anatomy, chosen, mesh.device_type))
    fp8_experts: set[str] = set()
    if plan.precision.matmul != "forward":
        check_dtypes(plan.precision, detect())
        fp8_experts = {name for name, reason in apply_fp8_experts(model, anatomy, plan, detect()).items() if not reason}
    queue = WeightGradientQueue() if p.pp > 1 and splits_backward(plan) else None
    if queue is not None and full_anatomy.has_experts:
        defer_expert_gradients(model, anatomy, queue)
    has_expert_mesh = full_anatomy.has_experts and p.ep * p.etp * p.tp > 1
    expert_mesh = build_expert_mesh(plan, mesh) if has_expert_mesh else None
    lanes = runtime.lanes = Lanes() if runs_jointly(plan) else None
    if p.expert_capacity:
        for name in (name for block in anatomy.blocks for name in block.experts):
            limit_capacity(model.get_submodule(name), p.expert_capacity, p.expert_drop, p.ep > 1)
    if expert_mesh is not None and p.expert_relocate_every:
        runtime.relocation = Relocation(
            model, anatomy, p.expert_relocate_every, mesh, expert_mesh, runtime.router_stats
        )
    if plan.precision.quantize != "none":
        etp_group = expert_mesh.get_group("etp") if expert_mesh is not None and p.etp > 1 else None
        quantize_experts(model, anatomy, plan, etp_group)
    packed: dict[nn.Module, PackedLayout] = {}
    if expert_mesh is not None:
        check_row_format(plan.comm, detect())
        computed_late = queue is None and p.etp == 1 and plan.precision.quantize == "none"
        late = find_late(model, anatomy, plan, runtime.kernels, mesh.device_type) if computed_late else frozenset()
        recomputed, late = recomputed_experts(full_anatomy, plan.memory), late - fp8_experts
        packed = apply_ep(model, anatomy, plan, expert_mesh, lanes, fp8_experts, recomputed, late, runtime.relocation)
    apply_expert_adapters(model, anatomy, expert_mesh)
    if p.tp > 1:
        runtime.tensor_split = apply_tp(model, anatomy, plan, mesh, queue)
    runtime.tensor_split.packed |= packed
    if p.ep > 1:
        early = overlap_shared_experts(model, anatomy)
        if lanes is not None:
            lanes.registers += early
    split_inputs = runtime.tensor_split.split_inputs
    is_decoder = full_anatomy.is_decoder
    if stacks:
        apply_head_context(model, stacks, mesh)
        runtime.loss_copies = p.cp
    if stacks or (p.tp > 1 and not is_decoder):
        share_generator(model, mesh.get_group("cp_ulysses" if stacks else "tp"), mesh.device_type)
    elif is_decoder:
        runtime.dropout = replace_dropout(model, mesh, row_multiple(full_anatomy, plan), split_inputs)
    if replaces_attention:
        runtime.attention_plans = apply_cp(model, anatomy, mesh, plan.comm.ulysses_chunks, runtime.dropout)
        if p.cp > 1:
            apply_recurrent_context(model, anatomy, mesh)
    context_plans = runtime.attention_plans
    if by_documents:  # before `shard_inputs`, which makes masks where there are none
        runtime.attention_plans = AttentionPlans(mesh.device_type)
        runtime.varlen = install_varlen(model, anatomy, runtime.attention_plans)
    runtime.takes_full_rows = (p.tp > 1 and is_decoder) or replaces_attention
    if runtime.takes_full_rows:
        shard_inputs(model, full_anatomy, plan, mesh, context_plans)
    multiple = row_multiple(full_anatomy, plan) if runtime.takes_full_rows else None
    average_loss_over_targets(model, mesh, multiple, library_num_items)
    if queue is not None:
        defer_weight_gradients(model, anatomy, queue, runtime.tensor_split.copied | runtime.tensor_split.chunked)
    if transform is not None and (chain is None or stage_io.has_last()):
        runtime.linear_loss = install_linear_loss(model, anatomy, mesh, transform)
    compute_in_float32(model, full_anatomy, plan.precision.fp32_modules)
    if plan.precision.backward == "fp16":
        begin_fp16_backward_at(model.get_submodule(full_anatomy.head))
    forwards = forwards_of(model, anatomy) if runtime.linear_loss else None
    for index, name in enumerate(plan.techniques):
        load_function(name, f"plan.techniques[{index}]")(model, anatomy, plan, mesh)
    if forwards and forwards_of(model, anatomy) != forwards:  # a technique may change the logits
        runtime.linear_loss = None
    if plan.precision.matmul != "forward":
        fp8_layers = apply_fp8(model, anatomy, plan, has_fp8_experts=bool(fp8_experts))
    if plan.precision.quantize != "none":
        apply_quantization(model, anatomy, plan, mesh)
    if plan.compute.compile == "blocks":
        runtime.compiled = compile_blocks(model, (block.name for block in anatomy.all_blocks))
    recomputes = Recomputes()
    capture = partial(capture_context, runtime.router_stats, runtime.dropout, recomputes)
    if plan.memory.recompute or plan.memory.offload:
        runtime.offload = build_offload(plan.memory, detect())
        own_blocks = set(anatomy.unit_names)
        apply_recompute(model, full_anatomy, own_blocks, plan.memory, capture, runtime.offload)
    patch_library_recompute(model, partial(capture_held_context, capture, lanes))
    if plan.precision.weights != "whole":
        split_weights(model, even=plan.precision.weights == "split_even")
    runtime.feedback = build_feedback(plan.comm)
    if mesh.size() > 1 or p.zero > 0:
        check_hooks(model, hooked, defers=queue is not None)
    if ranks_along(mesh, *SHARING_AXES) > 1 and dist.get_backend() != "fake":
        runtime.shared_buffers = SharedBuffers(model, mesh)
    if p.zero == 0:
        runtime.gradient_reducer = apply_ddp(model, anatomy, plan, mesh, expert_mesh, runtime.feedback)
    else:
        if keeps_frozen_weights(plan):
            names = (name for name, parameter in model.named_parameters() if not parameter.requires_grad)
            runtime.whole_frozen_weights = frozenset(names)
        sharded = apply_fsdp(model, anatomy, plan, mesh, expert_mesh, runtime.feedback)
        hooks = keep_hooks(model, hooked)
        if p.tp == 1 or not full_anatomy.has_roles:
            gather_outside_of_blocks(model, anatomy, plan, hooks)
        if ranks_along(mesh, *SHARING_AXES) > 1:
            runtime.unit_calls = UnitCalls(model, mesh)
            if (not full_anatomy.has_roles or full_anatomy.tower_blocks) and p.pp == 1:
                runtime.unused_weights = UnusedWeights(model, mesh)
        runtime.gradient_reducer, runtime.reduce_scatters = sharded
        # With tp, the scale of a weight is that of the part of a rank.
        in_fp8 = fp8_layers if p.zero == 3 and p.tp == 1 and plan.precision.matmul == "fp8" else ()
        gathers = gather_in_fp8(model, in_fp8)
        if mesh.device_type != "cpu":
            time_fsdp(model, gathers, reduce_scatters=runtime.feedback is None)
    if p.tp * p.cp > 1 and p.pp == 1:
        refuse_parts_alone(model, full_anatomy, plan)
    stacks_of_blocks = [full_anatomy.blocks, full_anatomy.encoder_blocks]
    if p.pp > 1:
        stacks_of_blocks = [
            full_anatomy.chained_blocks[stage_io.stages[stage].start : stage_io.stages[stage].stop]
            for stage in stage_io.own
        ]
    names_by_stage = [[block.name for block in blocks] for blocks in stacks_of_blocks]
    if p.zero == 3:
        prefetch_forward(model, names_by_stage, plan, mesh)
    if p.zero == 3 and (p.pp > 1 or lanes is not None):  # backwards run in another order than FSDP2 records
        prefetch_backward(model, names_by_stage)
    if p.pp > 1:
        install_stage_switch(model, full_anatomy, stage_io)
        runtime.pipeline = PipelineRuntime(
            model,
            full_anatomy,
            stage_io,
            shapes,
            plan,
            mesh,
            queue,
            runtime.router_stats,
            runtime.gradient_reducer,
            lanes,
        )
    if lanes is not None:
        lanes.registers += [recomputes, *weights_registers(model)]
        if p.zero > 0:
            lanes.registers.append(FsdpRegisters(model))
    model.register_forward_pre_hook(runtime)
    return model


def set_attention(model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan, device_type: str) -> bool:
    """Set the implementation of Transformers that the plan names; returns True for attention by documents (`varlen.py`)."""
    if plan.compute.attention in LIBRARY_ATTENTION:
        model.set_attn_implementation(LIBRARY_ATTENTION[plan.compute.attention])
    return uses_varlen(model, anatomy, plan, device_type)


def _native_bf16(plan: Plan) -> bool:
    """True if the plan leaves the dtype of forward open and the devices of all ranks compute bf16 natively. Collective."""
    return plan.precision.param_dtype == "auto" and all(all_gather_json(detect().supports("bf16")))
