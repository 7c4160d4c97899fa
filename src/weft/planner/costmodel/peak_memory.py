"""Peak memory of a layout, by formula: of the fullest stage, by term."""

from dataclasses import dataclass, field

from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.layout import TrainingLayout, layers_of_ranks, local_parameters
from weft.planner.costmodel.shape import Recompute, Shape, activation_bytes, model_state_bytes_of


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest stage."""

    stage: int
    states: float
    activations: float
    """In flight."""
    transient: float
    """The largest of what lives for a moment: logits, gathered layers, one layer computed again."""
    reserve: float
    """What the allocator has reserved and nobody uses."""
    framework: float
    """Outside the allocator."""

    @property
    def allocated(self) -> float:
        """As an allocator counts at its fullest moment."""
        return self.states + self.activations + self.transient

    @property
    def reserved(self) -> float:
        """With what the allocator holds in vain."""
        return self.allocated + self.reserve

    @property
    def total(self) -> float:
        """As the driver counts; what must fit on the device."""
        return self.reserved + self.framework


@dataclass(frozen=True)
class Traced:
    """What dry runs of a few layers have counted, in the place of formulas: bytes of activations for a token, whole."""

    layer: dict[Recompute, float]
    """That a layer keeps, by what it computes again."""
    ends: float
    """Of logits and loss at their fullest moment."""
    whole: dict[Recompute, float] = field(default_factory=dict)
    """That a layer keeps on every rank of tp, beside its share of the others: inputs that were gathered."""
    split_ends: float | None = None
    """Of logits and loss of all ranks of tp, where these share the vocabulary; None: as many as without tp."""

    def kept(self, recompute: Recompute, tp: int) -> float:
        """Of a layer, for a token, on a rank of tp."""
        return self.layer[recompute] / tp + self.whole.get(recompute, 0.0) * (1 - 1 / tp)

    def head(self, tp: int) -> float:
        """Of logits and loss, for a token, on a rank of tp."""
        return (self.ends if tp == 1 or self.split_ends is None else self.split_ends) / tp


def peak_memory(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, traced: Traced | None = None
) -> MemoryEstimate:
    """Bytes of the fullest rank of pp."""
    counts = layers_of_ranks(shape, layout)
    # Of ranks with as many layers the first holds most, or the last; the first two may have layers without experts.
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1, *(counts.index(count, 1) for count in set(counts[1:]))}
    if layout.splits_backward:
        ranks |= {layout.pp - 1 - counts[::-1].index(count) for count in set(counts)}
    stages = (stage_memory(shape, layout, stack, rank, traced) for rank in sorted(ranks))
    return max(stages, key=lambda memory: memory.total)


def in_flight(layout: TrainingLayout, rank: int) -> float:
    """Micro-batches whose activations a rank of pp holds at most, in those of all its layers."""
    p, m = layout.pp, layout.micro_batches
    if p == 1:
        return 1.0
    held = {"gpipe": float(m), "zb-h1": float(p), "zb-h2": 2.0 * p - 1, "zb-2p": 2.0 * p, "zbv": float(p)}.get(
        layout.schedule, float(p - rank)
    )
    if layout.vpp > 1 and layout.schedule != "zbv":
        held = p - rank + (p - 1 - rank) / layout.vpp
    return min(float(m), held)


def split_in_flight(layout: TrainingLayout, rank: int) -> tuple[float, float, float]:
    """As `in_flight`, where gradients of matrices come later than those of inputs: micro-batches that a rank holds at most of
    both kinds, of those that wait for the gradient of their input, and of those that wait for gradients of matrices."""
    p, m = layout.pp, float(layout.micro_batches)
    both, inputs, matrices = {
        "zb-h1": (p, p - rank, rank + 1),
        "zb-h2": (2 * p - 1, 2 * (p - rank) - 1, 2 * rank + 1),
        "zb-2p": (2 * p, 2 * (p - rank) - 1, p + rank + 1),
        "zbv": (p, p, rank + 0.5),
    }[layout.schedule]
    return min(m, both), min(m, inputs), min(m, matrices)


def waiting_bytes(shape: Shape, layout: TrainingLayout) -> float:
    """Of the mean layer and a micro-batch, inputs and output gradients of matrices that wait for their product. Experts have
    theirs at once."""
    keys = shape.heads * shape.head_dim + shape.v_width if shape.kv_lora else 2 * shape.kv_width
    attention = shape.q_width + shape.v_width + keys + 2 * (shape.q_lora + shape.kv_lora)
    dense, shared = shape.num_mlp - shape.num_moe, shape.num_moe * (shape.shared_ffn > 0)
    split = shape.num_attention * attention + shape.matrices * (dense * shape.ffn + shared * shape.shared_ffn)
    whole = 2 * shape.hidden * (shape.num_attention + dense + shared)
    return 2 * layout.tokens * (split / layout.tp + whole) / shape.layers


def held_activations(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, each: float) -> float:
    """Bytes of activations that a rank of pp holds between its actions, where a layer keeps so many of a micro-batch."""
    count = layers_of_ranks(shape, layout)[rank]
    if not stack.units or not layout.splits_backward:
        return 2 * each if layout.offload else in_flight(layout, rank) * count * each
    wait = waiting_bytes(shape, layout)
    both, inputs, matrices = split_in_flight(layout, rank)
    # As many as can be of those that hold more, and then of the others; what is transient is of one whose gradients come now.
    waiting = min(matrices, both - 1 if wait > each else both - inputs)
    kept = 2 * each if layout.offload else min(inputs, both - waiting) * count * each
    return kept + waiting * count * wait


def layer_bytes(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, recompute: Recompute) -> float:
    """Activations that the mean layer keeps of a micro-batch."""
    tokens, h = layout.tokens, shape.hidden
    if recompute == "selective" and stack.halves:
        return (layer_bytes(shape, layout, stack, "none") + layer_bytes(shape, layout, stack, "full")) / 2
    dense, local = shape.all_dense, layout.seq // layout.cp
    kept = activation_bytes(dense, local, layout.micro_batch, layout.tp, layout.sp, recompute, stack.flash)
    if not stack.dropout and not shape.gated and recompute != "full":
        kept -= 2 * tokens * h / (layout.tp if layout.sp else 1)
    if not stack.dropout and not stack.flash and recompute in ("none", "light", "mlp"):  # no mask, no second copy
        kept -= 3 * shape.heads * local * tokens / layout.tp
    if layout.sp and not stack.gathers_again and recompute != "full":
        kept += 2 * tokens * h * (1 - 1 / layout.tp)
    if shape.kv_lora and recompute not in ("full", "attention"):
        kept += tokens * 2 * (shape.q_lora + shape.kv_lora)
    if shape.num_moe and recompute not in ("full", "mlp"):
        routed = tokens / (layout.tp // layout.etp) * shape.top_k * (stack.imbalance if layout.ep > 1 else 1.0)
        row = 4 * (shape.latent or h) + 2 * (shape.matrices) * shape.expert_ffn / layout.etp
        if recompute in ("light", "attention"):
            row = 2 * (shape.latent or h) + 2 * (shape.matrices - 1) * shape.expert_ffn / layout.etp
        kept += shape.num_moe / shape.layers * (routed * row + 8 * tokens / layout.tp * shape.experts)
    if layout.number in ("fp8", "fp4") and recompute != "full":  # inputs of products are kept in 8 bits
        kept_inputs = 2 * h / (layout.tp if layout.sp else 1) + dense.ffn / layout.tp
        kept -= tokens * kept_inputs * (recompute in ("none", "selective"))
    return kept


def rank_states(shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int) -> float:
    """Bytes of weights, gradients and optimizer of one rank of pp."""
    shared, experts = local_parameters(shape, layout, rank)
    weights = 0.0 if layout.zero == 3 and not stack.shards_hold_copy else stack.weights
    whole = layout.pp > 1 and layout.zero >= 2  # gradients, and gathered weights, until the last micro-batch
    shards = 0.0 if whole and stack.units else stack.gradients  # which come when the whole ones go
    sizes = (weights, shards, stack.stays if layout.optimizer_on_host else stack.optimizer)
    states = model_state_bytes_of(shared, layout.zero, layout.shards, *sizes)
    states += model_state_bytes_of(experts, layout.zero, layout.expert_shards, *sizes)
    if layout.adapters:
        states = stack.weights * (shared + experts)
    if whole:
        states += (stack.reduce + 2 * (layout.zero >= 3)) * (shared + experts)
    if layout.zero <= 1 and layout.dp * layout.cp > 1 and (layout.zero == 1 or stack.zero == 0):
        states += stack.update_buffer * (shared + experts)
    if layout.zero == 1:
        states += stack.reduced * (shared / layout.shards + experts / layout.expert_shards)
    return states


def stage_memory(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, traced: Traced | None = None
) -> MemoryEstimate:
    """Bytes of one rank of pp."""

    def kept(recompute: Recompute) -> float:
        if traced:
            return traced.kept(recompute, layout.tp) * layout.tokens
        return layer_bytes(shape, layout, stack, recompute)

    states = rank_states(shape, layout, stack, rank)
    each = kept(layout.recompute)
    if layout.recompute_share < 1:
        each = layout.recompute_share * each + (1 - layout.recompute_share) * kept(layout.rest)
    activations = held_activations(shape, layout, stack, rank, each)
    layer = head = 0.0
    if layout.recompute in ("attention", "mlp", "full"):
        layer = kept("none") - kept(layout.recompute) * (layout.recompute != "full")
    if layout.sp and layout.tp > 1:  # in backward: an input gathered again, the output's gradient, and the input's
        layer += 6 * layout.tokens * shape.hidden
    if rank == layout.pp - 1:
        head = layout.tokens * shape.vocab / layout.tp * (4 if layout.fused_loss else stack.logits)
        head = traced.head(layout.tp) * layout.tokens if traced else head
        head += 4 * layout.tokens * shape.hidden / (layout.tp if layout.sp else 1)
    transient = fullest_moment(shape, layout, stack, rank, layer, head)
    reserve = (stack.reserve - 1) * (states + activations + transient)
    return MemoryEstimate(rank, states, activations, transient, reserve, stack.framework)


def fullest_moment(
    shape: Shape, layout: TrainingLayout, stack: FrameworkModel, rank: int, layer: float, head: float
) -> float:
    """Bytes of what lives for a moment, where one layer and the head hold so many of activations."""
    each = sum(local_parameters(shape, layout, rank)) / max(1, layers_of_ranks(shape, layout)[rank])
    gathered = 2 * 2 * each if layout.zero >= 3 else 0.0
    if not stack.units:
        return max(layer, head) + gathered
    if layout.pp > 1:  # all is gathered, and gradients are whole
        return max(layer, head)
    # What the head holds is gone when the first block is gathered. Before they are reduced, gradients are whole: of two blocks
    # where weights stay.
    gradients = stack.gradients if layout.zero >= 2 else 0.0
    ends = shape.vocab * shape.hidden / layout.tp
    of_layer = layer + gathered + gradients * (2 if layout.zero == 2 else 1) * each
    return max(of_layer, head + (gradients + 2 * (layout.zero >= 3)) * ends)
