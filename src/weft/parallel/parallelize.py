"""The straight line: which technique is applied to a model, and in which order."""

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.comm.compression.codecs import build_feedback
from weft.comm.objects import all_gather_json
from weft.comm.overlap import check_chunks
from weft.device.device import detect
from weft.errors import PlanError
from weft.memory.offload import build_offload
from weft.memory.recompute import follow_library_recompute, keep_less
from weft.memory.weights import split_weights
from weft.parallel.checks import check_tensors
from weft.parallel.ddp import replicate_data_parallel
from weft.parallel.documents import check_rows
from weft.parallel.dropout import place_dropout
from weft.parallel.expert import check_experts, compute_shared_experts_meanwhile, split_experts
from weft.parallel.fsdp import gather_ahead, prefetch_inside_stages, shard_data_parallel
from weft.parallel.labels import average_over_all_targets
from weft.parallel.moe_aux_loss import RouterStats
from weft.parallel.pipeline.partition import (
    BlockChain,
    StageIO,
    check_ranks,
    cut_model,
    install_stage_switch,
    read_chain,
    split_blocks,
)
from weft.parallel.pipeline.plan_schedule import read_order, splits_backward, stage_ranks
from weft.parallel.pipeline.runtime import PipelineRuntime
from weft.parallel.pipeline.weight_gradients import WeightGradients, defer_weight_gradients
from weft.parallel.recompute_context import capture_context
from weft.parallel.sequence_sharding import row_multiple, shard_inputs, split_sequences, takes_over_attention
from weft.parallel.tensor import split_tensors
from weft.parallel.weights import LocalWeights, TensorLayout, shard_parameter
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.precision.fp16_backward import carry_from
from weft.precision.roles import compute_in_float32
from weft.topology.mesh import build_expert_mesh, ranks_along


def parallelize(model: Any, plan: Plan, mesh: DeviceMesh) -> PreTrainedModel:
    """Split an unmodified Transformers model over the ranks of a mesh, in place, as the plan says.

    The model keeps its class, its forward and its parameter names. Afterwards parameters are sharded: make the optimizer
    from `model.parameters()` now. Gradients are means over the data ranks, as under DistributedDataParallel; the loss of
    `labels` is the mean over the targets of all ranks, with the gradients of that mean (`labels.py`). With a pipeline a
    rank keeps the blocks of its own stages, and `weft.train.step` runs the model.

    Args:
        model: causal language model with equal weights on all ranks, or on the meta device (see `weft.materialize`).
        plan: how to run it.
        mesh: from `weft.build_mesh(plan, ...)`.

    Returns:
        The same model.

    Raises:
        PlanError: the plan does not fit the mesh.
        ModelError: the model's anatomy cannot be read.
    """
    plan = plan.resolve(mesh.size()).resolve_precision(_native_bf16(plan))
    whole = anatomy = read_anatomy(model)
    p = plan.parallel
    chain = check_axes(model, anatomy, plan)
    own_attention = takes_over_attention(model, anatomy, plan)
    model.router_watch = RouterStats(model, anatomy, mesh)
    if chain is not None:
        anatomy, relay = cut_for_rank(model, anatomy, chain, plan, mesh.get_local_rank("pp"))
    expert_mesh = build_expert_mesh(plan, mesh.device_type) if whole.has_experts and p.ep * p.tp > 1 else None
    if expert_mesh is not None:
        split_all_experts(model, anatomy, plan, expert_mesh)
    queue = WeightGradients() if p.pp > 1 and splits_backward(plan) else None
    if p.tp > 1:
        split_tensors(model, anatomy, plan, mesh, queue)
    if p.ep > 1:
        compute_shared_experts_meanwhile(model, anatomy)
    place_dropout(model, anatomy, mesh, row_multiple(whole, plan))
    if own_attention:
        split_sequences(model, anatomy, mesh, plan.comm.ulysses_chunks)
    splits_rows = p.tp > 1 or own_attention
    if splits_rows:
        shard_inputs(model, whole, plan, mesh)
    average_over_all_targets(model, mesh, row_multiple(whole, plan) if splits_rows else None)
    if queue is not None:
        defer_weight_gradients(model, anatomy, queue)
    compute_in_float32(model, whole, plan.precision.fp32_modules)
    model.carries_gradients = plan.precision.backward == "fp16"
    if model.carries_gradients:
        carry_from(model.get_submodule(whole.head))
    if plan.memory.recompute or plan.memory.offload:
        model.offload = build_offload(plan.memory, detect())
        own_blocks = {block.name for block in anatomy.blocks}
        keep_less(model, whole, own_blocks, plan.memory, partial(capture_context, model), model.offload)
    follow_library_recompute(model, partial(capture_context, model))
    if plan.precision.weights != "whole":
        split_weights(model, even=plan.precision.weights == "split_even")
    model.feedback = build_feedback(plan.comm)
    split_data = replicate_data_parallel if p.zero == 0 else shard_data_parallel
    split_data(model, anatomy, plan, mesh, expert_mesh)
    stages = [range(len(whole.blocks))] if p.pp == 1 else [relay.stages[stage] for stage in relay.own]
    if p.zero == 3:
        gather_ahead(model, [[whole.blocks[number].name for number in stage] for stage in stages], plan, mesh)
    if p.pp > 1:
        if p.zero == 3:
            prefetch_inside_stages(model, [[whole.blocks[number].name for number in stage] for stage in stages])
        install_stage_switch(model, whole, relay)
        model.pipeline = PipelineRuntime(model, whole, relay, plan, mesh, queue)
    return model


