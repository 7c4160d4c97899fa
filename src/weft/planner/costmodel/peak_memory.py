"""Analytical peak memory of a layout: bytes by term on the pipeline stage with the highest peak."""

from dataclasses import dataclass, field

from weft.planner.costmodel.experts import busiest_rows, held_replicas
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.layout import (
    EIGHT_BITS,
    TrainingLayout,
    expert_layers,
    layers_of_ranks,
    local_parameters,
)
from weft.planner.costmodel.shape import Recompute, Shape, activation_bytes, model_state_bytes_of


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory in bytes of the pipeline stage with the highest peak."""

    stage: int
    states: float
    activations: float
    """Saved activations of all micro-batches in flight."""
    transient: float
    """Peak of the short-lived tensors: logits, gathered layers, one recomputed layer."""
    reserve: float
    """Bytes reserved by the allocator but not allocated (fragmentation)."""
    framework: float
    """Bytes outside the allocator: context and communicators."""

    @property
    def allocated(self) -> float:
        """Peak of allocated bytes, as the allocator counts."""
        return self.states + self.activations + self.transient

    @property
    def reserved(self) -> float:
        """Peak of reserved bytes, as the allocator counts."""
        return self.allocated + self.reserve

    @property
    def total(self) -> float:
        """Peak of used bytes, as the driver counts; must fit on the device."""
        return self.reserved + self.framework


@dataclass(frozen=True)
class LayerActivations:
    """Activation bytes per token, counted by dry runs of a few layers; replaces the formulas."""

    layer: dict[Recompute, float]
    """Bytes saved per layer without tp, by recompute mode."""
    ends: float
    """Peak bytes of logits and loss without tp."""
    unsharded: dict[Recompute, float] = field(default_factory=dict)
    """Bytes saved per layer in full on every tp rank (gathered inputs), by recompute mode."""
    split_ends: float | None = None
    """Peak bytes of logits and loss, summed over the tp ranks of a sharded vocabulary; None: the same as without tp."""

    def kept(self, recompute: Recompute, tp: int) -> float:
        """Bytes saved per layer and token on one tp rank."""
        return self.layer[recompute] / tp + self.unsharded.get(recompute, 0.0) * (1 - 1 / tp)

    def head(self, tp: int) -> float:
        """Peak bytes of logits and loss per token on one tp rank."""
        return (self.ends if tp == 1 or self.split_ends is None else self.split_ends) / tp


def peak_memory(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, traced: LayerActivations | None = None
) -> MemoryEstimate:
    """Memory estimate of the pipeline rank with the highest peak."""
    counts = layers_of_ranks(shape, layout)
    # Among ranks with the same number of layers, the first or the last one holds most; the first two may have dense layers.
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1, *(counts.index(count, 1) for count in set(counts[1:]))}
    if layout.splits_backward:
        ranks |= {layout.pp - 1 - counts[::-1].index(count) for count in set(counts)}
    stages = (stage_memory(shape, layout, stack, rank, traced) for rank in sorted(ranks))
    return max(stages, key=lambda memory: memory.total)


def in_flight(layout: TrainingLayout, rank: int) -> float:
    """Maximum number of micro-batches in flight on a pipeline rank; a chunk's activations count as a fraction of one."""
    p, m = layout.pp, layout.micro_batches
    if p == 1:
        return min(float(m), 2.0 if layout.joint_experts else 1.0)
    warm_up = p - rank + (p - 1 - rank) / layout.vpp if layout.vpp > 1 else float(p - rank)
    held = {
        "gpipe": float(m),
        "zb-h1": float(p),
        "zb-h2": 2.0 * p - 1,
        "zb-2p": 2.0 * p,
        "zbv": float(p),
        "dualpipev": p + 0.5,
        "interleaved-overlap": p - rank + (p - rank) / layout.vpp,
    }.get(layout.schedule, warm_up)
    return min(float(m), held)


def split_in_flight(layout: TrainingLayout, rank: int) -> tuple[float, float, float]:
    """Maximum micro-batches in flight on a pipeline rank of a zero-bubble schedule, which splits the backward in two.

    Returns:
        The maximum of all micro-batches in flight, of those before the gradient of their input, and of those between the
        gradient of their input and the gradients of the weights.
    """
    p, m = layout.pp, float(layout.micro_batches)
    both, inputs, matrices = {
        "zb-h1": (p, p - rank, rank + 1),
        "zb-h2": (2 * p - 1, 2 * (p - rank) - 1, 2 * rank + 1),
        "zb-2p": (2 * p, 2 * (p - rank) - 1, p + rank + 1),
        "zbv": (p, p, rank + 0.5),
    }[layout.schedule]
    return min(m, both), min(m, inputs), min(m, matrices)


