"""Model of a training framework: the kernels it has, the communication it overlaps, the tensors it keeps; and that of Weft.

Those of other frameworks, with which published runs are scored, are in `benchmarks/published/frameworks.py`.
"""

from dataclasses import dataclass

from weft.planner.costmodel.hardware import GIB


@dataclass(frozen=True)
class FrameworkModel:
    """Performance and memory model of a training framework."""

    name: str
    flash: bool = True
    """True if attention is fused."""
    elementwise_traffic: float = 1.0
    """Memory traffic of element-wise kernels, relative to the fused kernels of Megatron-Core."""
    portable: bool = False
    """True if fused attention is not written for the newest devices (FlashAttention 2, Triton)."""
    launch_seconds: float = 0.25e-3
    """Host seconds to launch the forward of a layer; a lower bound of the layer's time."""
    moe_launch_seconds: float = 4e-3
    """Host seconds to launch the forward of an MoE layer: some hundred launches for routing, permutations and all-to-alls."""
    mamba_launch_seconds: float = 4e-3
    """Host seconds to launch the forward of a Mamba mixer: dozens of Triton kernels (slower launches), no CUDA graphs."""
    staged_launch_seconds: float = 0.0
    """Minimum seconds of a layer's forward per tp rank under pipeline parallelism, where hosts wait for each other."""
    blocking: bool = False
    """True if the host waits for each kernel before it launches the next one: launch and kernel times then add up."""
    ring_slowdown: float = 1.0
    """Slowdown of attention under ring attention: separate kernels per block, whose outputs are merged in float32."""
    tp_overlap: float = 0.0
    """Share of tensor-parallel communication that is overlapped with matmuls in forward."""
    tp_backward: float = 0.3
    """The same share in backward, where the reduction of input gradients overlaps with the matmul for weight gradients."""
    dp_overlap: float = 0.0
    """Share of the last backward with which gradient reduction overlaps."""
    gather_overlap: bool = False
    """True if the all-gather of updated weights overlaps with the next forward (ZeRO 1)."""
    prefetch: bool = True
    """True if ZeRO 3 prefetches the weights of the next layer."""
    zero3_gathers: int = 1
    """All-gathers per layer under ZeRO 3."""
    gathers_fp8: bool = False
    """True if ZeRO 3 without tp gathers the weights of linear layers with FP8 matmuls in FP8."""
    casts_experts: bool = True
    """True if the matmuls of experts are computed in the dtype of the other layers; else in bf16 where that is FP8."""
    permute_bytes: float = 16.0
    """Bytes moved per element to permute token rows to expert order and back; 8 if the dispatch includes the permutation."""
    dispatch_bytes: float = 2.0
    """Bytes per element of the rows that are sent to experts, in forward and in backward; outputs of experts have 2."""
    ep_overlap: float = 0.0
    """Share of dispatch and combine that is overlapped with computation."""
    ep_inter_node_rate: float = 0.7
    """Share of the inter-node bandwidth that dispatch reaches."""
    ep_intra_node_rate: float = 0.45
    """Share of the intra-node bandwidth that dispatch reaches; a token is sent to each of its experts there."""
    imbalance: float = 1.35
    """Expert load imbalance: rows on the busiest rank / mean rows per rank; 1 if routing is forced to be even or drops tokens.

    Example: Qwen3-235B on 256 H100 takes 1.21 times as long with free as with even routing, and half of its time is in the
    experts (ModelZoo)."""
    balanced_imbalance: float = 1.05
    """The same ratio with replicas of hot experts in two slots (`benchmarks/moe_balance.py`)."""
    once_per_host: bool = False
    """True if a token is sent only once to each host, even if several of its experts are there."""
    p2p_overlap: float = 0.0
    """Share of point-to-point communication between stages that is overlapped."""
    overlap_slowdown: float = 1.1
    """Slowdown of computation while communication overlaps with it."""
    bandwidth_share: float = 0.8
    """Share of the benchmarked bandwidth that collectives reach in training (vTrain: 30 % slower in training)."""
    weight_bytes: float = 2.0
    """Bytes per weight in the compute dtype."""
    gradient_bytes: float = 4.0
    """Bytes per accumulated gradient element."""
    optimizer_bytes: float = 12.0
    """Bytes per parameter of master weights and moments."""
    resident_optimizer_bytes: float = 0.0
    """Part of `optimizer_bytes` that stays on the device if optimizer states are offloaded."""
    update_buffer_bytes: float = 0.0
    """Bytes per parameter of an additional buffer, allocated if several ranks reduce gradients."""
    reduced_gradient_bytes: float = 0.0
    """Bytes per reduced gradient element under ZeRO 1, if it is stored in addition to the full gradients."""
    reduce_bytes: float = 4.0
    """Bytes per gradient element in the reduction."""
    logit_bytes: float = 10.0
    """Bytes per logit at the loss: 16-bit logit, float32 copy and gradient."""
    fused_loss: bool = False
    """True if runs use a fused loss, which never stores the full logits in float32, even if a table does not mention it."""
    sp: bool = True
    """True if a run with tp uses sequence parallelism when its table does not mention it."""
    regathers_inputs: bool = True
    """True if, under sequence parallelism, backward gathers the inputs of matmuls again instead of saving them in full."""
    balance_head: bool = False
    """True if pipeline stages are balanced by cost, with the head counted in units of layers."""
    dropout: bool = False
    framework: float = 1.5 * GIB
    """Bytes outside the allocator: context and communicators."""
    reserve: float = 1.08
    """Ratio of reserved to allocated bytes of the allocator."""
    selective_half: bool = False
    """True if selective recomputation covers every second matmul (FSDP frameworks) instead of the scores only (Megatron)."""
    shards_hold_copy: bool = True
    """True if ZeRO 3 shards store weights in the compute dtype in addition to the master weights."""
    fsdp2_units: bool = False
    """True if weights and gradients are allocated and freed per FSDP2 unit, as in the dry runs of Weft."""
    zero: int = 1
    """ZeRO stage of a run whose table does not state it."""


WEFT = FrameworkModel(
    "weft",
    elementwise_traffic=1.3,
    ring_slowdown=1.25,
    dp_overlap=0.7,
    casts_experts=False,
    gathers_fp8=True,
    logit_bytes=14,
    resident_optimizer_bytes=4,
    shards_hold_copy=False,
    fsdp2_units=True,
)
