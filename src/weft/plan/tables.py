"""Tables of a plan: parallelism, precision, memory and communication of a run. Frozen, read from TOML; imports no torch."""

from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Degree = Annotated[int, Field(ge=1)]
DType = Literal["fp64", "fp32", "bf16", "fp16"]
WideDType = Literal["fp64", "fp32", "bf16"]
"""Dtypes without overflow: a sum over ranks overflows fp16 at 65504."""
Function = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), 'a function of yours, as "package.module:function"'
]
"""Python function by module and name; the ranks import it, from the current folder too."""
CODEC_GROUP = "weft.codecs"
"""Group of the entry points with which other packages add gradient codecs."""


def _is_installed(name: str) -> str:
    if name not in entry_points(group=CODEC_GROUP).names:
        raise ValueError(f"no installed package has a codec {name}")
    return name


InstalledCodec = Annotated[str, AfterValidator(_is_installed), "the name of a codec of an installed package"]


class Table(BaseModel):
    """Base of the settings tables: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "etp", "pp")
"""Keys of `Parallel` that divide ranks, in the order in which a plan is described."""


class Parallel(Table):
    """Degree of each form of parallelism; dp_replicate x dp_shard x tp x cp x pp is the world size."""

    dp_replicate: Degree = 1
    """Replicas of the sharded data-parallel group (HSDP); gradients are all-reduced between replicas. 1: none."""
    dp_shard: Literal[-1] | Degree = -1
    """Sharded data parallelism: ranks over which `zero` shards model state; -1: all ranks that other degrees leave."""
    rows_per_rank: tuple[Degree, ...] = ()
    """Rows of a global batch for each data rank, in the order of data ranks, for ranks of unequal speed; the sum is
    train.global_batch_size. Losses and gradients do not depend on them. Empty: equal numbers of rows."""
    rebalance: Literal["off", "auto"] = "off"
    """Change of rows_per_rank during a run: none (off), or, whenever a checkpoint is due, to rows in proportion to the measured
    speed of the data ranks (auto). The checkpoint has the new rows."""
    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage: shard over dp_shard nothing (0), optimizer state (1), also gradients (2), also parameters (3). auto: in weft
    train the lowest stage that fits in memory, which sends the fewest bytes; where no memory is known, 0 if no ranks share the
    tokens of a step, else 3. The choice is recorded in job.toml, the checkpoints and the report of the run."""
    tp: Degree = 1
    """Tensor parallelism: ranks over which each weight matrix is split."""
    sp: bool = True
    """Sequence parallelism: activations outside of matmuls are split over tp ranks along the sequence; no effect if tp = 1."""
    cp: Degree = 1
    """Context parallelism: ranks over which each sequence is split."""
    cp_ulysses: Degree = 1
    """Ulysses degree within cp (all-to-all between sequence and heads); ring attention runs over cp / cp_ulysses ranks."""
    ep: Degree = 1
    """Expert parallelism: ranks over which the experts of a layer are split; must divide dp_shard x cp x tp."""
    etp: Degree = 1
    """Expert tensor parallelism: ranks over which the matrices of each expert are split, for more ranks than experts;
    ep x etp must divide dp_shard x cp x tp."""
    expert_balance: Literal["off", "replicate"] = "off"
    """Load of the ranks of ep: as the router chooses (off), or evened out: in each layer and micro-batch ranks with few rows
    also compute replicas of the experts with the most rows (replicate). Nothing is dropped, and the result is the same."""
    expert_slots: Degree = 2
    """Most experts of other ranks that a rank computes in a layer, with expert_balance = "replicate"."""
    expert_capacity: Literal[0] | Annotated[float, Field(ge=1)] = 0
    """Most copies of tokens that an expert computes, relative to an even load of the tokens of a rank in a micro-batch, such as
    1.1; copies beyond it are dropped, which changes the loss, by the layout too. 0: nothing is dropped."""
    expert_drop: Literal["probs", "position"] = "probs"
    """Copies that expert_capacity drops: those with the smallest router weights (probs), or the last ones (position)."""
    expert_relocate_every: Annotated[int, Field(ge=0)] = 0
    """Updates between relocations of experts: where a skew of the router lasts, experts move to other ranks of ep, with their
    optimizer states. The result is the same. 0: experts stay where they are."""
    pp: Degree = 1
    """Pipeline parallelism: ranks over which the blocks are split."""


MIN_VIRTUAL_STAGES = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
"""Minimum of virtual stages per rank, by schedule; 1 for a schedule that is not listed."""


