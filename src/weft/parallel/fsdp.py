"""Sharded data parallelism: ZeRO stages 1 to 3 on FSDP2 (Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023).

What one data rank holds between two micro-batches, for P parameters, d ranks in dp_shard, f bytes a forward weight, g bytes
a reduced gradient and u bytes an updated number (weight and two moments of Adam):

    zero 0    g P + 3 u P               gradients all-reduced once a step (replicate.py)
    zero 1    f P + g P + 3 u P / d     reduce-scattered once a step
    zero 2    f P + (g + 3 u) P / d     reduce-scattered every micro-batch
    zero 3    (g + 3 u) P / d           and weights gathered block by block, twice a micro-batch

A pipeline reduces gradients once a step at every stage: g P, until its last backward.

With context parallelism d counts its ranks too; P is what tensor and expert parallelism leave of a model on one rank, and
experts have a d of their own: the ranks that hold the same ones.

Weights of stages 1 and 2 are gathered once a step, kept until the last backward, and freed before the update. Stages 2 and 3
also hold the gradient of one unit of communication, whole, until the next one is reduced.

Compressed reductions keep what their messages leave out, twice, as a step may be skipped: 8 P. Where they reduce momenta, 8 P
of them too, and of their mean 8 P / d (8 P with zero 0). With i ranks of a host that share it before they compress, an i-th.
"""

from functools import partial
from itertools import groupby, pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from weft.anatomy.roles import Anatomy
from weft.backends.hierarchical import leaves_host
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import ReduceScatter, levels_of
from weft.parallel.async_reduce_scatter import groups_of, scatter_behind_backward
from weft.parallel.ddp import GradientReducer, Unit, is_split
from weft.parallel.weights import to_local
from weft.plan import BYTES, Plan, state_bytes
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import CONTEXT_AXES, EXPERT_AXES, join_axes, join_meshes, ranks_along


def shard_data_parallel(
    model: Any, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None
) -> None:
    """Shard parameters over the data axes in place; gradients become means over the data ranks.

    Each block is one unit of communication; embedding, last norm and head are another.

    Args:
        model: on any device, the meta device included; all ranks hold equal weights. Has its `feedback`.
        anatomy: its roles.
        plan: resolved.
        mesh: with the axes of `weft.topology.mesh`.
        expert_mesh: the same ranks as experts see them; None where experts are split like all else.
    """
    policy = MixedPrecisionPolicy(DTYPES[plan.precision.param_dtype], DTYPES[plan.precision.reduce_dtype])
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": plan.parallel.zero == 3}
    # Ranks that share a sequence also share its weights' gradients.
    shards = join_axes(mesh, ("dp_shard", *CONTEXT_AXES))
    between_replicas = _shard_mesh if model.feedback is None else _only_shards
    settings["mesh"] = between_replicas(mesh["dp_replicate"], shards)
    settings["shard_placement_fn"] = partial(_placement, shards.size())
    for block in anatomy.blocks:
        for name in block.experts if expert_mesh else ():
            assert expert_mesh is not None
            own_mesh = between_replicas(expert_mesh["edp_replicate"], expert_mesh["edp_shard"])
            placement = partial(_placement, ranks_along(expert_mesh, "edp_shard"))
            own = {**settings, "mesh": own_mesh, "shard_placement_fn": placement}
            fully_shard(model.get_submodule(name), **own)
        fully_shard(model.get_submodule(block.name), **settings)
    if (
        plan.parallel.zero == 3 and anatomy.embedding and not anatomy.tied
    ):  # used at both ends of a pass, and freed in between
        fully_shard(model.get_submodule(anatomy.embedding), **settings)
    # The rest is one unit. Backward starts at the head: gathered in forward, it is kept for the few moments between.
    fully_shard(model, **{**settings, "reshard_after_forward": False})
    if model.feedback is not None:
        _compress(model, model.feedback, anatomy, plan, mesh, expert_mesh)
    elif (
        mesh.device_type == "cpu"
        and plan.parallel.dp_replicate == 1
        and plan.precision.reduce_dtype == plan.precision.update
        and leaves_host(shards.get_group())
    ):
        scatter_behind_backward(model)


