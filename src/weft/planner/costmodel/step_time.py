"""Analytical step time of a layout on a cluster, used to rank candidates; takes about a millisecond.

Forward and backward of one micro-batch through each stage are summed from kernel times (`roofline.py`) and exposed
communication (`network.py`). The schedule turns them into a step, followed by gradient reduction and the optimizer. Each term
is kept separately, so that a plan can be explained.
"""

from dataclasses import dataclass
from typing import NamedTuple

from weft.planner.costmodel import network, roofline
from weft.planner.costmodel.experts import busiest_rows, hidden_wait, hides_messages, imbalance, replica_times
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import EIGHT_BITS, TrainingLayout, layers_of_ranks, local_parameters
from weft.planner.costmodel.network import exposed
from weft.planner.costmodel.peak_memory import layer_bytes
from weft.planner.costmodel.shape import Shape

# 90 % intervals of measured / predicted step time on published runs (`benchmarks/published`): with one run of the same machine
# and framework for calibration, and without.
CALIBRATED, UNCALIBRATED = (0.84, 1.4), (0.8, 1.4)


class ForwardBackward(NamedTuple):
    """Seconds of forward and backward."""

    forward: float
    backward: float

    def plus(self, other: "ForwardBackward") -> "ForwardBackward":
        """Element-wise sum."""
        return ForwardBackward(self.forward + other.forward, self.backward + other.backward)

    def times(self, forward: float, backward: float | None = None) -> "ForwardBackward":
        """Multiply forward and backward by a factor each; `backward` defaults to `forward`."""
        return ForwardBackward(self.forward * forward, self.backward * (forward if backward is None else backward))

    @property
    def sum(self) -> float:
        """Seconds of forward plus backward."""
        return self.forward + self.backward


ZERO_TIME = ForwardBackward(0.0, 0.0)