class Pipeline(Table):
    """Pipeline schedule and partition of blocks into stages."""

    schedule: str = "1f1b"
    """Pipeline schedule: its name, or a .csv file with one line per rank and one cell per time slot."""
    virtual_stages: Literal["auto"] | Degree = "auto"
    """Stages per rank; auto: the minimum of the schedule, which is 2 with interleaved, zbv and dualpipev, else 1."""
    stage_blocks: tuple[Degree, ...] = ()
    """Number of blocks of each stage, first to last; empty: stages are balanced by cost."""
    block_costs: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Relative cost of each block, for balancing stages; empty: equal costs."""
    embedding_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost of the embedding, in the unit of block_costs; if block_costs is empty, a block costs 1."""
    head_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost of the final norm, head and loss, in the unit of block_costs; if block_costs is empty, a block costs 1."""

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank, with "auto" replaced."""
        return MIN_VIRTUAL_STAGES.get(self.schedule, 1) if self.virtual_stages == "auto" else self.virtual_stages


class Precision(Table):
    """Dtype of each part of a training step."""

    param_dtype: DType | Literal["auto"] = "auto"
    """Dtype of weights and activations in forward and backward; auto: bf16 if the device computes it natively or another
    setting needs it, else fp32. The choice is recorded in job.toml, the checkpoints and the report of the run."""
    backward: Literal["forward", "fp16"] = "forward"
    """Dtype of backward: "forward" uses param_dtype; "fp16" computes scaled fp16 gradients after a bf16 forward, and casts
    saved activations to fp16 when backward uses them."""
    update: WideDType = "fp32"
    """Dtype of master weights and of optimizer state. Not fp16, which has no value between 1 and 1.00097, so that small updates
    of a weight would be lost."""
    reduce_dtype: WideDType = "fp32"
    """Dtype of gradient accumulation over micro-batches and of gradient reduction over ranks."""
    loss_scale: Literal["none", "dynamic"] | Annotated[float, Field(gt=0)] = "none"
    """Loss scale, which keeps fp16 gradients from underflowing: none, dynamic, or a fixed number."""
    fp32_modules: tuple[Literal["router", "norm", "head"], ...] = ()
    """Modules that compute in float32 under any param_dtype; the loss is always computed in float32."""
    weights: Literal["whole", "split", "split_even"] = "whole"
    """Storage of fp32 master weights. "whole": fp32 weights and a bf16 copy. "split": bf16 weights and the 16 remaining bits,
    without a copy; ties are rounded away from zero. "split_even": one more bit, so that ties are rounded to even, as in a
    cast."""
    frozen_weights: Literal["whole", "nf4"] = "whole"
    """Storage of the frozen weights of linear layers in blocks, and of experts, under adapters. "nf4": 4 bits a weight and a
    scale for 64 of them (QLoRA, Dettmers et al., 2023), unpacked for each matmul; adapter.kind = "qlora" sets it."""
    matmul: Literal["forward", "fp8", "fp8_block"] = "forward"
    """Matmuls of the linear layers in attention and MLPs: in param_dtype (forward), or in FP8 with one scale a tensor (fp8) or
    a scale for each 128 values (fp8_block). With fp8 also those of experts, with a scale for each row."""
    emulate_fp8: bool = False
    """Compute FP8 matmuls in float32 on devices without FP8: the same numbers, slowly."""
    quantize: Literal["none", "int8", "int4", "fp8"] = "none"
    """Quantization-aware training: forward and backward use the weights of linear layers of blocks, and of experts, rounded to
    few bits, and the update the exact ones. int8 and fp8 have a scale for each output channel, int4 for each group. `weft
    compress --recipe trained` writes the rounded weights."""
    quantize_group_size: Literal[32, 64, 128] = 32
    """Input channels that share a scale with quantize = "int4"."""
    quantize_inputs: Literal["none", "int8", "fp8"] = "none"
    """With quantize, also round the inputs of these layers, with a scale for each token: what a server with 8-bit matmuls
    computes."""
    optimizer_state_dtype: Literal["update", "bf16", "int8", "int4"] = "update"
    """Dtype of optimizer state between updates: "update" uses precision.update; int8 and int4 are quantized in blocks with one
    scale each."""

    @property
    def needs_bf16(self) -> bool:
        """True if another setting of this table requires param_dtype = "bf16"."""
        return self.weights != "whole" or self.backward == "fp16" or self.update == "bf16"

    def resolve(self, native_bf16: bool) -> "Precision":
        """Replace param_dtype = "auto" by a dtype; any other value is kept.

        Args:
            native_bf16: True if the device computes bf16 natively, see `weft.device.device.Device.supports`.
        """
        if self.param_dtype != "auto":
            return self
        return self.model_copy(update={"param_dtype": "bf16" if native_bf16 or self.needs_bf16 else "fp32"})


