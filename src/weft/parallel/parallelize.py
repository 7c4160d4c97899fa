"""The straight line: apply the parallelism of a plan to a model, one technique after the other."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.objects import all_ranks
from weft.device.detect import detect
from weft.errors import raise_if_refused
from weft.own_code import load_function
from weft.parallel.build import Build
from weft.parallel.choices import choose
from weft.parallel.data.data_parallel import prefetch_weights, reduce_gradients, shard_weights
from weft.parallel.data.replicas import share_weights
from weft.parallel.experts.adapters import adapt_experts
from weft.parallel.experts.capacity import limit_experts
from weft.parallel.experts.layers import spread_experts
from weft.parallel.experts.relocation import relocate_experts
from weft.parallel.experts.shared import overlap_shared
from weft.parallel.loss.head_loss import forwards_of, move_loss
from weft.parallel.loss.labels import average_loss
from weft.parallel.operators import compile_regions, replace_operators
from weft.parallel.pipeline.lane_registers import join_lanes
from weft.parallel.pipeline.stages import cut_stages, run_stages
from weft.parallel.pipeline.weight_gradients import defer_gradients
from weft.parallel.precision.frozen_weights import pack_frozen_weights
from weft.parallel.precision.layer_precision import round_layers, split_master_weights, widen_modules
from weft.parallel.precision.quantized_layers import round_experts
from weft.parallel.recompute_context import recompute_blocks
from weft.parallel.sequence.context_heads import divide_heads
from weft.parallel.sequence.dropout import place_dropout
from weft.parallel.sequence.recurrent_context import split_context
from weft.parallel.sequence.rows import split_rows
from weft.parallel.sequence.varlen import attend_by_documents
from weft.parallel.tensor.tensor_parallel import split_tensors
from weft.plan import Plan, resolve_plan
from weft.topology.mesh import reason_against_mesh


def run_techniques(build: Build) -> None:
    """Step of `parallelize`: functions of the user, which see split modules and the whole graph, and change parameters freely.

    A function that replaces the forward of the model or its head may change the logits, which the head then returns.
    """
    build.begin("run_techniques", "split_tensors", "split_rows", "move_loss", "widen_modules")
    model, anatomy, runtime = build.model, build.anatomy, build.runtime
    model.register_forward_pre_hook(runtime)  # from here on `weft.runtime(model)` finds it
    forwards = forwards_of(model, anatomy) if runtime.linear_loss else None
    for index, name in enumerate(build.plan.techniques):
        load_function(name, f"plan.techniques[{index}]")(model, anatomy, build.plan, build.mesh)
    if forwards and forwards_of(model, anatomy) != forwards:
        runtime.linear_loss = None


STEPS = (
    cut_stages,  # all that follows sees the blocks of this rank only
    replace_operators,  # recognized by the forward of a class, which later steps wrap
    limit_experts,  # before experts are split: a capacity counts the tokens of a rank
    relocate_experts,  # which expert is where, for the split
    round_experts,  # around the operator, inside of the split
    spread_experts,
    adapt_experts,  # after all other hooks of experts
    split_tensors,  # leaves experts alone
    overlap_shared,  # shared experts are split, and the routed ones dispatch
    divide_heads,
    place_dropout,  # knows the features that are split
    split_context,  # by local heads, with that dropout
    attend_by_documents,
    split_rows,  # masks for the attention chosen above
    average_loss,  # its hook comes before that of split rows
    defer_gradients,
    move_loss,  # into the head, which is split
    widen_modules,
    run_techniques,  # functions of the user: split modules, the whole graph, no ZeRO
    round_layers,  # those that are left
    compile_regions,  # all that computes in a block
    recompute_blocks,  # repeats every forward above
    pack_frozen_weights,  # of the ranks of tp, ep and pp
    split_master_weights,
    reduce_gradients,
    shard_weights,  # the last change of parameters
    prefetch_weights,
    run_stages,  # with reducer, queue and lanes
    join_lanes,
)
"""Steps of `parallelize`, in their order. Each returns at once where its technique is off."""


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
    raise_if_refused(reason_against_mesh(plan, mesh))
    choices = choose(model, plan, mesh.device_type, detect())  # before any change
    if mesh.size() > 1 and dist.get_backend() != "fake":
        share_weights(model)
    build = Build(model, choices, mesh, library_num_items)
    for step in STEPS:
        step(build)
    return model


def _native_bf16(plan: Plan) -> bool:
    """True if the plan leaves the dtype of forward open and the devices of all ranks compute bf16 natively. Collective."""
    return plan.precision.param_dtype == "auto" and all_ranks(detect().supports("bf16"))