@dataclass(frozen=True)
class StepTime:
    """Step time in seconds by term, on the busiest rank. Communication terms count exposed time only."""

    compute: float
    """Matmuls, attention and element-wise kernels of all micro-batches."""
    tp: float
    cp: float
    ep: float
    zero: float
    """ZeRO 3: all-gathers of each layer's weights and reduce-scatters of its gradients."""
    pipeline: float
    """Bubble, imbalance between stages, and point-to-point communication."""
    gradients: float
    """Gradient reduction, and the all-gather of updated weights."""
    optimizer: float

    @property
    def seconds(self) -> float:
        """Total step time."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class LayerTime:
    """Seconds of the mean layer, per micro-batch on one rank."""

    compute: ForwardBackward
    tp: ForwardBackward
    cp: ForwardBackward
    ep: ForwardBackward
    """Messages of rows of experts, and what replicas of hot experts cost."""
    weights: float
    """Part of compute.backward that computes gradients of weights."""
    waits: ForwardBackward = ZERO_TIME
    """Part of ep that a joint forward and backward hides, where the other one computes for long enough."""

    @property
    def total(self) -> ForwardBackward:
        """Computation plus exposed communication."""
        return self.compute.plus(self.tp).plus(self.cp).plus(self.ep)

    @property
    def hidden(self) -> float:
        """Seconds by which a forward and a backward are shorter together than in turn (`simulate.SlotSeconds`)."""
        forward, backward = self.total
        return min(self.waits.forward, backward - self.waits.backward) + min(
            self.waits.backward, forward - self.waits.forward
        )


def matmul_times(cluster: ClusterSpec, m: float, n: float, k: float, dtype: str, experts: float = 0) -> ForwardBackward:
    """Seconds of the matmul [m, k] x [k, n] and of its two gradients; with `experts`, of a grouped matmul of m rows."""
    d = cluster.device
    if experts:
        rows = max(1.0, m / experts)
        forward = roofline.grouped(d, m, experts, n, k, dtype)
        return ForwardBackward(
            forward, roofline.grouped(d, m, experts, k, n, dtype) + roofline.matmul(d, k, n, rows, dtype, experts)
        )
    forward = roofline.matmul(d, m, n, k, dtype)
    return ForwardBackward(forward, roofline.matmul(d, m, k, n, dtype) + roofline.matmul(d, k, n, m, dtype))


def attention_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel
) -> tuple[ForwardBackward, ForwardBackward]:
    """Seconds of the attention projections, and of attention itself."""
    tokens, tp, h, dtype = layout.tokens, layout.tp, shape.hidden, layout.dtype
    if shape.kv_lora:
        low = matmul_times(cluster, tokens, shape.q_lora + shape.kv_lora + shape.rope_dim, h, dtype)
        queries = matmul_times(cluster, tokens, shape.q_width / tp, shape.q_lora or h, dtype)
        keys = matmul_times(cluster, tokens, (shape.heads * shape.head_dim + shape.v_width) / tp, shape.kv_lora, dtype)
        into = low.plus(queries).plus(keys)
    else:
        into = matmul_times(
            cluster, tokens, (shape.q_width + 2 * max(shape.kv_width, tp * shape.head_dim)) / tp, h, dtype
        )
    matrices = into.plus(matmul_times(cluster, tokens, h, shape.v_width / tp, dtype))
    device, heads = cluster.device, shape.heads / tp
    if stack.flash:
        flops = tokens * shape.attention_flops(layout.seq) / tp
        core = roofline.flash_attention(device, flops, shape.head_dim, layout.seq / layout.ring, stack.portable)
        core *= stack.ring_slowdown if layout.ring > 1 else 1.0
        # Backward has five matmuls instead of two, at a lower rate.
        return matrices, ForwardBackward(core, core * 2.5 * 1.15)
    forward = roofline.plain_attention(device, tokens, layout.seq, heads, shape.head_dim, False, stack.dropout)
    backward = roofline.plain_attention(device, tokens, layout.seq, heads, shape.head_dim, True, stack.dropout)
    return matrices, ForwardBackward(forward, backward)


def mlp_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> ForwardBackward:
    """Seconds of the mean layer's MLP, dense or MoE."""
    tokens, tp, h, dtype = layout.tokens, layout.tp, shape.hidden, layout.dtype
    wide = shape.matrices - 1
    total = ZERO_TIME
    if shape.num_mlp > shape.num_moe:
        dense = matmul_times(cluster, tokens, wide * shape.ffn / tp, h, dtype).plus(
            matmul_times(cluster, tokens, h, shape.ffn / tp, dtype)
        )
        total = total.plus(dense.times((shape.num_mlp - shape.num_moe) / shape.layers))
    if shape.num_moe:
        routed = busiest_rows(shape, layout, stack)
        experts, width = shape.experts / layout.ep, shape.latent or h
        inside = dtype if stack.casts_experts or dtype not in EIGHT_BITS else "bf16"
        moe = matmul_times(cluster, routed, wide * shape.expert_ffn / layout.etp, width, inside, experts)
        moe = moe.plus(matmul_times(cluster, routed, width, shape.expert_ffn / layout.etp, inside, experts))
        if shape.shared_ffn:
            moe = moe.plus(matmul_times(cluster, tokens, wide * shape.shared_ffn / tp, h, dtype))
            moe = moe.plus(matmul_times(cluster, tokens, h, shape.shared_ffn / tp, dtype))
        if shape.latent:
            moe = moe.plus(matmul_times(cluster, tokens / tp, shape.latent, h, "bf16").times(2))
        moe = moe.plus(matmul_times(cluster, tokens / tp, shape.experts, h, "bf16"))
        # Permutation of token rows to expert order and back; the router computes in float32.
        moved = (
            routed * (stack.permute_bytes * width + 6 * shape.expert_ffn / layout.etp)
            + tokens / tp * shape.experts * 24
        )
        if shape.expert_biases:  # no fused kernel supports biases: addition, clamp and activation are separate kernels
            moved += routed * (8 * width + 44 * shape.expert_ffn / layout.etp)
        spread = roofline.stream(cluster.device, moved * stack.elementwise_traffic)
        moe = moe.plus(ForwardBackward(spread, 1.5 * spread)).plus(
            ForwardBackward(12 * cluster.device.launch, 16 * cluster.device.launch)
        )
        total = total.plus(moe.times(shape.num_moe / shape.layers))
    return total


