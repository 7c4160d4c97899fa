"""Sharded data parallelism: ZeRO stages 1 to 3 on FSDP2 (Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023).

Bytes on one data rank between two micro-batches, for P parameters, d ranks in dp_shard, f bytes per weight in forward, g bytes
per reduced gradient, and u bytes per element of master weight and of each of the two moments of Adam:

    zero 0    g P + 3 u P               gradients all-reduced once per step (ddp.py)
    zero 1    f P + g P + 3 u P / d     gradients reduce-scattered once per step
    zero 2    f P + (g + 3 u) P / d     gradients reduce-scattered in every micro-batch
    zero 3    (g + 3 u) P / d           as zero 2, and weights gathered per block, twice in every micro-batch

With pipeline parallelism every ZeRO stage reduces gradients once per step, and holds g P until its last backward.

With context parallelism d includes the cp ranks. P counts the parameters of one rank after tensor and expert parallelism.
Experts have another d: the number of ranks that hold the same experts.

ZeRO stages 1 and 2 gather weights once per step, keep them until the last backward, and free them before the optimizer update.
Frozen weights (those under adapters) are not gathered there, but whole on each rank, if forward has the dtype of the weights.
Stages 2 and 3 also hold the unreduced gradient of one FSDP unit until the gradient of the next unit is reduced.

Compressed reductions hold error feedback twice, because a step may be skipped: 8 P. If they reduce momentum (1-bit Adam), they
hold another 8 P of local momentum, and 8 P / d of its mean (8 P with zero 0). If i ranks of a host reduce among themselves
before they compress, these sizes are divided by i.
"""

from functools import partial
from itertools import groupby, pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from weft.anatomy.roles import Anatomy
from weft.backends.hierarchical import leaves_host
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import ReduceScatter, levels_of
from weft.compat import add_to_accumulated_gradients, end_fsdp_backward, fsdp_param_groups
from weft.errors import PlanError
from weft.memory.nf4 import is_nf4
from weft.parallel.data.async_reduce_scatter import PendingReduceScatters, overlap_reduce_scatter
from weft.parallel.data.ddp import GradientReducer, Unit, is_split
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import CONTEXT_AXES, join_axes, join_meshes, ranks_along


def apply_fsdp(
    model: Any,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None = None,
    feedback: Feedback | None = None,
) -> tuple[GradientReducer | None, PendingReduceScatters | None]:
    """Shard parameters over the data axes, in place; gradients become means over the data ranks.

    Each block is one FSDP unit. Embedding, final norm and head form another unit; with zero = 3 an untied embedding is a unit.
    Parameters without dims, which FSDP2 does not shard, are on all ranks, and their gradients are all-reduced.

    Args:
        model: model on any device, including meta, with the same weights on all ranks.
        anatomy: its roles.
        plan: plan.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        expert_mesh: device mesh of the experts over the same ranks; None if experts use `mesh`.
        feedback: state of compressed reductions; None to reduce without compression.

    Returns:
        Reducer of compressed gradients between replicas, or of scalars, and queue of overlapped reduce-scatters; None where
        FSDP2 does both.
    """
    policy = MixedPrecisionPolicy(DTYPES[plan.precision.param_dtype], DTYPES[plan.precision.reduce_dtype])
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": plan.parallel.zero == 3}
    # Context-parallel ranks hold the same weights: shard over them too.
    shards = join_axes(mesh, ("dp_shard", *CONTEXT_AXES))
    fsdp_mesh = _hsdp_mesh if feedback is None else _shard_mesh_only
    settings["mesh"] = fsdp_mesh(mesh["dp_replicate"], shards)
    settings["shard_placement_fn"] = partial(_placement, shards.size())
    for parameter in model.parameters():  # of a transposed or a slice of a matrix: FSDP2 shards contiguous memory
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    empty = {parameter for parameter in model.parameters() if parameter.numel() == 0}  # nothing to shard or to reduce
    whole = {parameter for parameter in model.parameters() if keeps_whole(parameter, plan)}
    settings["ignored_params"] = scalars | empty | whole | _packed_alone(model, anatomy, shards.size(), expert_mesh)
    for block in anatomy.blocks:
        for name in block.experts if expert_mesh else ():
            assert expert_mesh is not None
            own_mesh = fsdp_mesh(expert_mesh["edp_replicate"], expert_mesh["edp_shard"])
            placement = partial(_placement, ranks_along(expert_mesh, "edp_shard"))
            own = {**settings, "mesh": own_mesh, "shard_placement_fn": placement}
            _shard_unit(model.get_submodule(name), **own)
        _shard_unit(model.get_submodule(block.name), **settings)
    for block in anatomy.encoder_blocks:
        _shard_unit(model.get_submodule(block.name), **settings)
    # The embedding is used only at the start of forward and at the end of backward, and is freed in between.
    if plan.parallel.zero == 3 and anatomy.embedding and not _is_shared(model, anatomy.embedding):
        _shard_embedding(model, anatomy, settings)
    # The root unit has the other parameters. Backward starts at the head, so that it stays gathered after forward.
    _shard_unit(model, **{**settings, "reshard_after_forward": False})
    if scalars:
        return _reduce_scalars(model, mesh, feedback), None
    if feedback is not None:
        return _set_compression(model, feedback, anatomy, plan, mesh, expert_mesh), None
    if (
        mesh.device_type == "cpu"
        and plan.parallel.dp_replicate == 1
        and plan.precision.reduce_dtype == plan.precision.update
        and plan.memory.parameters_device == "device"
        and leaves_host(shards.get_group())
    ):
        return None, overlap_reduce_scatter(model)
    return None, None