def waiting_bytes(shape: Shape, layout: TrainingLayout) -> float:
    """Bytes saved per mean layer and micro-batch for deferred weight gradients: inputs and output gradients of the matmuls.

    Weight gradients of experts are computed at once, so they need none.
    """
    keys = shape.heads * shape.head_dim + shape.v_width if shape.kv_lora else 2 * shape.kv_width
    attention = shape.q_width + shape.v_width + keys + 2 * (shape.q_lora + shape.kv_lora)
    dense, shared = shape.num_mlp - shape.num_moe, shape.num_moe * (shape.shared_ffn > 0)
    split = shape.num_attention * attention + shape.matrices * (dense * shape.ffn + shared * shape.shared_ffn)
    unsharded = 2 * shape.hidden * (shape.num_attention + dense + shared)
    return 2 * layout.tokens * (split / layout.tp + unsharded) / shape.layers


def held_activations(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, each: float) -> float:
    """Peak bytes of saved activations on a pipeline rank, between two actions of the schedule.

    Args:
        rank: pipeline rank.
        each: bytes saved per layer and micro-batch.
    """
    count = layers_of_ranks(shape, layout)[rank]
    if not stack.fsdp2_units or not layout.splits_backward:
        if layout.offload:  # of one block in forward, and of one in backward
            return 2 * each
        return in_flight(layout, rank) * count * each
    wait = waiting_bytes(shape, layout)
    both, inputs, matrices = split_in_flight(layout, rank)
    # As many as possible of the kind that holds more, then of the other kind. The micro-batch in backward counts as transient.
    waiting = min(matrices, both - 1 if wait > each else both - inputs)
    kept = 2 * each if layout.offload else min(inputs, both - waiting) * count * each
    return kept + waiting * count * wait


def layer_bytes(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, recompute: Recompute) -> float:
    """Activation bytes that the mean layer saves per micro-batch."""
    tokens, h = layout.tokens, shape.hidden
    if recompute == "selective" and stack.selective_half:
        return (layer_bytes(shape, layout, stack, "none") + layer_bytes(shape, layout, stack, "full")) / 2
    dense, local = shape.all_dense, layout.seq // layout.cp
    kept = activation_bytes(dense, local, layout.micro_batch, layout.tp, layout.sp, recompute, stack.flash)
    if not stack.dropout and not shape.gated and recompute != "full":
        kept -= 2 * tokens * h / (layout.tp if layout.sp else 1)
    if not stack.dropout and not stack.flash and recompute in ("none", "light", "mlp"):  # no dropout mask and output
        kept -= 3 * shape.heads * local * tokens / layout.tp
    if layout.sp and not stack.regathers_inputs and recompute != "full":
        kept += 2 * tokens * h * (1 - 1 / layout.tp)
    if shape.kv_lora and recompute not in ("full", "attention"):
        kept += tokens * 2 * (shape.q_lora + shape.kv_lora)
    if shape.num_moe and recompute not in ("full", "mlp"):
        kept += shape.num_moe / shape.layers * _moe_bytes(shape, layout, stack, recompute)
    if layout.dtype in EIGHT_BITS and recompute != "full":  # inputs of matmuls are saved in 8 bits
        kept_inputs = 2 * h / (layout.tp if layout.sp else 1) + dense.ffn / layout.tp
        kept -= tokens * kept_inputs * (recompute in ("none", "selective"))
    return kept


def _moe_bytes(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, recompute: Recompute) -> float:
    """Activation bytes that the experts and the router of an MoE layer save per micro-batch."""
    width = shape.latent or shape.hidden
    row = 4 * width + 2 * (shape.matrices) * shape.expert_ffn / layout.etp
    if recompute in ("light", "attention"):
        row = 2 * width + 2 * (shape.matrices - 1) * shape.expert_ffn / layout.etp
    if layout.dtype in EIGHT_BITS and stack.casts_experts and recompute in ("none", "selective"):
        row -= width + shape.expert_ffn / layout.etp  # inputs of both grouped matmuls in 8 bits
    return busiest_rows(shape, layout, stack) * row + 8 * layout.tokens / layout.tp * shape.experts