def stream_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> ForwardBackward:
    """Seconds of norms, residual additions, rotary embeddings, activation functions and casts of the mean layer."""
    tokens, tp, h = layout.tokens, layout.tp, shape.hidden
    outside = tokens / (tp if layout.sp else 1) * h * (22 if stack.dropout else 20)
    dense = (shape.num_mlp - shape.num_moe) / shape.layers * shape.ffn + shape.num_moe / shape.layers * shape.shared_ffn
    attended = shape.num_attention / shape.layers
    inside = (attended * 6 * (shape.q_width + shape.kv_width) + (6 if shape.gated else 5) * dense) * tokens / tp
    if shape.mamba_layers:
        inside += shape.mamba_layers / shape.layers * 120 * shape.mamba_inner * tokens / tp
    cast = 0.0
    if layout.dtype in EIGHT_BITS:  # quantization: read once, written row-wise and column-wise
        cast = 4 * tokens * (2 * h / (tp if layout.sp else 1) + (shape.v_width * attended + dense) / tp)
        if stack.casts_experts:
            cast += (
                4 * tokens / tp * shape.top_k * ((shape.latent or h) + shape.expert_ffn) * shape.num_moe / shape.layers
            )
    forward = roofline.stream(cluster.device, (outside + inside) * stack.elementwise_traffic + cast)
    return ForwardBackward(forward, 1.7 * forward)


def layer_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> LayerTime:
    """Seconds of the mean layer, including recomputation in backward."""
    matrices, core = attention_time(shape, layout, cluster, stack)
    share = shape.num_attention / shape.layers
    matrices, core = matrices.times(share), core.times(share)
    mamba = ZERO_TIME
    if shape.mamba_layers:
        inner = shape.mamba_inner / layout.tp
        mamba = matmul_times(cluster, layout.tokens, 2.5 * inner, shape.hidden, layout.dtype)
        mamba = mamba.plus(matmul_times(cluster, layout.tokens, shape.hidden, inner, layout.dtype)).times(
            shape.mamba_layers / shape.layers
        )
    mlp, streams = mlp_time(shape, layout, cluster, stack), stream_time(shape, layout, cluster, stack)
    matmuls = matrices.plus(mlp).plus(mamba)
    compute = matmuls.plus(core).plus(streams)
    weights = matmuls.backward / 2
    recomputed = (
        layout.recompute_share
        * {
            "none": 0.0,
            "light": streams.forward / 2,
            "selective": compute.forward / 2 if stack.selective_half else core.forward,
            "attention": matrices.forward + core.forward + streams.forward / 2,
            "mlp": mlp.forward,
            "full": compute.forward,
        }[layout.recompute]
    )
    own = sum(local_parameters(shape, layout, 0)) - shape.embedding_parameters / layout.tp
    collect = roofline.stream(cluster.device, 2 * stack.gradient_bytes * own / layers_of_ranks(shape, layout)[0])
    if layout.adapters:
        weights, collect = 0.0, -matmuls.backward / 2
    compute = ForwardBackward(compute.forward, compute.backward + recomputed + collect)
    if layout.offload:
        offload_seconds = layer_bytes(shape, layout, stack, layout.recompute) / cluster.device.host_bandwidth
        compute = compute.plus(ForwardBackward(offload_seconds, offload_seconds))
    tp, cp, ep = message_times(shape, layout, cluster, stack, core)
    waits, moe_share = ZERO_TIME, shape.num_moe / shape.layers
    if hides_messages(layout, cluster):  # without those of a recompute, which does not hand over
        waits = ForwardBackward(*(hidden_wait(wait, moe_share, stack) for wait in ep))
    ep = ep.plus(ForwardBackward(*replica_times(shape, layout, cluster, stack)).times(moe_share))
    # Recomputation repeats collectives too: three of a layer's four over tp, or the first one of attention or MLP.
    part = layout.recompute_share
    recomputed_tp = {"full": 0.75, "attention": 0.25, "mlp": 0.25}.get(layout.recompute, 0.0)
    tp = ForwardBackward(tp.forward, tp.backward + recomputed_tp * part * tp.forward)
    if layout.recompute in ("full", "attention"):
        cp = ForwardBackward(cp.forward, cp.backward + part * cp.forward)
    if layout.recompute in ("full", "mlp"):
        ep = ForwardBackward(ep.forward, ep.backward + part * ep.forward)
    mixers = shape.mamba_layers / shape.layers
    floor = (
        stack.launch_seconds * (1 - moe_share - mixers)
        + max(stack.launch_seconds, stack.moe_launch_seconds) * moe_share
        + stack.mamba_launch_seconds * mixers
    )
    if layout.pp > 1:
        floor = max(floor, stack.staged_launch_seconds * layout.tp)
    launches = ForwardBackward(floor, floor * (2 if layout.recompute == "full" else 1.2))
    if stack.blocking:
        return LayerTime(compute.plus(launches), tp, cp, ep, weights, waits)
    forward = max(compute.forward, launches.forward - tp.forward - ep.forward)
    backward = max(compute.backward, launches.backward - tp.backward - ep.backward)
    return LayerTime(ForwardBackward(forward, backward), tp, cp, ep, weights, waits)