def _compress(
    model: Any, feedback: Feedback, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> None:
    """Let units of FSDP2 reduce-scatter what is compressed; between replicas their shards are reduced as whole gradients are
    (`replicate.py`): FSDP2's own all-reduce takes no other.
    """
    level = plan.comm.compress_scope
    experts = {name for block in anatomy.blocks for name in block.experts} if expert_mesh else set()
    groups = {False: (mesh["dp_replicate"], join_axes(mesh, ("dp_shard", *CONTEXT_AXES)))}
    if expert_mesh is not None:
        groups[True] = (expert_mesh["edp_replicate"], expert_mesh["edp_shard"])
    units = []
    for name, module in reversed(list(model.named_modules())):
        if not isinstance(module, FSDPModule):
            continue
        replicas, shards = groups[name in experts]
        levels = levels_of(shards.get_group(), level)
        compresses = shards.size() > 1 and levels.outer_size > 1
        if compresses:
            scatter: Any = ReduceScatter(f"scatter.{name or 'rest'}", levels, feedback, _segments(module))
            module.set_custom_reduce_scatter(scatter)
        elif feedback.takes_momentum and replicas.size() == 1:
            module.set_all_reduce_hook(partial(feedback.add_up, name or "rest"))
        units.append(Unit(name, replicas.get_group(), makes_momentum=not compresses))
    if any(unit.group.size() > 1 for unit in units):
        model.gradient_reducer = GradientReducer(units, feedback, level)
        # Before FSDP2's own, which shows the model what is gathered.
        model.register_forward_pre_hook(model.gradient_reducer.prepare, prepend=True)


def _segments(unit: Any) -> list[int]:
    """Of a rank's part of the gradients of a unit of FSDP2: stretches that tp ranks have copies of, and others."""
    parameters = [parameter for group in groups_of(unit._get_fsdp_state()) for parameter in group.fsdp_params]
    own = [parameter for parameter in parameters if parameter.sharded_param.requires_grad]
    stretches = groupby(own, key=lambda parameter: is_split(parameter.sharded_param))
    return [sum(parameter.padded_sharded_param_size.numel() for parameter in part) for _, part in stretches]


def _placement(shards: int, parameter: nn.Parameter) -> Shard | None:
    """The dim that ranks cut a parameter along: None, its first, but where FSDP2 would pad that by much (128 experts on 1,024
    ranks become 1,024) the first that they divide, as torchtitan does for experts."""
    shape = to_local(parameter.detach()).shape
    if shape[0] >= 8 * shards:
        return None
    return next((Shard(dim) for dim, size in enumerate(shape) if size % shards == 0), None)


def _shard_mesh(replicate: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    return join_meshes(replicate, shard) if replicate.size() > 1 else shard


def _only_shards(replicate: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    return shard


def begin_micro_batch(model: Any, plan: Plan, *, last: bool) -> None:
    """Say what the coming backward does with gradients and gathered weights.

    Args:
        model: parallelized.
        plan: resolved.
        last: whether this is the last micro-batch of the step, after which gradients are complete and weights are freed.
    """
    if hasattr(model, "gradient_reducer"):
        model.gradient_reducer.last_micro_batch = last
    if plan.parallel.zero == 0:
        return
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or plan.parallel.zero >= 2)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.parallel.zero == 3)


def gather_ahead(model: Any, stages: list[list[str]], plan: Plan, mesh: DeviceMesh) -> None:
    """Let the weights of blocks, and of their experts, be gathered while the blocks before them compute, in forward. In
    backward FSDP2 does so by itself, one block ahead.

    Args:
        model: sharded, with zero = 3.
        stages: names of the blocks of each stage of this rank, in the order of forward.
        plan: resolved.
        mesh: of all ranks.
    """
    groups = [mesh.get_group(axis) for axis in ("dp_shard", *CONTEXT_AXES)]
    if not plan.comm.prefetch or (mesh.device_type == "cpu" and not any(map(leaves_host, groups))):
        return
    for names in stages:
        units = [
            [unit for unit in model.get_submodule(name).modules() if isinstance(unit, FSDPModule)] for name in names
        ]
        for number, own in enumerate(units):
            coming = [unit for block in units[number + 1 : number + 1 + plan.comm.prefetch] for unit in block]
            own[0].set_modules_to_forward_prefetch(coming)
    if mesh.device_type == "cpu":  # there are no streams: only works are under way beside computation
        model._set_unshard_async_op(True)


def prefetch_inside_stages(model: Any, stages: list[list[str]]) -> None:
    """Let each block's backward gather the block before it, in its own stage: FSDP2 alone goes by the order of forwards,
    which a pipeline's backwards do not reverse, and would gather what is not used next.

    Args:
        model: sharded.
        stages: names of the blocks of each stage of this rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])  # nothing but what is gathered anyway
    for names in stages:
        for before, name in pairwise(names):
            model.get_submodule(name).set_modules_to_backward_prefetch([model.get_submodule(before)])


def begin_pipelined_step(model: Any, plan: Plan) -> None:
    """Let the backwards of a pipeline add up gradients where they are, until `reduce_gradients`.

    Args:
        model: parallelized.
        plan: resolved.
    """
    if hasattr(model, "gradient_reducer"):
        model.gradient_reducer.last_micro_batch = False
    if plan.parallel.zero == 0:
        return
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(plan.parallel.zero == 3)
    # The ends have no backward of their own before which they would be gathered again.
    model.set_reshard_after_backward(False, recurse=False)


def add_up_gradients(model: Any, plan: Plan) -> None:
    """Add what a part of a backward has left at gathered weights to their sums in the format of reduction. FSDP2 does so when
    a backward ends, but gradients of matrices may come later than that (`pipeline/weight_gradients.py`)."""
    if plan.parallel.zero == 0 or plan.precision.param_dtype == plan.precision.reduce_dtype:
        return
    for group in _all_groups(model):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_gradients(model: Any, plan: Plan) -> None:
    """Reduce what a pipelined step has added up, and free gathered weights."""
    if plan.parallel.zero == 0:
        model.gradient_reducer.finish()
        return
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(True)
    # As torch's pipeline runtime does: the hook that a backward of the whole model would end with.
    for group in _all_groups(model):
        group.post_backward()
    model._get_fsdp_state()._root_post_backward_final_callback()
    if hasattr(model, "gradient_reducer"):
        model.gradient_reducer.finish()


def _all_groups(model: Any) -> list[Any]:
    """FSDP2's groups of parameters of all units, after the first forward."""
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in groups_of(state)]