def rank_states(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int) -> float:
    """Bytes of weights, gradients and optimizer states on one pipeline rank."""
    shared, experts = local_parameters(shape, layout, rank)
    weights = 0.0 if layout.zero == 3 and not stack.shards_hold_copy else stack.weight_bytes
    # With pp, full gradients (and gathered weights) stay until the last micro-batch. FSDP2 allocates sharded gradients only
    # when it frees the full ones.
    full_gradients = layout.pp > 1 and layout.zero >= 2
    shards = 0.0 if full_gradients and stack.fsdp2_units else stack.gradient_bytes
    sizes = (weights, shards, stack.resident_optimizer_bytes if layout.optimizer_on_host else stack.optimizer_bytes)
    states = model_state_bytes_of(shared, layout.zero, layout.shards, *sizes)
    states += model_state_bytes_of(experts, layout.zero, layout.expert_shards, *sizes)
    if layout.adapters:
        states = stack.weight_bytes * (shared + experts)
    if full_gradients:
        states += (stack.reduce_bytes + 2 * (layout.zero >= 3)) * (shared + experts)
    if layout.zero <= 1 and layout.dp * layout.cp > 1 and (layout.zero == 1 or stack.zero == 0):
        states += stack.update_buffer_bytes * (shared + experts)
    if layout.zero == 1:
        states += stack.reduced_gradient_bytes * (shared / layout.shards + experts / layout.expert_shards)
    return states


def replica_memory(shape: Shape, layout: TrainingLayout, rank: int) -> float:
    """Most bytes of the weights of replicas of hot experts that a pipeline rank keeps from forward to backward.

    They are saved like activations, for each MoE layer and micro-batch in flight. A recompute sends them again.
    """
    kept_share = 1 - layout.recompute_share * (layout.recompute in ("mlp", "full"))
    layers = 2.0 if layout.offload else in_flight(layout, rank) * expert_layers(shape, layout, rank)
    return kept_share * layers * held_replicas(shape, layout)


def stage_memory(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, traced: LayerActivations | None = None
) -> MemoryEstimate:
    """Memory estimate of one pipeline rank."""

    def kept(recompute: Recompute) -> float:
        if traced:
            return traced.kept(recompute, layout.tp) * layout.tokens
        return layer_bytes(shape, layout, stack, recompute)

    states = rank_states(shape, layout, stack, rank)
    each = kept(layout.recompute)
    if layout.recompute_share < 1:
        each = layout.recompute_share * each + (1 - layout.recompute_share) * kept(layout.rest)
    activations = held_activations(shape, layout, stack, rank, each)
    activations += replica_memory(shape, layout, rank)
    layer = head = 0.0
    if layout.recompute in ("attention", "mlp", "full"):
        layer = kept("none") - kept(layout.recompute) * (layout.recompute != "full")
    if stack.fsdp2_units and layout.splits_backward:  # the micro-batch in backward keeps what its weight gradients need
        layer += max(0.0, layers_of_ranks(shape, layout)[rank] * (waiting_bytes(shape, layout) - each))
    if layout.sp and layout.tp > 1:  # in backward: re-gathered input, gradient of the output, gradient of the input
        layer += 6 * layout.tokens * shape.hidden
    if rank == layout.pp - 1:
        head = layout.tokens * shape.vocab / layout.tp * (4 if layout.fused_loss else stack.logit_bytes)
        head = traced.head(layout.tp) * layout.tokens if traced else head
        head += 4 * layout.tokens * shape.hidden / (layout.tp if layout.sp else 1)
    layer += 2 * held_replicas(shape, layout)  # in forward as received and in slots, in backward as gradients
    transient = fullest_moment(shape, layout, stack, rank, layer, head)
    reserve = (stack.reserve - 1) * (states + activations + transient)
    return MemoryEstimate(rank, states, activations, transient, reserve, stack.framework)


def fullest_moment(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, layer: float, head: float
) -> float:
    """Peak bytes of short-lived tensors.

    Args:
        rank: pipeline rank.
        layer: short-lived activation bytes of one layer.
        head: short-lived activation bytes of head and loss.
    """
    each = sum(local_parameters(shape, layout, rank)) / max(1, layers_of_ranks(shape, layout)[rank])
    gathered = 2 * 2 * each if layout.zero >= 3 else 0.0
    if layout.pp == 1 and layout.joint_experts:  # of the block in forward and of the one in backward
        gathered *= 2
    if not stack.fsdp2_units:
        return max(layer, head) + gathered
    if layout.pp > 1:  # gathered weights and full gradients count as states
        return max(layer, head)
    # The head's tensors are freed when the first block is gathered. Gradients are full until they are reduced: of two blocks
    # if the weights stay gathered (ZeRO 2).
    gradients = stack.gradient_bytes if layout.zero >= 2 else 0.0
    ends = shape.vocab * shape.hidden / layout.tp
    of_layer = layer + gathered + gradients * (2 if layout.zero == 2 else 1) * each
    return max(of_layer, head + (gradients + 2 * (layout.zero >= 3)) * ends)