def message_times(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, core: ForwardBackward
) -> tuple[ForwardBackward, ForwardBackward, ForwardBackward]:
    """Exposed communication of tp, cp and ep in the mean layer, in seconds."""
    tokens, h = layout.tokens, shape.hidden
    size = 2.0 * tokens * h
    ranks = network.group(cluster, layout.tp, 1)
    # Attention (or Mamba) and a dense MLP have one all-gather and one reduce-scatter each. Routed experts process the tokens
    # of the rank without them; shared experts need the all-gather.
    parts = (
        shape.num_attention + shape.mamba_layers + shape.num_mlp - shape.num_moe * (not shape.shared_ffn)
    ) / shape.layers
    if layout.ep == 1 and shape.num_moe:
        parts = (shape.num_attention + shape.mamba_layers + shape.num_mlp) / shape.layers
    half = network.all_gather(ranks, size) / stack.bandwidth_share
    forward, backward = 2 * half, (3 if layout.sp and stack.regathers_inputs else 2) * half
    tp = ForwardBackward(parts * forward * (1 - stack.tp_overlap), parts * backward * (1 - stack.tp_backward))
    ring = network.group(cluster, layout.ring, layout.tp * layout.ulysses)
    kept = 4.0 * tokens * layout.cp * (shape.kv_width or shape.kv_lora) / (layout.tp * layout.ulysses)
    keys = network.all_gather(ring, kept) / stack.bandwidth_share
    # Ulysses: all-to-all of queries, keys and values before attention, and of its output after it; not overlapped.
    sharing = network.group(cluster, layout.ulysses, layout.tp)
    there = 4.0 * tokens * (shape.q_width + shape.kv_width) / layout.tp
    heads = network.all_to_all(sharing, there) / stack.bandwidth_share
    cp = ForwardBackward(
        heads + exposed(keys, core.forward, stack.overlap_slowdown),
        heads + exposed(2 * keys, core.backward, stack.overlap_slowdown),
    ).times(shape.num_attention / shape.layers)
    ep = ZERO_TIME
    if shape.num_moe and layout.ep > 1:
        experts = network.group(cluster, layout.ep, layout.etp)
        hosts = experts.hosts
        # Expected number of hosts of a token's experts, if these are drawn at random.
        wanted = hosts * (1 - (1 - 1 / hosts) ** shape.top_k)
        per_host = stack.once_per_host and not layout.expert_slots
        once = min(wanted, shape.top_groups or wanted) / shape.top_k if per_host else 1.0
        routed = 2.0 * tokens / layout.tp * shape.top_k * (shape.latent or h) * imbalance(layout, stack)
        rates = stack.ep_intra_node_rate, stack.ep_inter_node_rate
        to_experts, back = (
            network.all_to_all(experts, num_bytes, once, *rates) * shape.num_moe / shape.layers
            for num_bytes in (routed * stack.dispatch_bytes / 2, routed)
        )
        ep = ForwardBackward(to_experts + back, to_experts + back).times(1 - stack.ep_overlap)
        # Expert tensor parallelism: all-gather of the rows of an expert, reduce-scatter of its outputs.
        gathered, reduced = (
            network.all_gather(network.group(cluster, layout.etp, 1), num_bytes * layout.etp) / stack.bandwidth_share
            for num_bytes in (routed * stack.dispatch_bytes / 2, routed)
        )
        both = gathered + reduced
        tp = tp.plus(ForwardBackward(both, both).times(shape.num_moe / shape.layers))
    return tp, cp, ep


