"""Expert parallelism of the layers of a model: their experts over the ranks of ep and etp."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.comm.lanes import Lanes
from weft.memory.recompute import recomputed_experts
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.expert import split_experts
from weft.parallel.experts.groups import dispatch_groups, levels_of_group
from weft.parallel.experts.matrices import packed_layout, split_dims, split_matrices
from weft.parallel.experts.relocation import Relocation
from weft.parallel.experts.replicas import split_and_balance_experts
from weft.parallel.precision.fp8_layers import fp8_experts_forward
from weft.parallel.precision.quantized_layers import with_rounded_weights
from weft.parallel.weights import LocalWeights, PackedLayout, TensorLayout, shard_parameter
from weft.plan import ResolvedPlan
from weft.topology.mesh import build_counts_group, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build


def apply_ep(
    model: PreTrainedModel,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    expert_mesh: DeviceMesh,
    lanes: Lanes | None = None,
    fp8_experts: Collection[str] = (),
    recomputed: Collection[str] = (),
    late: Collection[str] = (),
    relocation: Relocation | None = None,
) -> dict[nn.Module, PackedLayout]:
    """Shard the experts of each layer over the ranks of ep and etp, and scale their gradients.

    Data parallelism averages the gradients of an expert over the ranks that hold it. On each of these ranks the gradient is a
    sum over the tokens of its ep and etp ranks. It is scaled by (ranks that hold the expert) / (ranks with different tokens),
    so that the result is the mean over all ranks with different tokens, as for other weights.

    Args:
        model, anatomy, plan: as for `parallelize`.
        expert_mesh: mesh of the experts.
        lanes: lanes of joint forwards and backwards.
        fp8_experts: names of the experts whose matmuls are in FP8.
        recomputed: names of the experts that backward recomputes.
        late: names of the experts whose weight gradients overlap with the all-to-all of the gradients of rows.
        relocation: homes of the experts, if they are relocated.

    Returns:
        Row orders of the experts whose first matrix is split by etp.
    """
    p, ep_group = plan.parallel, expert_mesh.get_group("ep")
    balances = p.expert_balance == "replicate"
    groups = (ep_group,) if balances else dispatch_groups(expert_mesh, plan.comm)
    is_flat = len(groups) == len(levels_of_group(ep_group)) == 1
    counts_group = build_counts_group(expert_mesh) if lanes is not None and is_flat else None
    row_format = None if plan.comm.expert_compression == "none" else plan.comm.expert_compression
    holders = ranks_along(expert_mesh, "edp_replicate", "edp_shard")
    packed: dict[nn.Module, PackedLayout] = {}
    for name in (name for block in anatomy.blocks for name in block.experts):
        experts = model.get_submodule(name)
        names = [parameter for parameter, _ in experts.named_parameters()]
        layouts, innermost = dict.fromkeys(names, TensorLayout("shard")), ep_group
        if p.etp > 1:
            innermost = expert_mesh.get_group("etp")
            order = packed_layout(experts, p.etp)
            packed |= {experts: order} if order else {}
            for parameter, dim in split_dims(experts).items():
                own_order = order if order and parameter in order.dim else None
                shard_parameter(experts, parameter, (0, dim), expert_mesh["ep", "etp"], own_order)
                layouts[parameter] = TensorLayout("once" if dim is None else "shard")
            split_matrices(experts, Channel(innermost, lanes, row_format=row_format))
        elif p.ep > 1:
            for parameter in names:
                shard_parameter(experts, parameter, 0, expert_mesh["ep"])
        if p.ep > 1:
            # Gradients that are rounded before the weights are applied would differ from those without recompute.
            without_combine = name in recomputed and row_format is None
            channels = tuple(Channel(group, lanes, counts_group, without_combine, row_format) for group in groups)
            homes = relocation.homes[name] if relocation else None
            if balances:
                compute = fp8_experts_forward if name in fp8_experts else type(experts).forward
                if plan.precision.quantize != "none":
                    compute = partial(with_rounded_weights, compute, plan)
                split_and_balance_experts(experts, channels[0], p.expert_slots, compute, name in late, homes)
            else:
                split_experts(experts, channels, name in late, homes)
        LocalWeights(experts, layouts, innermost, holders / p.gradient_ranks)
    return packed


def spread_experts(build: "Build") -> None:
    """Step of `parallelize`: experts over the ranks of ep and etp, around the operators and the rounding of their forward."""
    build.begin("spread_experts", "replace_operators", "limit_experts", "relocate_experts", "round_experts")
    choices, own = build.choices, {name for block in build.anatomy.blocks for name in block.experts}
    if build.expert_mesh is None:
        build.packed = {}
    else:
        fp8 = {name for name, reason in choices.fp8_experts.items() if not reason}
        recomputed = recomputed_experts(build.full_anatomy, build.plan.memory)
        late, relocation = choices.late_experts & own, build.runtime.relocation
        meshes = build.plan, build.expert_mesh, build.lanes
        build.packed = apply_ep(build.model, build.anatomy, *meshes, fp8, recomputed, late, relocation)
