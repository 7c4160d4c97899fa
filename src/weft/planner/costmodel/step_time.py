"""Step time of a layout on a cluster, by formula, in about a millisecond: to rank candidates by.

A micro-batch's forward and backward through each stage are added up from kernels (`roofline.py`) and the messages beside them
(`network.py`); the schedule turns them into a step; then come gradients and the optimizer. Each term is kept, so that a plan
can be explained.
"""

from dataclasses import dataclass
from typing import NamedTuple

from weft.planner.costmodel import network, roofline
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout, layers_of_ranks, local_parameters
from weft.planner.costmodel.network import exposed
from weft.planner.costmodel.peak_memory import layer_bytes
from weft.planner.costmodel.shape import Shape

# Between which factors of a predicted step time nine of ten measured ones lie, with a run of the machine and library that
# calibrates and without, as `benchmarks/published` finds of published runs.
CALIBRATED, UNCALIBRATED = (0.84, 1.4), (0.8, 1.4)


class Two(NamedTuple):
    """Seconds of forward and of backward."""

    forward: float
    backward: float

    def plus(self, other: "Two") -> "Two":
        """Both sums."""
        return Two(self.forward + other.forward, self.backward + other.backward)

    def times(self, forward: float, backward: float | None = None) -> "Two":
        """Both products."""
        return Two(self.forward * forward, self.backward * (forward if backward is None else backward))

    @property
    def sum(self) -> float:
        """Of both."""
        return self.forward + self.backward