def head_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> ForwardBackward:
    """Seconds of head and loss per micro-batch."""
    wide = shape.vocab / layout.tp
    logits = roofline.stream(
        cluster.device, layout.tokens * wide * (6 if layout.fused_loss else 14) * max(1.0, stack.elementwise_traffic)
    )
    both = matmul_times(cluster, layout.tokens, wide, shape.hidden, "bf16").plus(ForwardBackward(logits, logits))
    return both.times(1 + shape.predict_ahead)


def step_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, layer: LayerTime | None = None
) -> StepTime:
    """Step time of a layout by term.

    Args:
        cluster: cluster to run on; may have more devices than the layout needs.
        layer: result of `layer_time`, if already computed (many layouts have the same one).
    """
    layer = layer or layer_time(shape, layout, cluster, stack)
    head = head_time(shape, layout, cluster, stack)
    total = layer.total
    gather = zero_times(shape, layout, cluster, stack, total)
    m, counts = layout.micro_batches, layers_of_ranks(shape, layout)
    ranks = [total.plus(gather).times(float(count)) for count in counts]
    ranks[-1] = ranks[-1].plus(head).plus(total.times(shape.predict_ahead))
    busiest = max(range(layout.pp), key=lambda rank: ranks[rank].sum)
    last = busiest == layout.pp - 1
    most, at_head = counts[busiest] + shape.predict_ahead * last, head.sum * last
    hidden = joint_pairs(m, layout.pp) * layer.hidden * most
    pipeline = pipeline_time(shape, layout, cluster, stack, ranks, layer.weights * most)
    return StepTime(
        compute=m * (layer.compute.sum * most + at_head),
        tp=m * layer.tp.sum * most,
        cp=m * layer.cp.sum * most,
        ep=m * layer.ep.sum * most - hidden,
        zero=m * gather.sum * most,
        pipeline=pipeline,
        gradients=gradient_time(shape, layout, cluster, stack, ranks[busiest]),
        optimizer=optimizer_time(shape, layout, cluster, stack),
    )


def joint_pairs(micro_batches: int, pp: int) -> int:
    """Number of joint forwards and backwards of a rank: all but the first forward and the last backward without a pipeline."""
    return max(0, micro_batches - pp)


def fillers(schedule: str, pp: int, micro_batches: int) -> int:
    """Number of weight-gradient computations (W of one micro-batch) that fill the bubble of a zero-bubble schedule.

    One per other rank, plus one or two more per other rank, limited by the number of micro-batches (Qi et al. 2023, table 2
    and appendix H). Those of dualpipev by `bubble_formula`, where a full backward is twice its weight part.
    """
    if schedule == "dualpipev":
        return pp - 1
    more = {"zb-h1": 1, "zb-h2": 2, "zb-2p": 2, "zbv": 2}.get(schedule, -1)
    return (pp - 1) + more * (min(micro_batches, pp) - 1) if more > 0 else 0


