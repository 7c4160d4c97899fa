"""What is known of the software that a run uses: which kernels it has, what it overlaps, what it keeps.

These are priors, from the code and the papers of each stack and from what its published runs have in common; none follows one
run. What remains is one scalar a machine and stack (`benchmarks/published/validate.py`). The last stack is Weft itself.
"""

from dataclasses import dataclass

from weft.errors import PlanError, nearest
from weft.planner.costmodel.hardware import GIB


@dataclass(frozen=True)
class FrameworkModel:
    """A training library."""

    name: str
    flash: bool = True
    """Fused attention."""
    passes: float = 1.0
    """Bytes that element-wise kernels move, of those of the fused kernels of Megatron-Core."""
    portable: bool = False
    """Fused attention that is not written for the newest devices (FlashAttention 2, Triton)."""
    host: float = 0.25e-3
    """Seconds that the host needs to launch the forward of a layer; the device waits for it where it is quicker."""
    host_experts: float = 4e-3
    """The same of a layer with experts: routing, permutations and a message each way are some hundred launches."""
    host_mamba: float = 4e-3
    """The same of a state-space mixer: some dozen Triton kernels, whose launches cost more, and no graph of them."""
    host_staged: float = 0.0
    """Seconds for each rank of tp that the forward of a layer takes at least, where stages of a pipeline make hosts wait."""
    blocking: bool = False
    """Whether the host waits for each kernel before it launches the next one: launches and kernels then add up."""
    ring: float = 1.0
    """How many times as long attention takes over cp: blocks in kernels of their own, whose outputs are merged in float32."""
    tp_overlap: float = 0.0
    """Share of the messages of tensor parallelism that is hidden behind products."""
    tp_backward: float = 0.3
    """The same in backward, where the reduction of inputs' gradients runs beside the product for weights'."""
    dp_overlap: float = 0.0
    """Share of the last backward that hides gradients."""
    gather_overlap: bool = False
    """Whether updated weights are gathered beside the next forward (ZeRO 1)."""
    prefetch: bool = True
    """Whether ZeRO 3 gathers a layer ahead."""
    messages: int = 1
    """In which ZeRO 3 gathers the weights of a layer."""
    rows: float = 16.0
    """Bytes that move for each number of a row that is sorted to its expert and back; 8 where that is part of the dispatch."""
    ep_overlap: float = 0.0
    """Share of dispatch and combine that other work hides."""
    ep_wire: float = 0.7
    """Share of the links' bandwidth that dispatch reaches."""
    ep_near: float = 0.45
    """The same inside a host, where a token is sent to each of its experts."""
    imbalance: float = 1.35
    """Rows of the busiest rank's experts, of those of the mean rank; 1 where a benchmark routes evenly or drops the rest.
    Qwen3-235B on 256 H100 takes 1.21 times as long routed freely as evenly, with half of its time in experts (ModelZoo)."""
    once_a_host: bool = False
    """Whether a token goes once to each host that has experts for it."""
    p2p_overlap: float = 0.0
    """Share of stages' messages that is hidden."""
    slowdown: float = 1.1
    """Of computation while messages run beside it."""
    wire: float = 0.8
    """Share of measured bandwidth that collectives reach in training (vTrain: 30 % slower there)."""
    weights: float = 2.0
    """Bytes of a weight that is computed with."""
    gradients: float = 4.0
    """Bytes of an accumulated gradient."""
    optimizer: float = 12.0
    """Bytes of master copy and moments."""
    stays: float = 0.0
    """Of these, bytes that stay on the device where the others wait on the host."""
    update_buffer: float = 0.0
    """Bytes a parameter of a buffer beside them, where several ranks reduce gradients."""
    reduced: float = 0.0
    """Bytes of a reduced gradient, of the parameters that a rank updates under ZeRO 1, where it is kept beside all others."""
    reduce: float = 4.0
    """Bytes a gradient takes on the wire."""
    logits: float = 10.0
    """Bytes that a logit holds at the loss: 16 bits, float32, gradient."""
    fused_loss: bool = False
    """Whether logits are never whole in float32, said or not."""
    sp: bool = True
    """Whether a table that does not mention sequence parallelism means it, where there is tp."""
    gathers_again: bool = True
    """Whether backward gathers inputs of matrices over tp again, under sequence parallelism, and does not keep them whole."""
    head_counts: bool = False
    """Whether its stages are cut by cost, the head counted as the layers that it costs as much as."""
    dropout: bool = False
    framework: float = 1.5 * GIB
    """Bytes outside the allocator, of context and communicators."""
    reserve: float = 1.08
    """Reserved by the allocator, of what is allocated."""
    halves: bool = False
    """Whether selective recomputation drops every second product (FSDP stacks), and not the scores alone (Megatron)."""
    shards_hold_copy: bool = True
    """Whether shards of ZeRO 3 keep weights to compute with beside the master weights they are cast from."""
    units: bool = False
    """Whether weights and gradients come and go in units of FSDP2, as dry runs of Weft count them."""
    zero: int = 1
    """Stage of a run that does not say it."""