def model_state_bytes(parameters: int, plan: Plan, experts: int = 0) -> dict[str, float]:
    """Predicted bytes a rank holds at its fullest moment, between micro-batches, by kind (formulas above).

    Args:
        parameters: trainable parameters of one rank before ZeRO shards them: of the whole model, or what tensor
            parallelism leaves of it; see `count_split`.
        plan: resolved; a forward dtype of "auto" counts as bf16.
        experts: the same, of experts that are on a mesh of their own.
    """
    p, precision = plan.parallel, plan.precision.resolve(native_bf16=True)
    shards = 1 if p.zero == 0 else p.dp_shard * p.cp
    expert_shards = 1 if p.zero == 0 else p.dp_shard * p.cp * p.tp // p.ep
    sharded = parameters / shards + experts / expert_shards
    whole = float(parameters + experts)
    return {
        "parameters": BYTES[precision.update] * sharded,
        "gathered parameters": 0.0 if p.zero in (0, 3) else BYTES[precision.param_dtype] * whole,
        "gradients": BYTES[precision.reduce_dtype] * (whole if p.zero <= 1 or p.pp > 1 else sharded),
        "optimizer": (2 + (plan.comm.compression == "1-bit")) * state_bytes(precision) * sharded
        + _feedback_bytes(plan) * whole,
    }


def _feedback_bytes(plan: Plan) -> float:
    """For each number of a rank's gradient, what its compressed reductions keep; of replicas of shards, at most as much again
    for each shard."""
    comm, p = plan.comm, plan.parallel
    if comm.compression == "none" or p.gradient_ranks == 1:
        return 0.0
    shards, takes_momentum = (p.dp_shard * p.cp if p.zero else 1), comm.compression == "1-bit"
    kept = 8.0 * (comm.error_feedback + takes_momentum)
    mean = 8.0 * (comm.error_feedback and takes_momentum) / shards
    between = 8.0 * comm.error_feedback / shards if p.zero and p.dp_replicate > 1 else 0.0
    return (kept + mean) * (p.zero == 0 or shards > 1) + between


def count_split(model: nn.Module) -> tuple[int, int]:
    """Parameters of one rank before ZeRO shards them: those that all share, and those of experts on a mesh of their own.

    Args:
        model: parallelized, with its shards at rest.
    """
    totals = {False: 0, True: 0}
    for parameter in model.parameters():
        size = parameter.numel()
        names: tuple[str, ...] = ()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, parameter.placements, strict=True):
                if name in ("tp", "ep") and not placement.is_replicate():
                    size //= parameter.device_mesh[name].size()
        totals[any(name in EXPERT_AXES[1:] for name in names)] += size
    return totals[False], totals[True]
