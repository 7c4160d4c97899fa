"""A layout: how a model is trained, as far as step time and memory depend on it, and what each rank of it holds."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

from weft.errors import PlanError
from weft.plan import Plan
from weft.planner.costmodel.shape import Recompute, Shape

Schedule = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-2p", "zbv"]


@dataclass(frozen=True)
class TrainingLayout:
    """How a model is trained, as far as time and memory depend on it."""

    seq: int
    global_batch: int
    """Sequences."""
    micro_batch: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    """Chunks of a rank."""
    head_counts: bool = False
    """Whether stages are cut by cost, so that the last has fewer layers for the head; else by number of layers."""
    cp: int = 1
    ulysses: int = 1
    """Of cp, ranks that share heads; the others are a ring."""
    ep: int = 1
    dp: int = 1
    zero: int = 1
    shard: int = 0
    """Data ranks that share states; 0: all."""
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    """Of layers, those that compute again."""
    rest: Recompute = "none"
    """What the other layers compute again."""
    offload: bool = False
    """Whether activations wait on the host between forward and backward, and computation for them."""
    adapters: bool = False
    """Whether the weights are frozen and only small adapters (LoRA) are trained."""
    expert_tp: int = 0
    """Ranks that share each expert's matrices; 0: those of tp where there is no ep, and else 1."""
    number: str = "bf16"
    """Format of the products of layers."""
    schedule: Schedule = "1f1b"
    fused_loss: bool = False
    """Whether logits are never whole in float32."""
    optimizer_on_host: bool = False
    """Whether states of the optimizer wait on the host between updates."""

    @property
    def micro_batches(self) -> int:
        """Of a step, on each data rank."""
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def num_devices(self) -> int:
        """Product of the degrees."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank of cp."""
        return self.micro_batch * self.seq // self.cp

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of matrices come later than those of inputs."""
        return self.schedule.startswith("zb")

    @property
    def ring(self) -> int:
        """Ranks of cp that pass keys and values around."""
        return self.cp // self.ulysses

    @property
    def etp(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tp or (self.tp if self.ep == 1 else 1)

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    @property
    def shards(self) -> int:
        """Ranks that share the states of what every token meets, under ZeRO."""
        return (self.shard or self.dp) * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks that share the states of one part of the experts, under ZeRO."""
        return max(1, self.shards * self.tp // (self.ep * self.etp))


def check(shape: Shape, layout: TrainingLayout) -> None:
    """Refuse what no library can run.

    Raises:
        PlanError: a degree does not divide what it splits.
    """
    rules = (
        (
            layout.pp * layout.vpp > shape.layers,
            f"{layout.pp} x {layout.vpp} stages of {shape.layers} layers",
            "a stage has a layer",
        ),
        (shape.heads % layout.tp > 0, f"tp {layout.tp} does not divide {shape.heads} heads", "ranks of tp share heads"),
        (
            bool(shape.experts) and shape.experts % layout.ep > 0,
            f"ep {layout.ep} of {shape.experts} experts",
            "ranks share experts",
        ),
        (
            layout.seq % (2 * layout.cp) > 0 and layout.cp > 1,
            f"cp {layout.cp} of {layout.seq} tokens",
            "ranks of cp share tokens",
        ),
    )
    for broken, what, rule in rules:
        if broken:
            raise PlanError(what, where="layout", rule=rule, fix="choose a degree that divides it")


def layers_of_ranks(shape: Shape, layout: TrainingLayout) -> tuple[int, ...]:
    """Layers of each rank of pp; where stages are not equal, the first and the last have fewer.

    Where the head counts, a layer belongs to the stage in which the cost up to its end falls, of equal parts of the whole cost.
    """
    if not layout.head_counts:
        return split_layers(shape.layers, layout.pp, layout.vpp)
    chunks = layout.pp * layout.vpp
    head = shape.vocab * shape.hidden * shape.layers / shape.shared_parameters  # in layers
    each = (shape.layers + head) / chunks
    ends = [min(shape.layers, int((chunk + 1) * each)) for chunk in range(chunks - 1)] + [shape.layers]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(sum(counts[rank :: layout.pp]) for rank in range(layout.pp))


@cache
def split_layers(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each rank of pp, of vpp equal chunks each."""
    chunks = pp * vpp
    each, left = divmod(layers, chunks)
    order = sorted(range(chunks), key=lambda chunk: (chunk in (0, chunks - 1), chunk == chunks - 1, chunk))
    counts = [each] * chunks
    for chunk in order[:left]:
        counts[chunk] += 1
    return tuple(sum(counts[rank::pp]) for rank in range(pp))


def expert_layers(shape: Shape, layout: TrainingLayout, rank: int) -> float:
    """Layers with experts of a rank of pp: the first layers of some models have none."""
    counts = layers_of_ranks(shape, layout)
    dense = shape.dense_layers if shape.num_mlp == shape.layers else 0
    first = min(counts[0], dense)  # as good as always they are fewer than the first rank has
    rest = shape.num_moe / max(1, shape.layers - dense)
    return rest * (counts[rank] - first * (rank == 0))


def local_parameters(shape: Shape, layout: TrainingLayout, rank: int) -> tuple[float, float]:
    """Parameters of a rank of pp, unsharded by data ranks: those that every token meets, and those of experts."""
    share = layers_of_ranks(shape, layout)[rank] / shape.layers
    shared = share * shape.shared_parameters / layout.tp
    if rank == 0:
        shared += shape.embedding_parameters / layout.tp
    if rank == layout.pp - 1 and not (shape.tied and layout.pp == 1):
        shared += shape.vocab * shape.hidden / layout.tp
    layers = expert_layers(shape, layout, rank)
    experts = layers * shape.expert_parameters / (layout.ep * layout.etp)
    return shared, experts


def layout_of(plan: Plan, seq: int, global_batch: int, micro_batch: int) -> TrainingLayout:
    """The layout of a resolved plan; a schedule of one's own counts as 1F1B.

    Args:
        seq: tokens of a sequence.
        global_batch: sequences of a step.
        micro_batch: sequences of a micro-batch.
    """
    p, order = plan.parallel, plan.pipeline.schedule
    recompute: Recompute = "none"
    if plan.memory.recompute:
        kinds = set(plan.memory.recompute)
        whole = "block" in kinds or {"attention", "mlp"} <= kinds
        recompute = "full" if whole else "mlp" if "mlp" in kinds else "attention" if "attention" in kinds else "light"
    return TrainingLayout(
        seq=seq,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=p.tp,
        sp=p.sp and p.tp > 1,
        pp=p.pp,
        vpp=plan.pipeline.stages_a_rank,
        cp=p.cp,
        ulysses=p.cp_ulysses,
        ep=p.ep,
        dp=p.data_ranks,
        zero=p.zero,
        shard=p.dp_shard if p.dp_replicate > 1 else 0,
        expert_tp=1,
        recompute=recompute,
        recompute_share=1 / plan.memory.recompute_interval,
        offload=bool(plan.memory.offload),
        number="fp32" if plan.precision.param_dtype in ("fp32", "fp64") else "bf16",
        schedule=cast(Schedule, order) if order in get_args(Schedule) else "1f1b",
        optimizer_on_host=plan.memory.optimizer_device != "device",
    )