STACKS: dict[str, FrameworkModel] = {
    stack.name: stack
    for stack in (
        FrameworkModel(
            "megatron-2021",
            flash=False,
            passes=1.15,
            tp_backward=0.0,
            gradients=2,
            reduce=2,
            dropout=True,
            logits=14,
            zero=0,
            sp=False,
        ),
        FrameworkModel("megatron-2022", flash=False, tp_backward=0.4, gradients=4, reduce=2, dropout=True, zero=0),
        FrameworkModel(
            "megatron-deepspeed",
            flash=False,
            passes=1.3,
            tp_backward=0.0,
            gradients=2,
            optimizer=16,
            reduce=2,
            dropout=True,
            wire=0.6,
            reserve=1.15,
            framework=4.5 * GIB,  # a communicator of each axis, and of each pair of stages
            sp=False,
            host=2e-3,
            blocking=True,  # BLOOM's script sets CUDA_LAUNCH_BLOCKING against a hang
        ),
        FrameworkModel(
            "deepspeed",
            flash=False,
            passes=1.15,
            gradients=2,
            reduce=2,
            messages=12,
            prefetch=False,
            wire=0.4,
            dropout=True,
            sp=False,
        ),
        FrameworkModel(
            "megatron-core", tp_overlap=0.1, dp_overlap=0.8, gather_overlap=True, p2p_overlap=0.5, host=2e-3
        ),
        FrameworkModel(
            "research",
            passes=1.25,
            host=0.8e-3,
            gradients=2,
            reduce=2,
            reserve=1.12,
            framework=3 * GIB,
            tp_backward=0.0,
        ),
        FrameworkModel(
            "megatron-bridge",
            passes=1.15,
            tp_overlap=0.7,
            tp_backward=0.8,
            dp_overlap=0.9,
            gather_overlap=True,
            p2p_overlap=0.7,
            imbalance=1.0,
            fused_loss=True,
            once_a_host=True,
            ep_near=0.8,
            rows=8,
            host=0.4e-3,
        ),
        FrameworkModel(
            "megatron-bridge-26.06",
            passes=1.15,
            tp_overlap=0.7,
            tp_backward=0.8,
            dp_overlap=0.9,
            gather_overlap=True,
            p2p_overlap=0.7,
            imbalance=1.0,
            fused_loss=True,
            once_a_host=True,
            ep_near=0.8,
            ep_overlap=0.4,
            rows=6,
            host=0.3e-3,
            host_experts=1.5e-3,
        ),
        FrameworkModel("megatron-fsdp", tp_overlap=0.1, dp_overlap=0.8, host=2e-3, zero=3),
        FrameworkModel(
            "fsdp",
            reserve=1.04,  # equal layers and lengths: blocks are used again
            passes=1.4,
            portable=True,
            dp_overlap=0.8,
            optimizer=8,
            weights=4,
            wire=0.75,
            halves=True,
            zero=3,
            logits=6,
        ),
        FrameworkModel(
            "torchtitan",
            passes=1.0,
            portable=True,
            ring=1.25,
            logits=14,  # 16 bits, float32, its softmax, and gradient
            dp_overlap=0.8,
            optimizer=8,
            weights=4,
            halves=True,
            zero=3,
            ep_near=0.7,
            rows=10,
        ),
        FrameworkModel("fms", portable=True, dp_overlap=0.8, optimizer=8, weights=4, reduce=2, halves=True, zero=3),
        FrameworkModel(
            "nanotron",
            gathers_again=False,
            head_counts=True,
            passes=1.3,
            portable=True,
            host=2e-3,
            host_staged=1.5e-3,
            tp_backward=0.0,
            dp_overlap=0.3,
            gradients=6,
            update_buffer=2,
            reduced=4,
            logits=14,
            reserve=1.08,
            wire=0.7,
            framework=2.5 * GIB,
        ),
        FrameworkModel(
            "mindspeed",
            passes=1.9,
            tp_overlap=0.6,
            tp_backward=0.6,
            dp_overlap=0.5,
            host=0.5e-3,
            host_experts=6e-3,
            rows=48,
        ),
        FrameworkModel(
            "plain-torch",
            passes=2.2,
            host=3e-3,
            host_experts=14e-3,
            dp_overlap=0.5,
            weights=2,
            gradients=2,
            optimizer=4,
            update_buffer=4,
            wire=0.5,
            zero=0,
        ),
        FrameworkModel(
            "weft",
            passes=1.3,
            portable=True,
            ring=1.25,
            dp_overlap=0.7,
            logits=14,
            stays=4,
            shards_hold_copy=False,
            units=True,
        ),
    )
}


def find_stack(name: str) -> FrameworkModel:
    """A stack by its name.

    Raises:
        PlanError: none is known by it; the nearest is named.
    """
    if name in STACKS:
        return STACKS[name]
    raise PlanError(
        f"no stack is called {name!r}",
        rule=f"known are {', '.join(STACKS)}",
        fix=nearest(name, STACKS),
    )