def pipeline_time(
    shape: Shape,
    layout: TrainingLayout,
    cluster: ClusterSpec,
    stack: FrameworkModel,
    ranks: list[ForwardBackward],
    weights: float,
) -> float:
    """Pipeline overhead of a step: seconds beyond the busiest rank's own work.

    The bubble of 1F1B is one micro-batch's forward and backward of every other rank. With v chunks per rank it is 1 / v of
    that. Zero-bubble schedules fill it with weight gradients.
    """
    if layout.pp == 1:
        return 0.0
    total, longest = sum(rank.sum for rank in ranks), max(rank.sum for rank in ranks)
    bubble = (total - longest) / layout.vpp
    bubble = max(0.0, bubble - fillers(layout.schedule, layout.pp, layout.micro_batches) * weights / layout.vpp)
    ends = network.group(cluster, layout.pp, layout.num_devices // layout.pp)
    size = 2.0 * layout.tokens * shape.hidden
    one = network.point_to_point(ends, size / layout.tp) / stack.bandwidth_share
    if layout.tp > 1 and not layout.sp:
        one += network.all_gather(network.group(cluster, layout.tp, 1), size)
    steady = 2 * layout.micro_batches * layout.vpp * one * (1 - stack.p2p_overlap)
    return bubble + 2 * (layout.pp - 1) * one + steady


def zero_times(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, layer: ForwardBackward
) -> ForwardBackward:
    """Exposed communication of ZeRO 3, in seconds per mean layer and micro-batch."""
    if layout.zero < 3 or layout.dp * layout.cp == 1 or layout.pp > 1:  # with pp, weights stay gathered during a step
        return ZERO_TIME
    shared, experts = (size / layers_of_ranks(shape, layout)[0] for size in local_parameters(shape, layout, 0))
    shared -= shape.embedding_parameters / layout.tp / layers_of_ranks(shape, layout)[0]
    ranks = network.group(cluster, layout.shards, layout.tp)
    among = network.group(cluster, layout.expert_shards, layout.ep * layout.etp)

    def time(num_bytes: float, of_shared: float) -> float:
        one = network.all_gather(ranks, shared * of_shared / stack.zero3_gathers)
        return (stack.zero3_gathers * one + network.all_gather(among, experts * num_bytes)) / stack.bandwidth_share

    in_fp8 = stack.gathers_fp8 and layout.dtype == "fp8" and layout.tp == 1
    weights, gradients = time(2.0, 1.0 if in_fp8 else 2.0), time(stack.reduce_bytes, stack.reduce_bytes)
    if layout.shard and layout.shard < layout.dp:
        copies = network.group(cluster, layout.dp // layout.shard, layout.tp * layout.shards)
        size = stack.reduce_bytes * (shared / layout.shards + experts / layout.expert_shards)
        gradients += network.all_reduce(copies, size) / stack.bandwidth_share
    overlapped = layer if stack.prefetch else ZERO_TIME
    forward = exposed(weights, overlapped.forward, stack.overlap_slowdown)
    return ForwardBackward(forward, exposed(weights + gradients, overlapped.backward, stack.overlap_slowdown))


def gradient_time(
    shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel, rank: ForwardBackward
) -> float:
    """Exposed time of gradient reduction and of the all-gather of updated weights, overlapped with one micro-batch."""
    if (layout.zero >= 3 and layout.pp == 1) or layout.dp * layout.cp == 1:
        return 0.0
    shared, experts = local_parameters(shape, layout, 0)
    ranks = network.group(cluster, layout.dp * layout.cp, layout.tp)
    among = network.group(cluster, layout.edp, layout.ep * layout.etp)

    def time(num_bytes: float) -> float:
        return (
            network.all_gather(ranks, shared * num_bytes) + network.all_gather(among, experts * num_bytes)
        ) / stack.bandwidth_share

    reduce = time(stack.reduce_bytes)
    second = time(2.0) if layout.zero else reduce
    if not layout.zero:
        return exposed(reduce + second, stack.dp_overlap * rank.backward, stack.overlap_slowdown)
    hidden = rank.forward if stack.gather_overlap else 0.0
    return exposed(reduce, stack.dp_overlap * rank.backward, stack.overlap_slowdown) + exposed(
        second, hidden, stack.overlap_slowdown
    )


def optimizer_time(shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel) -> float:
    """Seconds of gradient clipping and Adam: one read and one write of each state of the rank's parameters."""
    shared, experts = local_parameters(shape, layout, 0)
    mine = shared / layout.shards + experts / layout.expert_shards if layout.zero else shared + experts
    update = (
        roofline.stream(cluster.device, 2 * (stack.optimizer_bytes + stack.gradient_bytes + stack.weight_bytes) * mine)
        + 2e-3
    )
    if layout.optimizer_on_host:  # transfer to the device and back, overlapped with the update
        return max(
            update, 2 * (stack.optimizer_bytes - stack.resident_optimizer_bytes) * mine / cluster.device.host_bandwidth
        )
    return update