def _shard_embedding(model: nn.Module, anatomy: Anatomy, settings: dict[str, Any]) -> None:
    embedding = model.get_submodule(anatomy.embedding)
    _shard_unit(embedding, **settings)
    if not any(parameter.requires_grad for parameter in embedding.parameters()) and anatomy.blocks:
        # Backward ends at the first block: prefetching a frozen embedding there would gather it for nothing.
        first = model.get_submodule(anatomy.blocks[0].name)
        last = [unit for unit in first.modules() if isinstance(unit, FSDPModule)][-1]
        last.set_modules_to_backward_prefetch([last])  # only itself: disables the default


def _is_shared(model: nn.Module, name: str) -> bool:
    """True if another module has a weight of the module, as the head, or the embeddings of encoder and decoder."""
    own = set(model.get_submodule(name).parameters())
    return sum(parameter in own for _, parameter in model.named_parameters(remove_duplicate=False)) > len(own)


def keeps_frozen_weights(plan: ResolvedPlan) -> bool:
    """True if each data rank keeps the frozen weights whole: ZeRO stages 1 and 2 would gather them again in every step.

    With another dtype in forward, shards and their gathered copy in that dtype take less memory than whole weights.
    """
    return plan.parallel.zero < 3 and plan.precision.param_dtype == plan.precision.update


def keeps_whole(parameter: nn.Parameter, plan: ResolvedPlan) -> bool:
    """True if each data rank holds a parameter whole: under ZeRO stages 1 and 2, frozen weights (see above), and those in 4
    bits under any dtype of forward."""
    return not parameter.requires_grad and (
        keeps_frozen_weights(plan) or (plan.parallel.zero < 3 and is_nf4(parameter))
    )


def _packed_alone(model: nn.Module, anatomy: Anatomy, shards: int, expert_mesh: DeviceMesh | None) -> set[nn.Parameter]:
    """Weights in 4 bits that one rank holds alone: FSDP2 gathers a tensor of two parts from several ranks only."""
    names = {name for block in anatomy.blocks for name in block.experts} if expert_mesh is not None else set()
    own = {parameter for name in names for parameter in model.get_submodule(name).parameters() if is_nf4(parameter)}
    others = {parameter for parameter in model.parameters() if is_nf4(parameter) and parameter not in own}
    own_shards = ranks_along(expert_mesh, "edp_shard") if expert_mesh is not None else shards
    return (own if own_shards == 1 else set()) | (others if shards == 1 else set())


