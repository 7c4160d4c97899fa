"""Expert parallelism of the layers of a model: their experts over the ranks of ep and etp."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.lanes import Lanes
from weft.memory.recompute import recomputed_experts
from weft.parallel.experts.dispatch import Channel, exchange_of
from weft.parallel.experts.groups import dispatch_groups, levels_of_group
from weft.parallel.experts.late_gradients import late_linear
from weft.parallel.experts.matrices import OverMatrices, packed_layout, split_dims
from weft.parallel.experts.path import ExpertPath
from weft.parallel.experts.replicas import OverReplicas
from weft.parallel.weights import LocalWeights, PackedLayout, TensorLayout, shard_parameter
from weft.plan import ResolvedPlan
from weft.topology.mesh import build_counts_group, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build


def split_experts(
    paths: Mapping[str, ExpertPath],
    plan: ResolvedPlan,
    expert_mesh: DeviceMesh,
    lanes: Lanes | None = None,
    recomputed: Collection[str] = (),
) -> dict[nn.Module, PackedLayout]:
    """Shard the experts of each layer over the ranks of ep and etp, scale their gradients, and set their exchange.

    Data parallelism averages the gradients of an expert over the ranks that hold it. On each of these ranks the gradient is a
    sum over the tokens of its ep and etp ranks. It is scaled by (ranks that hold the expert) / (ranks with different tokens),
    so that the result is the mean over all ranks with different tokens, as for other weights.

    Args:
        paths: paths of the experts of this rank, by the name of their module.
        plan: plan.
        expert_mesh: mesh of the experts.
        lanes: lanes of joint forwards and backwards.
        recomputed: names of the experts that backward recomputes.

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
    for name, path in paths.items():
        experts = path.experts
        names = [parameter for parameter, _ in experts.named_parameters()]
        layouts, innermost = dict.fromkeys(names, TensorLayout("shard")), ep_group
        if p.ep > 1:
            # Gradients that are rounded before the weights are applied would differ from those without recompute.
            without_combine = name in recomputed and row_format is None
            channels = tuple(Channel(group, lanes, counts_group, without_combine, row_format) for group in groups)
            path.exchange = (
                OverReplicas(experts, channels[0], p.expert_slots)
                if balances
                else exchange_of(experts.num_experts, channels)
            )
        if p.etp > 1:
            innermost = expert_mesh.get_group("etp")
            order = packed_layout(experts, p.etp)
            packed |= {experts: order} if order else {}
            for parameter, dim in split_dims(experts).items():
                own_order = order if order and parameter in order.dim else None
                shard_parameter(experts, parameter, (0, dim), expert_mesh["ep", "etp"], own_order)
                layouts[parameter] = TensorLayout("once" if dim is None else "shard")
            assert path.exchange is not None  # a rule of plans: etp only inside of ep
            path.exchange = OverMatrices(path.exchange, Channel(innermost, lanes, row_format=row_format))
        elif p.ep > 1:
            for parameter in names:
                shard_parameter(experts, parameter, 0, expert_mesh["ep"])
        LocalWeights(experts, layouts, innermost, holders / p.gradient_ranks)
    return packed


def spread_experts(build: "Build") -> None:
    """Step of `parallelize`: experts over the ranks of ep and etp; the last part of their path but shared experts."""
    build.begin("spread_experts", "replace_operators", "limit_experts", "relocate_experts", "round_experts")
    if build.expert_mesh is None:
        build.packed = {}
    else:
        recomputed = recomputed_experts(build.full_anatomy, build.plan.memory)
        build.packed = split_experts(build.runtime.experts, build.plan, build.expert_mesh, build.lanes, recomputed)
    for name, path in build.runtime.experts.items():
        if build.plan.parallel.ep > 1 and name in build.choices.late_experts:
            path.linear = late_linear
        path.attach()