class Memory(Table):
    """Recomputation, and offload of activations and optimizer state."""

    recompute: tuple[Literal["block", "attention", "mlp", "activation", "norm"], ...] = ()
    """Activation checkpointing: recompute in backward, instead of saving, the activations of whole blocks, of their attention
    or mlp, or only the outputs of activation functions and norms; empty: no recompute."""
    recompute_interval: Degree = 1
    """Recompute every n-th block, starting with the first; 1: all blocks."""
    parameters_device: Literal["device", "disk"] = "device"
    """Location of weights and of reduced gradients between their uses: the device; or, on CPU ranks, the disk, from which the
    weights of a block are gathered when it runs."""
    optimizer_device: Literal["device", "host", "disk"] = "device"
    """Location of optimizer state between updates: the device, host memory or disk."""
    optimizer_bytes: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Bytes of optimizer state to offload per rank: one value for all ranks, or one value per pp rank; empty: offload all."""
    offload: tuple[Literal["block", "attention", "mlp"], ...] = ()
    """Activation offload: parts of blocks whose saved activations are off the device until backward; empty: none."""
    offload_to: Literal["host", "disk"] = "host"
    """Destination of activation offload: host memory or disk."""
    offload_bytes: Annotated[int, Field(ge=0)] = 0
    """Maximum bytes of activations to offload per rank, at least the largest tensor; 0: offload all."""
    offload_prefetch: Degree = 1
    """Number of offloaded parts whose activations are prefetched ahead of their backward."""
    offload_dir: str = "/var/tmp"
    """Directory for offload files; must not be a tmpfs, as /tmp often is. Files are unnamed and vanish with the process."""


class Comm(Table):
    """Communication between ranks: overlap, hierarchical collectives and gradient compression."""

    overlap_chunks: Literal["auto"] | Degree = "auto"
    """Chunks per tensor-parallel matmul, so that its collective overlaps with it; auto: chosen per shape by a measured cost
    model, and 1 if communication cannot overlap, as between ranks on one CPU."""
    hierarchy: Literal["auto", "two_level", "flat"] = "auto"
    """Collectives of ranks on several hosts: hierarchical, first inside each host and then between hosts (two_level), in one
    ring of all ranks (flat), or chosen by device (auto). On accelerators it is about the dispatch of tokens to experts alone,
    which auto makes hierarchical."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose weights are all-gathered ahead of computation, with zero = 3, or read from the disk. Ranks on one CPU gather
    none ahead, because there an all-gather takes cores from computation."""
    expert_overlap: Literal["auto", "off", "joint"] = "auto"
    """Overlap of the messages of experts: "joint" runs the backward of a micro-batch together with the forward of the next one,
    and each computes while the other one waits for rows; auto: in the joint slots of a pipeline schedule."""
    expert_compression: Literal["none", "int8", "fp8"] = "none"
    """Compression of the rows that are sent to experts, activations in forward and gradients in backward: 8 bits per element,
    with a scale for each 128. What experts send back keeps its dtype."""
    ulysses_chunks: Degree = 1
    """Most head chunks per Ulysses all-to-all, so that attention overlaps with it; 1: no overlap. Used is the greatest common
    divisor with the KV heads of a rank, so that a rank with one KV head has one chunk; no effect if cp_ulysses = 1."""
    topology: str = ""
    """Topology file with hosts and links of the job, as written by `weft topology --out`; empty: only the ranks of each host
    are known."""
    compression: Literal["none", "bf16", "fp16", "int8", "2:4", "1-bit"] | InstalledCodec = "none"
    """Compression of gradient messages between data ranks: none; bf16 or fp16; int8, in blocks with one scale each; 2:4, the
    two largest of every four elements, 9 bits per element; 1-bit, signs, for optimizer.name = "onebit-adam" alone; or the name
    of a codec of an installed package."""
    compress_scope: Literal["all", "inter_node"] = "all"
    """Messages to compress: all, or only messages between hosts if a group of ranks spans several hosts."""
    error_feedback: bool = True
    """Error feedback: add the compression error of each message to the next message."""


class Kernels(Table):
    """Implementation of each fused operator."""

    attention: Literal["auto", "reference", "flash", "efficient", "cudnn", "math", "FA3", "FA4"] = "auto"
    """Attention kernel of `weft train`: torch's own order (reference); a back end of its SDPA for full rows (flash, efficient,
    cudnn, math); FlashAttention 3 or 4, if the package is installed, for rows and for documents; auto: on CUDA the fastest at
    the shapes of the run, timed at its start, else torch's own. Documents are computed by flash kernels alone."""
    linear_cross_entropy: Literal["auto", "reference", "chunked"] = "auto"
    """Loss of `weft train` and `Run.train_batch`: from logits (reference), or inside of the head, for chunks of tokens, without
    keeping logits (chunked)."""
    rms_norm: Literal["auto", "reference", "triton"] = "auto"
    """RMSNorm: the model's own code (reference), or one kernel in forward and one in backward (triton, on CUDA)."""
    gated_activation: Literal["auto", "reference", "triton"] = "auto"
    """Activation of gated MLPs, act(gate) * up: the model's own code (reference), or one kernel each in forward and backward
    (triton, on CUDA)."""
    experts: Literal["auto", "reference", "triton", "grouped"] = "auto"
    """Experts of a Mixture-of-Experts layer: the model's own code (reference), or grouped matmuls between one kernel that
    gathers rows and one that combines them (triton, on CUDA; grouped, on CPU in 16 bits, by matmuls of few sizes)."""
    adamw: Literal["auto", "reference", "triton"] = "auto"
    """Update of Adam and AdamW: by torch (reference), or by one kernel that also clips gradients and reads and writes split
    weights and int8 states (triton, on CUDA)."""