def _reduce_scalars(model: Any, mesh: DeviceMesh, feedback: Feedback | None) -> GradientReducer:
    """All-reduce the gradients of parameters without dims over the data ranks.

    Raises:
        PlanError: the plan compresses gradients.
    """
    if feedback is not None:
        raise PlanError(
            "compressed gradients of a model with parameters without dims",
            where="plan.comm.compression",
            rule="under ZeRO stages 1 to 3, gradients of scalars are all-reduced without compression",
            fix='set plan.comm.compression = "none", or plan.parallel.zero = 0',
        )
    group = join_axes(mesh, ("dp_shard", "dp_replicate", *CONTEXT_AXES)).get_group()
    reducer = GradientReducer([Unit("", group)], scalars_only=True)
    model.register_forward_pre_hook(reducer.prepare)
    return reducer


def _shard_unit(unit: nn.Module, **settings: Any) -> None:
    """Apply FSDP2 to a unit. Its class keeps its name and module, by which libraries and users' code recognise models."""
    module = type(unit).__module__
    fully_shard(unit, **settings)
    sharded = type(unit)  # a subclass that FSDP2 makes for each class
    sharded.__name__, sharded.__module__ = sharded.__name__.removeprefix("FSDP"), module
    # For `generate` of Transformers: ranks that have finished their rows go on until all have, as forward is collective.
    sharded._is_fsdp_managed_module = True  # type: ignore[attr-defined]


def _set_compression(
    model: Any,
    feedback: Feedback,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
) -> GradientReducer | None:
    """Compress the reduce-scatters of FSDP2 units, and the all-reduces of their shards between replicas.

    The all-reduce between replicas uses the buckets of `ddp.py`, because FSDP2 does not accept a custom all-reduce.
    """
    compress_scope = plan.comm.compress_scope
    experts = {name for block in anatomy.blocks for name in block.experts} if expert_mesh else set()
    groups = {False: (mesh["dp_replicate"], join_axes(mesh, ("dp_shard", *CONTEXT_AXES)))}
    if expert_mesh is not None:
        groups[True] = (expert_mesh["edp_replicate"], expert_mesh["edp_shard"])
    units = []
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        replicas, shards = groups[name in experts]
        levels = levels_of(shards.get_group(), compress_scope)
        compresses = shards.size() > 1 and levels.outer_size > 1
        if compresses:
            scatter: Any = ReduceScatter(f"scatter.{name or 'rest'}", levels, feedback, _segments(module))
            module.set_custom_reduce_scatter(scatter)
        elif feedback.takes_momentum and replicas.size() == 1:
            module.set_all_reduce_hook(partial(feedback.add_up, name or "rest"))
        units.append(Unit(name, replicas.get_group(), makes_momentum=not compresses))
    if all(unit.group.size() == 1 for unit in units):
        return None
    reducer = GradientReducer(units, feedback, compress_scope)
    # Runs before the hook of FSDP2, which replaces the sharded parameters by gathered tensors.
    model.register_forward_pre_hook(reducer.prepare, prepend=True)
    return reducer


def _segments(unit: Any) -> list[int]:
    """Sizes of consecutive segments of the gradient shard of an FSDP2 unit, alternately sharded and replicated over tp."""
    parameters = [parameter for group in fsdp_param_groups(unit) for parameter in group.fsdp_params]
    own = [parameter for parameter in parameters if parameter.sharded_param.requires_grad]
    segments = groupby(own, key=lambda parameter: is_split(parameter.sharded_param))
    return [sum(parameter.padded_sharded_param_size.numel() for parameter in part) for _, part in segments]


def _placement(shards: int, parameter: nn.Parameter) -> Shard | None:
    """Dim along which FSDP2 shards a parameter; None for its default, dim 0.

    If dim 0 is so small that FSDP2 would pad it a lot (128 experts on 1,024 ranks become 1,024), it is the first dim that the
    number of ranks divides, as torchtitan does for experts.
    """
    shape = to_local(parameter.detach()).shape
    if shape[0] >= 8 * shards or is_nf4(parameter):  # along another dim, FSDP2 would take its parts for values
        return None
    return next((Shard(dim) for dim, size in enumerate(shape) if size % shards == 0), None)