NOTHING = Two(0.0, 0.0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they consist of on the busiest rank."""

    compute: float
    """Products, attention, element-wise work of all micro-batches."""
    tp: float
    cp: float
    ep: float
    zero: float
    """Of weights that are gathered for each layer, as far as computation does not hide them."""
    pipeline: float
    """Bubble, uneven stages and messages between stages."""
    gradients: float
    """Reduced, and weights gathered, as far as nothing hides them."""
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class LayerTime:
    """Seconds of the mean layer, for one micro-batch on one rank."""

    compute: Two
    tp: Two
    cp: Two
    ep: Two
    weights: float
    """Of compute.backward, for gradients of weights."""

    @property
    def whole(self) -> Two:
        """With its messages."""
        return self.compute.plus(self.tp).plus(self.cp).plus(self.ep)


def product(cluster: ClusterSpec, m: float, n: float, k: float, number: str, experts: float = 0) -> Two:
    """Seconds of [m, k] x [k, n] and of its two gradients; with experts, m rows spread over them."""
    d = cluster.device
    if experts:
        rows = max(1.0, m / experts)
        forward = roofline.grouped(d, m, experts, n, k, number)
        return Two(
            forward, roofline.grouped(d, m, experts, k, n, number) + roofline.matmul(d, k, n, rows, number, experts)
        )
    forward = roofline.matmul(d, m, n, k, number)
    return Two(forward, roofline.matmul(d, m, k, n, number) + roofline.matmul(d, k, n, m, number))


def attention_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel
) -> tuple[Two, Two]:
    """Seconds of the matrices of attention, and of attention itself."""
    tokens, tp, h, number = layout.tokens, layout.tp, shape.hidden, layout.number
    if shape.kv_lora:
        low = product(cluster, tokens, shape.q_lora + shape.kv_lora + shape.rope_dim, h, number)
        queries = product(cluster, tokens, shape.q_width / tp, shape.q_lora or h, number)
        keys = product(cluster, tokens, (shape.heads * shape.head_dim + shape.v_width) / tp, shape.kv_lora, number)
        into = low.plus(queries).plus(keys)
    else:
        into = product(cluster, tokens, (shape.q_width + 2 * max(shape.kv_width, tp * shape.head_dim)) / tp, h, number)
    matrices = into.plus(product(cluster, tokens, h, shape.v_width / tp, number))
    device, heads = cluster.device, shape.heads / tp
    if stack.flash:
        flops = tokens * shape.attention_flops(layout.seq) / tp
        core = roofline.flash_attention(device, flops, shape.head_dim, layout.seq / layout.ring, stack.portable)
        core *= stack.ring if layout.ring > 1 else 1.0
        return matrices, Two(core, core * 2.5 * 1.15)  # five products for two, at a lower rate
    forward = roofline.plain_attention(device, tokens, layout.seq, heads, shape.head_dim, False, stack.dropout)
    backward = roofline.plain_attention(device, tokens, layout.seq, heads, shape.head_dim, True, stack.dropout)
    return matrices, Two(forward, backward)


def mlp_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> Two:
    """Seconds of the mean layer's feed-forward parts, dense and of experts."""
    tokens, tp, h, number = layout.tokens, layout.tp, shape.hidden, layout.number
    wide = shape.matrices - 1
    total = NOTHING
    if shape.num_mlp > shape.num_moe:
        dense = product(cluster, tokens, wide * shape.ffn / tp, h, number).plus(
            product(cluster, tokens, h, shape.ffn / tp, number)
        )
        total = total.plus(dense.times((shape.num_mlp - shape.num_moe) / shape.layers))
    if shape.num_moe:
        routed = tokens / (tp // layout.etp) * shape.top_k * (stack.imbalance if layout.ep > 1 else 1.0)
        experts, width = shape.experts / layout.ep, shape.latent or h
        moe = product(cluster, routed, wide * shape.expert_ffn / layout.etp, width, number, experts)
        moe = moe.plus(product(cluster, routed, width, shape.expert_ffn / layout.etp, number, experts))
        if shape.shared_ffn:
            moe = moe.plus(product(cluster, tokens, wide * shape.shared_ffn / tp, h, number))
            moe = moe.plus(product(cluster, tokens, h, shape.shared_ffn / tp, number))
        if shape.latent:
            moe = moe.plus(product(cluster, tokens / tp, shape.latent, h, "bf16").times(2))
        moe = moe.plus(product(cluster, tokens / tp, shape.experts, h, "bf16"))
        # Rows are put in the experts' order and back; router in float32.
        moved = routed * (stack.rows * width + 6 * shape.expert_ffn / layout.etp) + tokens / tp * shape.experts * 24
        if shape.expert_biases:  # no kernel has them: added, clamped, and activated apart, in a pass each
            moved += routed * (8 * width + 44 * shape.expert_ffn / layout.etp)
        spread = roofline.stream(cluster.device, moved * stack.passes)
        moe = moe.plus(Two(spread, 1.5 * spread)).plus(Two(12 * cluster.device.launch, 16 * cluster.device.launch))
        total = total.plus(moe.times(shape.num_moe / shape.layers))
    return total


def stream_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> Two:
    """Seconds of norms, residuals, positions, activation functions and casts of the mean layer."""
    tokens, tp, h = layout.tokens, layout.tp, shape.hidden
    outside = tokens / (tp if layout.sp else 1) * h * (22 if stack.dropout else 20)
    dense = (shape.num_mlp - shape.num_moe) / shape.layers * shape.ffn + shape.num_moe / shape.layers * shape.shared_ffn
    attended = shape.num_attention / shape.layers
    inside = (attended * 6 * (shape.q_width + shape.kv_width) + (6 if shape.gated else 5) * dense) * tokens / tp
    if shape.mamba_layers:
        inside += shape.mamba_layers / shape.layers * 120 * shape.mamba_inner * tokens / tp
    cast = 0.0
    if layout.number in ("fp8", "fp4"):  # read once, written in both orders
        cast = 4 * tokens * (2 * h / (tp if layout.sp else 1) + (shape.v_width * attended + dense) / tp)
        cast += 4 * tokens / tp * shape.top_k * ((shape.latent or h) + shape.expert_ffn) * shape.num_moe / shape.layers
    forward = roofline.stream(cluster.device, (outside + inside) * stack.passes + cast)
    return Two(forward, 1.7 * forward)


def layer_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> LayerTime:
    """Seconds of the mean layer, with what is computed again in backward."""
    matrices, core = attention_time(shape, layout, cluster, stack)
    share = shape.num_attention / shape.layers
    matrices, core = matrices.times(share), core.times(share)
    mamba = NOTHING
    if shape.mamba_layers:
        inner = shape.mamba_inner / layout.tp
        mamba = product(cluster, layout.tokens, 2.5 * inner, shape.hidden, layout.number)
        mamba = mamba.plus(product(cluster, layout.tokens, shape.hidden, inner, layout.number)).times(
            shape.mamba_layers / shape.layers
        )
    mlp, streams = mlp_time(shape, layout, cluster, stack), stream_time(shape, layout, cluster, stack)
    products = matrices.plus(mlp).plus(mamba)
    compute = products.plus(core).plus(streams)
    weights = products.backward / 2
    again = (
        layout.recompute_share
        * {
            "none": 0.0,
            "light": streams.forward / 2,
            "selective": compute.forward / 2 if stack.halves else core.forward,
            "attention": matrices.forward + core.forward + streams.forward / 2,
            "mlp": mlp.forward,
            "full": compute.forward,
        }[layout.recompute]
    )
    own = sum(local_parameters(shape, layout, 0)) - shape.embedding_parameters / layout.tp
    collect = roofline.stream(cluster.device, 2 * stack.gradients * own / layers_of_ranks(shape, layout)[0])
    if layout.adapters:
        weights, collect = 0.0, -products.backward / 2
    compute = Two(compute.forward, compute.backward + again + collect)
    if layout.offload:
        away = layer_bytes(shape, layout, stack, layout.recompute) / cluster.device.host_bandwidth
        compute = compute.plus(Two(away, away))
    tp, cp, ep = message_times(shape, layout, cluster, stack, core)
    # Messages too, of four of tp in a layer all but the last, or the first of a part.
    part = layout.recompute_share
    again_tp = {"full": 0.75, "attention": 0.25, "mlp": 0.25}.get(layout.recompute, 0.0)
    tp = Two(tp.forward, tp.backward + again_tp * part * tp.forward)
    if layout.recompute in ("full", "attention"):
        cp = Two(cp.forward, cp.backward + part * cp.forward)
    if layout.recompute in ("full", "mlp"):
        ep = Two(ep.forward, ep.backward + part * ep.forward)
    moe, mixers = shape.num_moe / shape.layers, shape.mamba_layers / shape.layers
    floor = stack.host * (1 - moe - mixers) + max(stack.host, stack.host_experts) * moe + stack.host_mamba * mixers
    if layout.pp > 1:
        floor = max(floor, stack.host_staged * layout.tp)
    launches = Two(floor, floor * (2 if layout.recompute == "full" else 1.2))
    if stack.blocking:
        return LayerTime(compute.plus(launches), tp, cp, ep, weights)
    forward = max(compute.forward, launches.forward - tp.forward - ep.forward)
    backward = max(compute.backward, launches.backward - tp.backward - ep.backward)
    return LayerTime(Two(forward, backward), tp, cp, ep, weights)


def message_times(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, core: Two
) -> tuple[Two, Two, Two]:
    """Seconds of messages of tp, cp and ep of the mean layer that nothing hides."""
    tokens, h = layout.tokens, shape.hidden
    size = 2.0 * tokens * h
    ranks = network.group(cluster, layout.tp, 1)
    # A mixer and a dense part gather and reduce once each; experts get the tokens that a rank has, and shared experts gather.
    parts = (
        shape.num_attention + shape.mamba_layers + shape.num_mlp - shape.num_moe * (not shape.shared_ffn)
    ) / shape.layers
    if layout.ep == 1 and shape.num_moe:
        parts = (shape.num_attention + shape.mamba_layers + shape.num_mlp) / shape.layers
    half = network.all_gather(ranks, size) / stack.wire
    forward, backward = 2 * half, (3 if layout.sp and stack.gathers_again else 2) * half
    tp = Two(parts * forward * (1 - stack.tp_overlap), parts * backward * (1 - stack.tp_backward))
    ring = network.group(cluster, layout.ring, layout.tp * layout.ulysses)
    kept = 4.0 * tokens * layout.cp * (shape.kv_width or shape.kv_lora) / (layout.tp * layout.ulysses)
    keys = network.all_gather(ring, kept) / stack.wire
    # Queries, keys and values to the ranks of their heads, and what they come to back: the longer of both hides nothing.
    sharing = network.group(cluster, layout.ulysses, layout.tp)
    there = 4.0 * tokens * (shape.q_width + shape.kv_width) / layout.tp
    heads = network.all_to_all(sharing, there) / stack.wire
    cp = Two(
        heads + exposed(keys, core.forward, stack.slowdown), heads + exposed(2 * keys, core.backward, stack.slowdown)
    ).times(shape.num_attention / shape.layers)
    ep = NOTHING
    if shape.num_moe and layout.ep > 1:
        experts = network.group(cluster, layout.ep, layout.etp)
        hosts = experts.hosts
        wanted = hosts * (1 - (1 - 1 / hosts) ** shape.top_k)  # hosts of a token's experts, drawn at random
        once = min(wanted, shape.top_groups or wanted) / shape.top_k if stack.once_a_host else 1.0
        routed = 2.0 * tokens / layout.tp * shape.top_k * (shape.latent or h) * stack.imbalance
        way = network.all_to_all(experts, routed, once, stack.ep_near, stack.ep_wire) * shape.num_moe / shape.layers
        ep = Two(2 * way, 2 * way).times(1 - stack.ep_overlap)
        # Ranks that share an expert gather its rows, and reduce what they made of them.
        shared = network.all_gather(network.group(cluster, layout.etp, 1), routed * layout.etp) / stack.wire
        tp = tp.plus(Two(2 * shared, 2 * shared).times(shape.num_moe / shape.layers))
    return tp, cp, ep


def head_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> Two:
    """Seconds of head and loss for one micro-batch."""
    wide = shape.vocab / layout.tp
    logits = roofline.stream(
        cluster.device, layout.tokens * wide * (6 if layout.fused_loss else 14) * max(1.0, stack.passes)
    )
    both = product(cluster, layout.tokens, wide, shape.hidden, "bf16").plus(Two(logits, logits))
    return both.times(1 + shape.predict_ahead)


def step_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, layer: LayerTime | None = None
) -> StepTime:
    """Seconds of a step.

    Args:
        cluster: where it runs; it may have more devices than the layout needs.
        layer: what `layer_time` gives, where it is known already: many layouts share it.
    """
    layer = layer or layer_time(shape, layout, cluster, stack)
    head = head_time(shape, layout, cluster, stack)
    whole = layer.whole
    gather = zero_times(shape, layout, cluster, stack, whole)
    m, counts = layout.micro_batches, layers_of_ranks(shape, layout)
    ranks = [whole.plus(gather).times(float(count)) for count in counts]
    ranks[-1] = ranks[-1].plus(head).plus(whole.times(shape.predict_ahead))
    busiest = max(range(layout.pp), key=lambda rank: ranks[rank].sum)
    last = busiest == layout.pp - 1
    most, at_head = counts[busiest] + shape.predict_ahead * last, head.sum * last
    pipeline = pipeline_time(shape, layout, cluster, stack, ranks, layer.weights * most)
    return StepTime(
        compute=m * (layer.compute.sum * most + at_head),
        tp=m * layer.tp.sum * most,
        cp=m * layer.cp.sum * most,
        ep=m * layer.ep.sum * most,
        zero=m * gather.sum * most,
        pipeline=pipeline,
        gradients=gradient_time(shape, layout, cluster, stack, ranks[busiest]),
        optimizer=optimizer_time(shape, layout, cluster, stack),
    )


def fillers(schedule: str, pp: int, micro_batches: int) -> int:
    """Gradients of weights, of one micro-batch on one rank each, that fill the bubble (Qi et al. 2023, table 2).

    One for each other rank, and one or two more; of these, few micro-batches have fewer (appendix H).
    """
    more = {"zb-h1": 1, "zb-h2": 2, "zb-2p": 2, "zbv": 2}.get(schedule, -1)
    return (pp - 1) + more * (min(micro_batches, pp) - 1) if more > 0 else 0


def pipeline_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, ranks: list[Two], weights: float
) -> float:
    """Seconds that a step takes longer than the busiest rank's own work.

    Of 1F1B each other rank's forward and backward of one micro-batch, of v chunks the v-th part; of zero-bubble schedules
    without the gradients of weights, which fill the gaps.
    """
    if layout.pp == 1:
        return 0.0
    total, longest = sum(rank.sum for rank in ranks), max(rank.sum for rank in ranks)
    bubble = (total - longest) / layout.vpp
    bubble = max(0.0, bubble - fillers(layout.schedule, layout.pp, layout.micro_batches) * weights / layout.vpp)
    ends = network.group(cluster, layout.pp, layout.num_devices // layout.pp)
    size = 2.0 * layout.tokens * shape.hidden
    one = network.point_to_point(ends, size / layout.tp) / stack.wire
    if layout.tp > 1 and not layout.sp:
        one += network.all_gather(network.group(cluster, layout.tp, 1), size)
    steady = 2 * layout.micro_batches * layout.vpp * one * (1 - stack.p2p_overlap)
    return bubble + 2 * (layout.pp - 1) * one + steady


def zero_times(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, layer: Two) -> Two:
    """Seconds that ZeRO 3 adds to the mean layer of each micro-batch."""
    if layout.zero < 3 or layout.dp * layout.cp == 1 or layout.pp > 1:  # stages keep their weights gathered over a step
        return NOTHING
    shared, experts = (size / layers_of_ranks(shape, layout)[0] for size in local_parameters(shape, layout, 0))
    shared -= shape.embedding_parameters / layout.tp / layers_of_ranks(shape, layout)[0]
    ranks = network.group(cluster, layout.shards, layout.tp)
    among = network.group(cluster, layout.expert_shards, layout.ep * layout.etp)

    def time(num_bytes: float) -> float:
        one = network.all_gather(ranks, shared * num_bytes / stack.messages)
        return (stack.messages * one + network.all_gather(among, experts * num_bytes)) / stack.wire

    weights, gradients = time(2.0), time(stack.reduce)
    if layout.shard and layout.shard < layout.dp:
        copies = network.group(cluster, layout.dp // layout.shard, layout.tp * layout.shards)
        size = stack.reduce * (shared / layout.shards + experts / layout.expert_shards)
        gradients += network.all_reduce(copies, size) / stack.wire
    beside = layer if stack.prefetch else NOTHING
    forward = exposed(weights, beside.forward, stack.slowdown)
    return Two(forward, exposed(weights + gradients, beside.backward, stack.slowdown))


def gradient_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, rank: Two
) -> float:
    """Seconds of reducing gradients and gathering updated weights that one micro-batch's work does not hide."""
    if (layout.zero >= 3 and layout.pp == 1) or layout.dp * layout.cp == 1:
        return 0.0
    shared, experts = local_parameters(shape, layout, 0)
    ranks = network.group(cluster, layout.dp * layout.cp, layout.tp)
    among = network.group(cluster, layout.edp, layout.ep * layout.etp)

    def time(num_bytes: float) -> float:
        return (
            network.all_gather(ranks, shared * num_bytes) + network.all_gather(among, experts * num_bytes)
        ) / stack.wire

    reduce = time(stack.reduce)
    second = time(2.0) if layout.zero else reduce
    if not layout.zero:
        return exposed(reduce + second, stack.dp_overlap * rank.backward, stack.slowdown)
    hidden = rank.forward if stack.gather_overlap else 0.0
    return exposed(reduce, stack.dp_overlap * rank.backward, stack.slowdown) + exposed(second, hidden, stack.slowdown)


def optimizer_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> float:
    """Seconds of clipping and Adam: each state of a parameter that the rank updates is read and written."""
    shared, experts = local_parameters(shape, layout, 0)
    mine = shared / layout.shards + experts / layout.expert_shards if layout.zero else shared + experts
    update = roofline.stream(cluster.device, 2 * (stack.optimizer + stack.gradients + stack.weights) * mine) + 2e-3
    if layout.optimizer_on_host:  # there and back, beside the update
        return max(update, 2 * (stack.optimizer - stack.stays) * mine / cluster.device.host_bandwidth)
    return update