def _native_bf16(plan: Plan) -> bool:
    """Whether the devices of all ranks compute bf16 natively; asked where the plan leaves the choice, on all ranks alike."""
    return plan.precision.param_dtype == "auto" and all(all_gather_json(detect().supports("bf16")))


def cut_for_rank(
    model: PreTrainedModel, anatomy: Anatomy, chain: BlockChain, plan: Plan, rank: int
) -> tuple[Anatomy, StageIO]:
    """Leave a rank of pp the blocks of its stages; the anatomy of what is left, and the relay that runs it."""
    ranks = stage_ranks(plan)
    stages = split_blocks(len(anatomy.blocks), len(ranks), plan.pipeline)
    own = tuple(stage for stage, owner in enumerate(ranks) if owner == rank)
    return cut_model(model, anatomy, chain, stages, own)


def check_axes(
    model: PreTrainedModel,
    anatomy: Anatomy,
    plan: Plan,
    seq_len: int | None = None,
    num_micro_batches: int | None = None,
) -> BlockChain | None:
    """Refuse a plan whose axes this model cannot take; the meta device is enough, and no rank is needed.

    Args:
        model: whole.
        anatomy: its roles.
        plan: resolved; its forward dtype may be "auto".
        seq_len: of the rows, where it is known.
        num_micro_batches: of a step, where it is known.

    Returns:
        How the model calls its blocks, for a pipeline; None without one.

    Raises:
        PlanError: with the axis, the numbers and the rule.
    """
    p = plan.parallel
    check_experts(model, anatomy, p.ep)
    if p.tp > 1:
        check_tensors(model, anatomy, p.tp)
    check_rows(model, anatomy, plan, seq_len)
    if p.pp > 1:
        check_ranks(len(anatomy.blocks), plan)
        split_blocks(len(anatomy.blocks), len(stage_ranks(plan)), plan.pipeline)
        if num_micro_batches is not None:
            read_order(plan, num_micro_batches)
    if seq_len is not None:
        _check_row_length(seq_len, anatomy, plan)
        if p.tp > 1 and plan.comm.overlap_chunks != "auto":
            check_chunks(plan.comm.overlap_chunks, seq_len // p.cp // (p.tp if p.sp else 1))
    forward = plan.precision.resolve(
        native_bf16=True
    ).param_dtype  # whether the blocks form a chain does not depend on it
    return read_chain(model, anatomy, DTYPES[forward]) if p.pp > 1 else None


def _check_row_length(seq_len: int, anatomy: Anatomy, plan: Plan) -> None:
    """Refuse rows whose tokens the ranks of tp and cp do not divide; a longer row loses no token, a shorter one may."""
    p, multiple = plan.parallel, row_multiple(anatomy, plan)
    if seq_len % multiple == 0:
        return
    longer = seq_len + -seq_len % multiple
    fits = anatomy.max_positions is None or longer <= anatomy.max_positions
    rest = "" if fits else f", as the {anatomy.max_positions} positions of the model leave no room for {longer}"
    raise PlanError(
        f"rows of {seq_len} tokens cannot be divided by tp = {p.tp} and cp = {p.cp}",
        where="data.seq_len",
        rule=f"the ranks of a row hold as many tokens each: here its length is a multiple of {multiple}",
        fix=f"set data.seq_len = {longer if fits else longer - multiple}{rest}",
    )


def split_all_experts(model: PreTrainedModel, anatomy: Anatomy, plan: Plan, expert_mesh: DeviceMesh) -> None:
    """Leave each rank of ep its share of every layer's experts.

    Experts see tokens of all ranks, and each is on fewer of them than the other weights: where those have the mean of
    their gradients over the ranks that see different tokens, experts have the mean over the ranks that hold them.
    """
    holders = ranks_along(expert_mesh, "edp_replicate", "edp_shard")
    for name in (name for block in anatomy.blocks for name in block.experts):
        experts = model.get_submodule(name)
        names = [parameter for parameter, _ in experts.named_parameters()]
        if plan.parallel.ep > 1:
            for parameter in names:
                shard_parameter(experts, parameter, 0, expert_mesh["ep"])
            split_experts(experts, expert_mesh.get_group("ep"))
        layouts = dict.fromkeys(names, TensorLayout("shard"))
        LocalWeights(experts, layouts, expert_mesh.get_group("ep"), holders / plan.parallel.gradient_ranks)