def _hsdp_mesh(replicate: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    return join_meshes(replicate, shard) if replicate.size() > 1 else shard


def _shard_mesh_only(replicate: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    return shard


def begin_micro_batch(model: Any, plan: ResolvedPlan, reducer: GradientReducer | None, *, last: bool) -> None:
    """Configure gradient reduction and resharding for the next backward.

    Args:
        model: parallelized model.
        plan: plan.
        reducer: reducer of its gradients, if `apply_ddp` or `apply_fsdp` made one.
        last: True for the last micro-batch of the step, after which gradients are complete and gathered weights are freed.
    """
    if reducer is not None:
        reducer.prepare(model, None)  # a part of the model may be called, without the forward of the model
        reducer.last_micro_batch = last
    if plan.parallel.zero == 0:
        return
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or plan.parallel.zero >= 2)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.parallel.zero == 3)


def free_gathered_weights(model: nn.Module) -> None:
    """Free gathered weights, which an evaluation may have left, so that parameters are the stored shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def prefetch_forward(model: Any, stages: list[list[str]], plan: ResolvedPlan, mesh: DeviceMesh) -> None:
    """Prefetch the weights of later blocks and of their experts in forward, `plan.comm.prefetch` blocks ahead.

    In backward, FSDP2 prefetches one block ahead by default.

    Args:
        model: sharded model, with zero = 3.
        stages: names of the blocks of each pipeline stage of this rank, in the order of forward.
        plan: plan.
        mesh: device mesh of all ranks.
    """
    groups = [mesh.get_group(axis) for axis in ("dp_shard", *CONTEXT_AXES)]
    if not plan.comm.prefetch or (mesh.device_type == "cpu" and not any(map(leaves_host, groups))):
        return
    for names in stages:
        units = [
            [unit for unit in model.get_submodule(name).modules() if isinstance(unit, FSDPModule)] for name in names
        ]
        for index, own in enumerate(units):
            later = [unit for block in units[index + 1 : index + 1 + plan.comm.prefetch] for unit in block]
            own[0].set_modules_to_forward_prefetch(later)
    if mesh.device_type == "cpu":  # CPU has no streams: only an asynchronous collective overlaps with computation
        model._set_unshard_async_op(True)


def prefetch_backward(model: Any, stages: list[list[str]]) -> None:
    """Let the backward of each block prefetch the preceding block of the same pipeline stage.

    The default of FSDP2 prefetches in the reverse order of forwards. The backwards of a pipeline run in another order, so that
    it would gather blocks that are not used next.

    Args:
        model: sharded model.
        stages: names of the blocks of each pipeline stage of this rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])  # only itself: disables the default
    for names in stages:
        for previous, name in pairwise(names):
            model.get_submodule(name).set_modules_to_backward_prefetch([model.get_submodule(previous)])


def begin_pipelined_step(model: Any, plan: ResolvedPlan, reducer: GradientReducer | None) -> None:
    """Accumulate unreduced gradients in the backwards of a pipeline, until `reduce_gradients`. Arguments as there."""
    if reducer is not None:
        reducer.last_micro_batch = False
    if plan.parallel.zero == 0:
        return
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(plan.parallel.zero == 3)
    # In a pipeline no hook gathers the root unit (embedding, final norm, head) again before a backward.
    model.set_reshard_after_backward(False, recurse=False)


def accumulate_gradients(model: Any, plan: ResolvedPlan) -> None:
    """Add the gradients of gathered weights to their sums in the dtype of reduction.

    FSDP2 does so at the end of each backward, but deferred weight gradients are computed after it
    (`pipeline/weight_gradients.py`).
    """
    if plan.parallel.zero == 0 or plan.precision.param_dtype == plan.precision.reduce_dtype:
        return
    add_to_accumulated_gradients(model)


def reduce_gradients(model: Any, plan: ResolvedPlan, reducer: GradientReducer | None) -> None:
    """Reduce the accumulated gradients of a pipelined step, and free gathered weights.

    Args:
        model: parallelized model.
        plan: plan.
        reducer: reducer of its gradients, if `apply_ddp` or `apply_fsdp` made one.
    """
    if plan.parallel.zero == 0:
        assert reducer is not None
        reducer.finish()
        return
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(True)
    end_fsdp_backward(model)
    if reducer is not None:
        reducer.finish()
