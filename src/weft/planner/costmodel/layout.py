"""Training layout: parallel degrees, batch and memory options, and the layers and parameters of each rank."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

from weft.plan import JOINT_SCHEDULES, ResolvedPlan
from weft.planner.costmodel.shape import Recompute, Shape

EIGHT_BITS = ("fp8", "fp8_block", "fp4")
"""Dtypes of matmuls whose inputs are saved in 8 bits."""
Schedule = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-2p", "zbv", "interleaved-overlap", "dualpipev"]


@dataclass(frozen=True)
class TrainingLayout:
    """All settings of a training run that its step time and memory depend on."""

    seq: int
    global_batch: int
    """Sequences per step."""
    micro_batch: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    """Virtual pipeline stages (model chunks) per pipeline rank."""
    balance_head: bool = False
    """True to balance stages by cost including the head, so that the last stage has fewer layers; else by layer count."""
    cp: int = 1
    ulysses: int = 1
    """Ulysses degree: cp ranks that shard the heads; ring attention runs over the remaining degree cp / ulysses."""
    ep: int = 1
    dp: int = 1
    zero: int = 1
    shard: int = 0
    """Data ranks over which ZeRO shards states; 0: all."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Share of layers with recomputation."""
    rest: Recompute = "none"
    """Recompute mode of the remaining layers."""
    offload: bool = False
    """True to offload activations to the host between forward and backward; the copies are not overlapped."""
    adapters: bool = False
    """True if the weights are frozen and only small adapters (LoRA) are trained."""
    expert_tp: int = 0
    """Expert tensor parallelism: ranks that shard each expert's matrices; 0: tp if ep is 1, else 1."""
    dtype: str = "bf16"
    """Dtype of the matmuls of the layers."""
    schedule: Schedule = "1f1b"
    joint_experts: bool = False
    """True if forwards and backwards of different micro-batches run together, in two lanes (in a pipeline: in joint slots)."""
    expert_slots: int = 0
    """Most experts of other ranks that a rank computes in a layer to even out the load; 0: no replicas."""
    fused_loss: bool = False
    """True if the loss is fused, so that the full logits are never stored in float32."""
    optimizer_on_host: bool = False
    """True to offload optimizer states to the host between updates."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data rank."""
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of the degrees."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one cp rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def splits_backward(self) -> bool:
        """True if the schedule defers the gradients of weights (zero bubble)."""
        return self.schedule.startswith("zb")

    @property
    def ring(self) -> int:
        """Degree of ring attention: cp ranks that pass keys and values on."""
        return self.cp // self.ulysses

    @property
    def etp(self) -> int:
        """Expert tensor-parallel degree."""
        return self.expert_tp or (self.tp if self.ep == 1 else 1)

    @property
    def edp(self) -> int:
        """Expert data-parallel degree: ranks that hold the same experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards the states of the dense (non-expert) parameters."""
        return (self.shard or self.dp) * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards the states of the expert parameters."""
        return max(1, self.shards * self.tp // (self.ep * self.etp))


def layers_of_ranks(shape: Shape, layout: TrainingLayout) -> tuple[int, ...]:
    """Number of layers per pipeline rank; if stages are unequal, the first and the last have fewer.

    With `layout.balance_head`, the total cost including the head is divided into equal parts, one per stage. A layer belongs to
    the stage in which it ends.
    """
    if not layout.balance_head:
        return split_layers(shape.layers, layout.pp, layout.vpp)
    chunks = layout.pp * layout.vpp
    head = shape.vocab * shape.hidden * shape.layers / shape.shared_parameters  # in layers
    each = (shape.layers + head) / chunks
    ends = [min(shape.layers, int((chunk + 1) * each)) for chunk in range(chunks - 1)] + [shape.layers]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(sum(counts[rank :: layout.pp]) for rank in range(layout.pp))


@cache
def split_layers(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Number of layers per pipeline rank, with vpp chunks per rank."""
    chunks = pp * vpp
    each, left = divmod(layers, chunks)
    order = sorted(range(chunks), key=lambda chunk: (chunk in (0, chunks - 1), chunk == chunks - 1, chunk))
    counts = [each] * chunks
    for chunk in order[:left]:
        counts[chunk] += 1
    return tuple(sum(counts[rank::pp]) for rank in range(pp))


def expert_layers(shape: Shape, layout: TrainingLayout, rank: int) -> float:
    """Number of MoE layers of a pipeline rank; the first layers of some models are dense."""
    counts = layers_of_ranks(shape, layout)
    dense = shape.dense_layers if shape.num_mlp == shape.layers else 0
    first = min(counts[0], dense)  # approximation: all dense layers are on the first rank
    rest = shape.num_moe / max(1, shape.layers - dense)
    return rest * (counts[rank] - first * (rank == 0))


def local_parameters(shape: Shape, layout: TrainingLayout, rank: int) -> tuple[float, float]:
    """Dense and expert parameters of a pipeline rank, before ZeRO sharding."""
    share = layers_of_ranks(shape, layout)[rank] / shape.layers
    shared = share * shape.shared_parameters / layout.tp
    if rank == 0:
        shared += shape.embedding_parameters / layout.tp
    if rank == layout.pp - 1 and not (shape.tied and layout.pp == 1):
        shared += shape.vocab * shape.hidden / layout.tp
    layers = expert_layers(shape, layout, rank)
    experts = layers * shape.expert_parameters / (layout.ep * layout.etp)
    return shared, experts


def layout_of(plan: ResolvedPlan, seq: int, global_batch: int, micro_batch: int) -> TrainingLayout:
    """Layout of a resolved plan; a custom pipeline schedule counts as 1F1B.

    Args:
        seq: tokens per sequence.
        global_batch: sequences per step.
        micro_batch: sequences per micro-batch.
    """
    p, order = plan.parallel, plan.pipeline.schedule
    recompute: Recompute = "none"
    if plan.memory.recompute:
        kinds = set(plan.memory.recompute)
        full = "block" in kinds or {"attention", "mlp"} <= kinds
        recompute = "full" if full else "mlp" if "mlp" in kinds else "attention" if "attention" in kinds else "light"
    return TrainingLayout(
        seq=seq,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=p.tp,
        sp=p.sp and p.tp > 1,
        pp=p.pp,
        vpp=plan.pipeline.stages_per_rank,
        cp=p.cp,
        ulysses=p.cp_ulysses,
        ep=p.ep,
        dp=p.data_ranks,
        zero=p.zero,
        shard=p.dp_shard if p.dp_replicate > 1 else 0,
        expert_tp=p.etp,
        recompute=recompute,
        recompute_share=1 / plan.memory.recompute_interval,
        offload=bool(plan.memory.offload),
        dtype="fp32" if plan.precision.param_dtype in ("fp32", "fp64") else "bf16",
        schedule=cast(Schedule, order) if order in get_args(Schedule) else "1f1b",
        joint_experts=p.ep > 1
        and plan.comm.expert_overlap != "off"
        and (order in JOINT_SCHEDULES if p.pp > 1 else plan.comm.expert_overlap == "joint"),
        expert_slots=p.expert_slots if p.expert_balance == "replicate" else 0,
        optimizer_on_host=plan.memory.optimizer_device != "device",
    )
