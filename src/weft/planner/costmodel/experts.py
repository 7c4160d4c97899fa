"""Cost of what hides and balances the messages of experts: joint forwards and backwards, and replicas of hot experts.

Replicas (`weft.parallel.experts.replicas`) even out the rows of ranks. Each sends the weights of an expert, and its gradients
back, both in the dtype of the weights; it saves four messages of a row for each copy that its rank computes for itself.
"""

from weft.planner.costmodel import network
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape

SENT_REPLICAS = 2.5
"""Replicas that the busiest home sends, in a layer and micro-batch, at an imbalance of 1.3 to 1.5 on 8 to 64 ranks."""
PLAN_SECONDS = 30e-6, 11e-6
"""Host seconds for the plan of replicas of a layer: constant, and per rank of ep (`benchmarks/moe_balance.py`)."""
HANDOVER_SECONDS = 17e-6
"""Host seconds of a hand-over between two lanes, measured on a CPU."""


def imbalance(layout: TrainingLayout, stack: FrameworkModel) -> float:
    """Rows of the busiest rank of ep relative to the mean."""
    if layout.ep == 1:
        return 1.0
    return stack.balanced_imbalance if layout.expert_slots else stack.imbalance


def busiest_rows(shape: Shape, layout: TrainingLayout, stack: FrameworkModel) -> float:
    """Rows that the experts of the busiest rank compute, in a layer and micro-batch."""
    return layout.tokens * layout.etp / layout.tp * shape.top_k * imbalance(layout, stack)


def replica_bytes(shape: Shape) -> float:
    """Bytes of the weights of one expert in 16 bits: of a replica's message in forward, and of its gradients in backward."""
    return 2.0 * shape.expert_parameters / max(1, shape.experts)


def rows_that_pay(shape: Shape) -> float:
    """Rows of one rank for one expert above which computing them at home sends fewer bytes than a replica of the expert.

    Weights and their gradients cost 2 x matrices x hidden x expert_ffn elements. A copy that stays at home saves a row in
    dispatch, in combine, and in the backward of both: 4 x hidden elements. A recompute sends half of both again.
    """
    return 2 * replica_bytes(shape) / (4 * 2.0 * (shape.latent or shape.hidden))


def replica_times(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel
) -> tuple[float, float]:
    """Seconds that replicas cost an MoE layer in forward and in backward, without recompute: messages and their plan.

    The weights are sent before the rows, over the same links, and no lane hands over while it waits for them.
    """
    if not layout.expert_slots or layout.ep == 1:
        return 0.0, 0.0
    ranks = network.group(cluster, layout.ep, layout.etp)
    sent = min(SENT_REPLICAS, layout.ep - 1.0) * replica_bytes(shape)
    one = network.all_to_all(
        ranks, sent * layout.ep / (layout.ep - 1), 1.0, stack.ep_intra_node_rate, stack.ep_inter_node_rate
    )
    constant, per_rank = PLAN_SECONDS
    return one + constant + per_rank * layout.ep, one


def held_replicas(shape: Shape, layout: TrainingLayout) -> float:
    """Bytes of the weights of replicas that an MoE layer keeps from the forward to the backward of a micro-batch."""
    size = 2.0 if layout.dtype == "fp32" else 1.0
    return layout.expert_slots * size * replica_bytes(shape) if layout.ep > 1 else 0.0


def hides_messages(layout: TrainingLayout, cluster: ClusterSpec) -> bool:
    """True if lanes hide messages of experts: ranks of one CPU host exchange rows on the cores that would compute."""
    ranks = network.group(cluster, layout.ep, layout.etp)
    return layout.joint_experts and layout.ep > 1 and (cluster.device.name != "CPU" or ranks.hosts > 1)


def hidden_wait(wait: float, moe_share: float, stack: FrameworkModel) -> float:
    """Seconds by which lanes shorten the waits for rows of a forward or a backward of the mean layer.

    Overlapped computation is slower, and each of the two waits (dispatch and combine) costs a hand-over.

    Args:
        wait: seconds of the messages.
        moe_share: share of the layers that have experts.
    """
    return max(0.0, wait * (2 - stack.overlap_slowdown) - 2 * moe_share * HANDOVER_SECONDS)