OUTSIDE_OF_BLOCKS = ("attention", "linear_cross_entropy", "adamw")
"""Operators that torch.compile does not fuse: attention, and those of the head and of the optimizer."""


def _one_for_all(value: Any) -> Any:
    """Table of kernels from one word for all operators."""
    return dict.fromkeys(Kernels.model_fields, value) if value in ("auto", "reference") else value


class Compute(Table):
    """Implementations of the operators of a model."""

    attention: Literal["auto", "varlen", "sdpa", "eager", "flex"] = "auto"
    """Attention: "varlen" computes packed rows document by document, without masks; "sdpa", "eager" and "flex" are
    implementations of Transformers; auto: varlen where the device is fast at it and the model's own result is kept, else the
    model's own. Context parallelism and attention dropout always compute document by document."""
    kernels: Annotated[Kernels, BeforeValidator(_one_for_all)] = Kernels()
    """Fused operators. In place of the table, "auto" uses all that apply to the model and the device, and "reference" none."""
    compile: Literal["off", "blocks"] = "off"
    """torch.compile: "blocks" compiles the forward and backward of each block; the operators between its matmuls become a few
    kernels. The first step of each shape of a batch compiles, for up to a minute."""

    def kernel(self, operator: str) -> str:
        """Setting of an operator: "auto", "reference" or the name of an implementation.

        "auto" of operators inside of compiled blocks is "reference": the blocks fuse them with what is beside them.
        """
        setting = getattr(self.kernels, operator)
        is_compiled = self.compile == "blocks" and operator not in OUTSIDE_OF_BLOCKS
        return "reference" if is_compiled and setting == "auto" else setting


class Prediction(Table):
    """Performance and memory that `weft plan` predicts; the report of `weft train` compares them with measurements."""

    cluster: str
    """Hosts and devices of the prediction, in words."""
    hosts: tuple[str, ...] = ()
    """Names of unlike hosts in the order of node ranks; empty for like hosts."""
    micro_batch: int
    """Value of train.micro_batch_size, in rows, for which the prediction holds."""
    step_seconds: float
    terms: dict[str, float]
    """Breakdown of the step time on the slowest rank, in seconds."""
    tokens_per_second: float
    memory_bytes: int
    """Peak memory of the rank with the highest peak."""
    memory: dict[str, int]
    """Breakdown of the peak memory of rank 0, in bytes."""
    sent_bytes: dict[str, int] = {}
    """Bytes sent by rank 0 in one step, by mesh axis; empty if no dry run has counted them."""


class Plan(Table):
    """Parallelism, precision, memory and communication of a run. Frozen; read by runtime, planner, checkpoints and report."""

    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    precision: Precision = Precision()
    memory: Memory = Memory()
    comm: Comm = Comm()
    compute: Compute = Compute()
    techniques: tuple[Function, ...] = ()
    """Functions of yours, "package.module:function", that change the model in place before recomputation and ZeRO are applied:
    function(model, anatomy, plan, mesh), on every rank, also in dry runs."""
    prediction: Prediction | None = None
    """Performance and memory predicted by the planner; written by `weft plan`."""

    def with_dtypes(self, native_bf16: bool) -> Self:
        """Copy with precision.param_dtype = "auto" replaced by a dtype; see `Precision.resolve`."""
        return self.model_copy(update={"precision": self.precision.resolve(native_bf16)})


QUANTIZED_PAIRS = (("int8", "int8"), ("int4", "int8"), ("fp8", "fp8"))
"""Formats of weights, and of the inputs that are multiplied by them."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
STATE_BYTES = {"bf16": 2, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 128}  # with one float32 scale per block
JOINT_SCHEDULES = ("dualpipev", "interleaved-overlap")
"""Named schedules in which a forward and a backward share a slot."""


def bytes_per_state_element(precision: Precision) -> float:
    """Bytes per element of optimizer state between updates."""
    return STATE_BYTES.get(precision.optimizer_state_dtype, BYTES[precision.update])
