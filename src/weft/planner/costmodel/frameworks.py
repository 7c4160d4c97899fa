"""Models of training frameworks: the kernels they have, the communication they overlap, the tensors they keep.

The values are priors from the code and the papers of each framework and from what its published runs have in common; none is
fitted to a single run. The remaining error is one scalar per machine and framework (`benchmarks/published/validate.py`). The
last entry is Weft itself.
"""

from dataclasses import dataclass

from weft.errors import PlanError, nearest
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


STACKS: dict[str, FrameworkModel] = {
    stack.name: stack
    for stack in (
        FrameworkModel(
            "megatron-2021",
            flash=False,
            elementwise_traffic=1.15,
            tp_backward=0.0,
            gradient_bytes=2,
            reduce_bytes=2,
            dropout=True,
            logit_bytes=14,
            zero=0,
            sp=False,
        ),
        FrameworkModel(
            "megatron-2022", flash=False, tp_backward=0.4, gradient_bytes=4, reduce_bytes=2, dropout=True, zero=0
        ),
        FrameworkModel(
            "megatron-deepspeed",
            flash=False,
            elementwise_traffic=1.3,
            tp_backward=0.0,
            gradient_bytes=2,
            optimizer_bytes=16,
            reduce_bytes=2,
            dropout=True,
            bandwidth_share=0.6,
            reserve=1.15,
            framework=4.5 * GIB,  # one communicator per axis and per pair of stages
            sp=False,
            launch_seconds=2e-3,
            blocking=True,  # BLOOM's script sets CUDA_LAUNCH_BLOCKING to avoid a hang
        ),
        FrameworkModel(
            "deepspeed",
            flash=False,
            elementwise_traffic=1.15,
            gradient_bytes=2,
            reduce_bytes=2,
            zero3_gathers=12,
            prefetch=False,
            bandwidth_share=0.4,
            dropout=True,
            sp=False,
        ),
        FrameworkModel(
            "megatron-core", tp_overlap=0.1, dp_overlap=0.8, gather_overlap=True, p2p_overlap=0.5, launch_seconds=2e-3
        ),
        FrameworkModel(
            "research",
            elementwise_traffic=1.25,
            launch_seconds=0.8e-3,
            gradient_bytes=2,
            reduce_bytes=2,
            reserve=1.12,
            framework=3 * GIB,
            tp_backward=0.0,
        ),
        FrameworkModel(
            "megatron-bridge",
            elementwise_traffic=1.15,
            tp_overlap=0.7,
            tp_backward=0.8,
            dp_overlap=0.9,
            gather_overlap=True,
            p2p_overlap=0.7,
            imbalance=1.0,
            fused_loss=True,
            once_per_host=True,
            ep_intra_node_rate=0.8,
            permute_bytes=8,
            launch_seconds=0.4e-3,
        ),
        FrameworkModel(
            "megatron-bridge-26.06",
            elementwise_traffic=1.15,
            tp_overlap=0.7,
            tp_backward=0.8,
            dp_overlap=0.9,
            gather_overlap=True,
            p2p_overlap=0.7,
            imbalance=1.0,
            fused_loss=True,
            once_per_host=True,
            ep_intra_node_rate=0.8,
            ep_overlap=0.4,
            permute_bytes=6,
            launch_seconds=0.3e-3,
            moe_launch_seconds=1.5e-3,
        ),
        FrameworkModel("megatron-fsdp", tp_overlap=0.1, dp_overlap=0.8, launch_seconds=2e-3, zero=3),
        FrameworkModel(
            "fsdp",
            reserve=1.04,  # equal layers and sequence lengths: the allocator reuses its blocks
            elementwise_traffic=1.4,
            portable=True,
            dp_overlap=0.8,
            optimizer_bytes=8,
            weight_bytes=4,
            bandwidth_share=0.75,
            selective_half=True,
            zero=3,
            logit_bytes=6,
        ),
        FrameworkModel(
            "torchtitan",
            elementwise_traffic=1.0,
            portable=True,
            ring_slowdown=1.25,
            logit_bytes=14,  # 16-bit logit, float32 copy, softmax and gradient
            dp_overlap=0.8,
            optimizer_bytes=8,
            weight_bytes=4,
            selective_half=True,
            zero=3,
            ep_intra_node_rate=0.7,
            permute_bytes=10,
        ),
        FrameworkModel(
            "fms",
            portable=True,
            dp_overlap=0.8,
            optimizer_bytes=8,
            weight_bytes=4,
            reduce_bytes=2,
            selective_half=True,
            zero=3,
        ),
        FrameworkModel(
            "nanotron",
            regathers_inputs=False,
            balance_head=True,
            elementwise_traffic=1.3,
            portable=True,
            launch_seconds=2e-3,
            staged_launch_seconds=1.5e-3,
            tp_backward=0.0,
            dp_overlap=0.3,
            gradient_bytes=6,
            update_buffer_bytes=2,
            reduced_gradient_bytes=4,
            logit_bytes=14,
            reserve=1.08,
            bandwidth_share=0.7,
            framework=2.5 * GIB,
        ),
        FrameworkModel(
            "mindspeed",
            elementwise_traffic=1.9,
            tp_overlap=0.6,
            tp_backward=0.6,
            dp_overlap=0.5,
            launch_seconds=0.5e-3,
            moe_launch_seconds=6e-3,
            permute_bytes=48,
        ),
        FrameworkModel(
            "plain-torch",
            elementwise_traffic=2.2,
            launch_seconds=3e-3,
            moe_launch_seconds=14e-3,
            dp_overlap=0.5,
            weight_bytes=2,
            gradient_bytes=2,
            optimizer_bytes=4,
            update_buffer_bytes=4,
            bandwidth_share=0.5,
            zero=0,
        ),
        FrameworkModel(
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
        ),
    )
}


def find_stack(name: str) -> FrameworkModel:
    """Look up a framework model by name.

    Raises:
        PlanError: the name is unknown; the error suggests the nearest name.
    """
    if name in STACKS:
        return STACKS[name]
    raise PlanError(
        f"the planner has no framework {name!r}",
        rule=f"a framework is one of {', '.join(STACKS)}",
        fix=nearest(name, STACKS),
    )
