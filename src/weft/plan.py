"""Plan: parallelism, precision, memory and communication of a run. A frozen object, read from TOML; imports no torch."""

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from weft.errors import PlanError

Degree = Annotated[int, Field(ge=1)]
DType = Literal["fp64", "fp32", "bf16", "fp16"]
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


class Parallel(Table):
    """Degree of each form of parallelism; dp_replicate x dp_shard x tp x cp x pp is the world size."""

    dp_replicate: Degree = 1
    """Replicas of the sharded data-parallel group (HSDP); gradients are all-reduced between replicas. 1: none."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Sharded data parallelism: ranks over which `zero` shards model state; -1: all ranks that other degrees leave."""
    rows_per_rank: tuple[Degree, ...] = ()
    """Rows of a global batch for each data rank, in the order of data ranks, for ranks of unequal speed; the sum is
    train.global_batch_size. Losses and gradients do not depend on them. Empty: equal numbers of rows."""
    rebalance: Literal["off", "auto"] = "off"
    """Change of rows_per_rank during a run: none (off), or, whenever a checkpoint is due, to rows in proportion to the measured
    speed of the data ranks (auto). The checkpoint has the new rows."""
    zero: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: shard over dp_shard nothing (0), optimizer state (1), also gradients (2), also parameters (3)."""
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
    expert_capacity: Annotated[float, Field(ge=0)] = 0.0
    """Most copies of tokens that an expert computes, relative to an even load of the tokens of a rank in a micro-batch; copies
    beyond it are dropped, which changes the loss, by the layout too. 0: nothing is dropped."""
    expert_drop: Literal["probs", "position"] = "probs"
    """Copies that expert_capacity drops: those with the smallest router weights (probs), or the last ones (position)."""
    expert_relocate_every: Annotated[int, Field(ge=0)] = 0
    """Updates between relocations of experts: where a skew of the router lasts, experts move to other ranks of ep, with their
    optimizer states. The result is the same. 0: experts stay where they are."""
    pp: Degree = 1
    """Pipeline parallelism: ranks over which the blocks are split."""

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different rows of a batch; needs a resolved dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks with different tokens, over which gradients are averaged; ranks of a tp group share tokens."""
        return self.data_ranks * self.cp


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
    update: DType = "fp32"
    """Dtype of master weights and of optimizer state."""
    reduce_dtype: DType = "fp32"
    """Dtype of gradient accumulation over micro-batches and of gradient reduction over ranks."""
    loss_scale: Literal["none", "dynamic"] | Annotated[float, Field(gt=0)] = "none"
    """Loss scale, which keeps fp16 gradients from underflowing: none, dynamic, or a fixed number."""
    fp32_modules: tuple[Literal["router", "norm", "head"], ...] = ()
    """Modules that compute in float32 under any param_dtype; the loss is always computed in float32."""
    weights: Literal["whole", "split", "split_even"] = "whole"
    """Storage of fp32 master weights. "whole": fp32 weights and a bf16 copy. "split": bf16 weights and the 16 remaining bits,
    without a copy; ties are rounded away from zero. "split_even": one more bit, so that ties are rounded to even, as in a
    cast."""
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
    """Blocks whose weights are all-gathered ahead of computation, with zero = 3. Ranks on one CPU prefetch none, because there
    an all-gather takes cores from computation."""
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

    linear_cross_entropy: Literal["auto", "reference", "chunked"] = "auto"
    """Loss of `weft train` and `Run.train_batch`: from logits (reference), or inside of the head, for chunks of tokens, without
    keeping logits (chunked)."""
    rms_norm: Literal["auto", "reference", "triton"] = "auto"
    """RMSNorm: the model's own code (reference), or one kernel in forward and one in backward (triton, on CUDA)."""
    gated_activation: Literal["auto", "reference", "triton"] = "auto"
    """Activation of gated MLPs, act(gate) * up: the model's own code (reference), or one kernel each in forward and backward
    (triton, on CUDA)."""
    experts: Literal["auto", "reference", "triton"] = "auto"
    """Experts of a Mixture-of-Experts layer: the model's own code (reference), or grouped matmuls between one kernel that
    gathers rows and one that combines them (triton, on CUDA)."""
    adamw: Literal["auto", "reference", "triton"] = "auto"
    """Update of Adam and AdamW: by torch (reference), or by one kernel that also clips gradients and reads and writes split
    weights and int8 states (triton, on CUDA)."""


OUTSIDE_OF_BLOCKS = ("linear_cross_entropy", "adamw")
"""Fused operators of the head and of the optimizer."""


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

    def resolve(self, world_size: int) -> "Plan":
        """Check every rule, and replace dp_shard = -1 and virtual_stages = "auto" by numbers.

        param_dtype = "auto" is kept: `resolve_precision` replaces it, and the replacement breaks no rule.

        Args:
            world_size: number of ranks; the product of the degrees must equal it.

        Raises:
            PlanError: a rule of `RULES` is broken, or the product of the degrees is not `world_size`.
        """
        concrete = self.resolve_precision(native_bf16=False)
        for rule in RULES:
            if rule.broken(concrete):
                raise PlanError(rule.name, where="plan", rule=rule.reason, fix=_fix(rule, concrete))
        parallel = self.parallel
        other_degrees = parallel.dp_replicate * parallel.tp * parallel.cp * parallel.pp
        degrees = " x ".join(f"{name} {getattr(parallel, name)}" for name in ("dp_replicate", "tp", "cp", "pp"))
        if parallel.dp_shard == -1:
            if world_size % other_degrees:
                raise PlanError(
                    f"{world_size} ranks cannot be divided by {degrees} = {other_degrees}",
                    where="plan.parallel",
                    rule="the product of the degrees must divide the number of ranks; dp_shard = -1 takes the quotient",
                    fix=f"start a multiple of {other_degrees} ranks, or choose degrees whose product divides {world_size}",
                )
            parallel = parallel.model_copy(update={"dp_shard": world_size // other_degrees})
        elif (total := other_degrees * parallel.dp_shard) != world_size:
            raise PlanError(
                f"{degrees} x dp_shard {parallel.dp_shard} = {total}, but there are {world_size} ranks",
                where="plan.parallel",
                rule="the product of the degrees must equal the number of ranks",
                fix=f"start {total} ranks, or "
                + (
                    f"choose degrees whose product divides {world_size}, and dp_shard = -1 for the quotient"
                    if world_size % other_degrees
                    else "set plan.parallel.dp_shard to -1 for the quotient"
                ),
            )
        if parallel.rows_per_rank and len(parallel.rows_per_rank) != parallel.data_ranks:
            raise PlanError(
                f"rows_per_rank has {len(parallel.rows_per_rank)} values, and there are {parallel.data_ranks} data ranks",
                where="plan.parallel.rows_per_rank",
                rule="it has one number of rows for each data rank: dp_replicate x dp_shard values",
                fix=f"set {parallel.data_ranks} values, or remove the key for equal numbers of rows",
            )
        inside = parallel.cp * parallel.tp * (parallel.data_ranks if parallel.zero == 0 else parallel.dp_shard)
        if parallel.etp > 1 and inside % (parallel.ep * parallel.etp):
            raise PlanError(
                f"ep {parallel.ep} x etp {parallel.etp} does not divide dp_shard {parallel.dp_shard} x cp {parallel.cp} x "
                f"tp {parallel.tp}",
                where="plan.parallel.etp",
                rule="experts are split over ranks of dp_shard x cp x tp; with zero = 0, over ranks of dp_replicate too",
                fix=f"set plan.parallel.ep and etp to numbers whose product divides {inside}",
            )
        if inside % parallel.ep:
            divisors = [divisor for divisor in range(1, inside + 1) if inside % divisor == 0]
            raise PlanError(
                f"ep {parallel.ep} does not divide dp_shard {parallel.dp_shard} x cp {parallel.cp} x tp {parallel.tp}",
                where="plan.parallel.ep",
                rule="experts are split over ranks of dp_shard x cp x tp; with zero = 0, over ranks of dp_replicate too",
                fix=f"set plan.parallel.ep to one of {', '.join(map(str, divisors))} that divides the number of experts",
            )
        stages = self.pipeline.stages_per_rank if parallel.pp > 1 or self.pipeline.virtual_stages != "auto" else 1
        pipeline = self.pipeline.model_copy(update={"virtual_stages": stages})
        return self.model_copy(update={"parallel": parallel, "pipeline": pipeline})

    def resolve_for_own_rows(self, world_size: int, where: str) -> "Plan":
        """`resolve` for a training loop that hands each data rank its rows.

        Args:
            world_size: number of ranks.
            where: the entry point, for the message.

        Raises:
            PlanError: as for `resolve`, or the plan has `rows_per_rank` or `rebalance`.
        """
        if self.parallel.rows_per_rank or self.parallel.rebalance != "off":
            raise PlanError(
                f'rows_per_rank = {list(self.parallel.rows_per_rank)} and rebalance = "{self.parallel.rebalance}"',
                where=f"plan.parallel, {where}",
                rule="they divide the global batches of weft train; this loop hands the same number of rows to each data rank",
                fix="remove plan.parallel.rows_per_rank and rebalance, or train with weft train",
            )
        return self.resolve(world_size)

    def resolve_precision(self, native_bf16: bool) -> "Plan":
        """Replace precision.param_dtype = "auto" by a dtype; see `Precision.resolve`."""
        return self.model_copy(update={"precision": self.precision.resolve(native_bf16)})


class Rule(Table):
    """A combination of settings that is refused, with reason and fix; see `RULES`."""

    name: str
    broken: Callable[[Plan], bool]
    reason: str
    fix: str
    candidates: dict[str, tuple[str | int, ...]] = {}
    """Candidate values for a fix, by key without "plan."; the fix names only values that break no other rule."""


def _fix(rule: Rule, plan: Plan) -> str:
    """Fix of a broken rule: its candidates that break no further rule, and after which no broken rule concerns the same key.

    If every candidate breaks a further rule, the fix names the candidates after which another key must be set too.
    """
    before = {other.name for other in RULES if other.broken(plan)}
    for allowed in (before, {other.name for other in RULES}):
        found = []
        for key, values in rule.candidates.items():
            valid = []
            for value in values:
                still_broken = [other for other in RULES if other.broken(_changed(plan, key, value))]
                if all(other.name in allowed and key not in other.candidates for other in still_broken):
                    valid.append(value)
            if valid:
                found.append(f"plan.{key} to {' or '.join(map(json.dumps, valid))}")
        if found:
            return f"set {', or '.join(found)}"
    return rule.fix


def _changed(plan: Plan, key: str, value: str | int) -> Plan:
    """Copy of a plan with another value of a key."""
    table, _, name = key.partition(".")
    return plan.model_copy(update={table: getattr(plan, table).model_copy(update={name: value})})


QUANTIZED_PAIRS = (("int8", "int8"), ("int4", "int8"), ("fp8", "fp8"))
"""Formats of weights, and of the inputs that are multiplied by them."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
STATE_BYTES = {"bf16": 2, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 128}  # with one float32 scale per block


def bytes_per_state_element(precision: Precision) -> float:
    """Bytes per element of optimizer state between updates."""
    return STATE_BYTES.get(precision.optimizer_state_dtype, BYTES[precision.update])


JOINT_SCHEDULES = ("dualpipev", "interleaved-overlap")
"""Named schedules in which a forward and a backward share a slot."""

# A single table for runtime, planner and docs, so that all three refuse the same plans.
RULES: tuple[Rule, ...] = (
    Rule(
        name="recompute of blocks together with parts of blocks",
        broken=lambda plan: "block" in plan.memory.recompute and len(plan.memory.recompute) > 1,
        reason="recomputing a block already includes all its parts",
        fix='set plan.memory.recompute to ["block"], or to parts of a block',
    ),
    Rule(
        name="recompute of mlp together with activation",
        broken=lambda plan: {"mlp", "activation"} <= set(plan.memory.recompute),
        reason="recomputing mlp already includes its activation function",
        fix='remove "mlp" or "activation" from plan.memory.recompute',
    ),
    Rule(
        name="recompute_interval > 1 without recompute",
        broken=lambda plan: plan.memory.recompute_interval > 1 and not plan.memory.recompute,
        reason="recompute_interval has no effect without recompute",
        fix="set plan.memory.recompute, or leave plan.memory.recompute_interval at 1",
    ),
    Rule(
        name="offload of blocks together with parts of blocks",
        broken=lambda plan: "block" in plan.memory.offload and len(plan.memory.offload) > 1,
        reason='"block" already includes attention and mlp',
        fix='set plan.memory.offload to ["block"], or to parts of a block',
    ),
    Rule(
        name="offload of recomputed activations",
        broken=lambda plan: (
            bool({"attention", "mlp"} & set(plan.memory.offload) & set(plan.memory.recompute))
            or ("block" in plan.memory.recompute and bool({"attention", "mlp"} & set(plan.memory.offload)))
        ),
        reason='a recomputed part saves no activations; only offload of "block" includes the saved input of a recomputed block',
        fix='remove the part from plan.memory.offload or from plan.memory.recompute, or set plan.memory.offload = ["block"]',
    ),
    Rule(
        name="offload settings without offload",
        broken=lambda plan: (
            not plan.memory.offload
            and (plan.memory.offload_to, plan.memory.offload_bytes, plan.memory.offload_prefetch) != ("host", 0, 1)
        ),
        reason="offload_to, offload_bytes and offload_prefetch have no effect without offload",
        fix="set plan.memory.offload, or remove offload_to, offload_bytes and offload_prefetch",
    ),
    Rule(
        name="optimizer_bytes with optimizer_device = device",
        broken=lambda plan: bool(plan.memory.optimizer_bytes) and plan.memory.optimizer_device == "device",
        reason="optimizer_bytes limits the optimizer state that is offloaded, and none is",
        fix='set plan.memory.optimizer_device to "host" or "disk", or remove plan.memory.optimizer_bytes',
    ),
    Rule(
        name="length of optimizer_bytes is neither 1 nor pp",
        broken=lambda plan: len(plan.memory.optimizer_bytes) not in (0, 1, plan.parallel.pp),
        reason="optimizer_bytes has one value for all ranks, or one value per pp rank",
        fix="give plan.memory.optimizer_bytes one value, or as many values as plan.parallel.pp",
    ),
    Rule(
        name="virtual_stages > 1 without a pipeline",
        broken=lambda plan: plan.pipeline.virtual_stages not in ("auto", 1) and plan.parallel.pp == 1,
        reason="only a pipeline has stages",
        fix="set plan.parallel.pp to the number of pipeline ranks, or leave plan.pipeline.virtual_stages at auto",
    ),
    Rule(
        name="stage_blocks together with costs",
        broken=lambda plan: (
            bool(plan.pipeline.stage_blocks)
            and (bool(plan.pipeline.block_costs) or plan.pipeline.embedding_cost + plan.pipeline.head_cost > 0)
        ),
        reason="stages are cut either by given numbers of blocks or by cost",
        fix="remove plan.pipeline.stage_blocks, or block_costs, embedding_cost and head_cost",
    ),
    Rule(
        name="cp_ulysses does not divide cp",
        broken=lambda plan: plan.parallel.cp % plan.parallel.cp_ulysses > 0,
        reason="the cp ranks form a grid: cp = cp_ulysses x ring",
        fix="set plan.parallel.cp_ulysses to a divisor of plan.parallel.cp",
    ),
    Rule(
        name="overlap_chunks without tp",
        broken=lambda plan: plan.comm.overlap_chunks not in ("auto", 1) and plan.parallel.tp == 1,
        reason="overlap_chunks cuts the matmuls and collectives of tensor parallelism",
        fix="set plan.parallel.tp, or leave plan.comm.overlap_chunks at auto",
    ),
    Rule(
        name="expert_overlap without ep",
        broken=lambda plan: plan.comm.expert_overlap == "joint" and plan.parallel.ep == 1,
        reason="experts exchange rows only where expert parallelism splits them",
        fix="set plan.parallel.ep, or leave plan.comm.expert_overlap at auto",
        candidates={"comm.expert_overlap": ("auto",)},
    ),
    Rule(
        name="joint experts in a pipeline without joint slots",
        broken=lambda plan: (
            plan.comm.expert_overlap == "joint"
            and plan.parallel.pp > 1
            and plan.pipeline.schedule not in JOINT_SCHEDULES
            and not plan.pipeline.schedule.endswith(".csv")
        ),
        reason="in a pipeline, the schedule says which forward and backward run together",
        fix='set plan.pipeline.schedule to "dualpipev" or "interleaved-overlap", or leave plan.comm.expert_overlap at auto',
        candidates={"comm.expert_overlap": ("auto",), "pipeline.schedule": JOINT_SCHEDULES},
    ),
    Rule(
        name="expert_compression without ep",
        broken=lambda plan: plan.comm.expert_compression != "none" and plan.parallel.ep == 1,
        reason="experts exchange rows only where expert parallelism splits them",
        fix='set plan.parallel.ep, or leave plan.comm.expert_compression = "none"',
        candidates={"comm.expert_compression": ("none",)},
    ),
    Rule(
        name="expert_balance without ep",
        broken=lambda plan: plan.parallel.expert_balance != "off" and plan.parallel.ep == 1,
        reason="all experts are on each rank, so that the load of ranks does not depend on the router",
        fix='set plan.parallel.ep, or leave plan.parallel.expert_balance = "off"',
        candidates={"parallel.expert_balance": ("off",)},
    ),
    Rule(
        name="etp without ep",
        broken=lambda plan: plan.parallel.etp > 1 and plan.parallel.ep == 1,
        reason="experts are split only where there are more ranks than experts; ep sends fewer bytes",
        fix="set plan.parallel.ep, up to the number of experts, or leave plan.parallel.etp at 1",
        candidates={"parallel.etp": (1,)},
    ),
    Rule(
        name="etp with replicas of experts",
        broken=lambda plan: plan.parallel.etp > 1 and plan.parallel.expert_balance != "off",
        reason="a replica is a complete expert on one rank",
        fix='set plan.parallel.etp = 1, or plan.parallel.expert_balance = "off"',
        candidates={"parallel.etp": (1,), "parallel.expert_balance": ("off",)},
    ),
    Rule(
        name="expert_slots without expert_balance",
        broken=lambda plan: plan.parallel.expert_slots != 2 and plan.parallel.expert_balance == "off",
        reason="a rank computes experts of other ranks with expert_balance alone",
        fix='set plan.parallel.expert_balance = "replicate", or leave out plan.parallel.expert_slots',
        candidates={"parallel.expert_balance": ("replicate",)},
    ),
    Rule(
        name="expert_relocate_every without ep",
        broken=lambda plan: plan.parallel.expert_relocate_every > 0 and plan.parallel.ep == 1,
        reason="all experts are on each rank",
        fix="set plan.parallel.ep, or leave plan.parallel.expert_relocate_every at 0",
        candidates={"parallel.expert_relocate_every": (0,)},
    ),
    Rule(
        name="expert_relocate_every with etp",
        broken=lambda plan: plan.parallel.expert_relocate_every > 0 and plan.parallel.etp > 1,
        reason="experts move as complete matrices, and the ranks of etp share them",
        fix="set plan.parallel.etp = 1, or leave plan.parallel.expert_relocate_every at 0",
        candidates={"parallel.expert_relocate_every": (0,), "parallel.etp": (1,)},
    ),
    Rule(
        name="expert_relocate_every with compression",
        broken=lambda plan: plan.parallel.expert_relocate_every > 0 and plan.comm.compression != "none",
        reason="the compression errors of earlier steps belong to the experts of each rank, and do not move with them",
        fix='set plan.comm.compression = "none", or leave plan.parallel.expert_relocate_every at 0',
        candidates={"parallel.expert_relocate_every": (0,), "comm.compression": ("none",)},
    ),
    Rule(
        name="expert_capacity below 1",
        broken=lambda plan: 0 < plan.parallel.expert_capacity < 1,
        reason="an expert could not even compute its part of an even load",
        fix="set plan.parallel.expert_capacity to 1 or more, such as 1.1, or to 0 to drop nothing",
    ),
    Rule(
        name="expert_drop without expert_capacity",
        broken=lambda plan: plan.parallel.expert_drop != "probs" and plan.parallel.expert_capacity == 0,
        reason="nothing is dropped without a capacity",
        fix="set plan.parallel.expert_capacity, such as 1.1, or leave out plan.parallel.expert_drop",
        candidates={"parallel.expert_drop": ("probs",)},
    ),
    Rule(
        name="rebalance with pp",
        broken=lambda plan: plan.parallel.rebalance != "off" and plan.parallel.pp > 1,
        reason="the time of a data rank is that of its slowest stage, and stages keep their blocks during a run",
        fix='set plan.parallel.rebalance = "off", or plan.parallel.pp = 1',
        candidates={"parallel.rebalance": ("off",), "parallel.pp": (1,)},
    ),
    Rule(
        name="rebalance with ep",
        broken=lambda plan: plan.parallel.rebalance != "off" and plan.parallel.ep > 1,
        reason="experts compute tokens of all ranks, so that the time of a data rank does not follow its rows",
        fix='set plan.parallel.rebalance = "off", or plan.parallel.ep = 1',
        candidates={"parallel.rebalance": ("off",), "parallel.ep": (1,)},
    ),
    Rule(
        name="dp_shard = 0",
        broken=lambda plan: plan.parallel.dp_shard == 0,
        reason="dp_shard is a number of ranks, or -1 for all ranks that other degrees leave",
        fix="set plan.parallel.dp_shard to -1 or to a positive number",
    ),
    Rule(
        name="fp16 forward without a loss scale",
        broken=lambda plan: plan.precision.param_dtype == "fp16" and plan.precision.loss_scale == "none",
        reason="fp16 gradients below 6e-8 become zero unless the loss is scaled up before backward",
        fix='set plan.precision.loss_scale = "dynamic", or use plan.precision.param_dtype = "bf16"',
    ),
    Rule(
        name="fp16 backward without a loss scale",
        broken=lambda plan: plan.precision.backward == "fp16" and plan.precision.loss_scale == "none",
        reason="fp16 gradients below 6e-8 become zero unless the loss is scaled up before backward",
        fix='set plan.precision.loss_scale = "dynamic", or leave plan.precision.backward = "forward"',
    ),
    Rule(
        name="fp16 backward after a forward that is not bf16",
        broken=lambda plan: plan.precision.backward == "fp16" and plan.precision.param_dtype != "bf16",
        reason="an fp16 forward has an fp16 backward anyway, and an fp32 forward would lose precision",
        fix='set plan.precision.param_dtype = "bf16", or leave plan.precision.backward = "forward"',
    ),
    Rule(
        name="fp16 update",
        broken=lambda plan: plan.precision.update == "fp16",
        reason="fp16 has no value between 1 and 1.00097, so that small updates of a weight are lost",
        fix='set plan.precision.update to "fp32" (or "bf16")',
        candidates={"precision.update": ("fp32", "bf16", "fp64")},
    ),
    Rule(
        name="split weights with dtypes other than bf16 and fp32",
        broken=lambda plan: (
            plan.precision.weights != "whole"
            and (plan.precision.param_dtype, plan.precision.update) != ("bf16", "fp32")
        ),
        reason="the upper half of an fp32 value is a bf16 value; no other two dtypes are related like that",
        fix='set plan.precision.weights = "whole", or plan.precision.param_dtype = "bf16" and plan.precision.update = "fp32"',
        candidates={"precision.weights": ("whole",), "precision.param_dtype": ("bf16",), "precision.update": ("fp32",)},
    ),
    Rule(
        name="bf16 or quantized optimizer state with an update dtype other than fp32",
        broken=lambda plan: plan.precision.optimizer_state_dtype != "update" and plan.precision.update != "fp32",
        reason="the state is unpacked into fp32 for each update, and packed from fp32 after it",
        fix='set plan.precision.update = "fp32", or leave plan.precision.optimizer_state_dtype = "update"',
        candidates={"precision.update": ("fp32",), "precision.optimizer_state_dtype": ("update",)},
    ),
    Rule(
        name="param_dtype wider than update",
        broken=lambda plan: BYTES[plan.precision.param_dtype] > BYTES[plan.precision.update],
        reason="forward weights are cast from master weights; a wider dtype adds bytes and no information",
        fix="set plan.precision.update at least as wide as plan.precision.param_dtype",
        candidates={"precision.update": ("bf16", "fp32", "fp64"), "precision.param_dtype": ("bf16", "fp32")},
    ),
    Rule(
        name="zero = 0 with a reduce_dtype other than update",
        broken=lambda plan: plan.parallel.zero == 0 and plan.precision.reduce_dtype != plan.precision.update,
        reason="replicated gradients are reduced in the buffers that accumulate them, in the dtype of update",
        fix="set plan.precision.reduce_dtype to plan.precision.update, or use zero = 1",
        candidates={"precision.reduce_dtype": ("fp32", "bf16", "fp64"), "parallel.zero": (1,)},
    ),
    Rule(
        name="fp16 gradient reduction",
        broken=lambda plan: plan.precision.reduce_dtype == "fp16",
        reason="a sum over ranks overflows fp16 at 65504",
        fix='set plan.precision.reduce_dtype to "fp32" or "bf16"',
        candidates={"precision.reduce_dtype": ("fp32", "bf16", "fp64")},
    ),
    Rule(
        name="compressed gradients in fp64",
        broken=lambda plan: plan.comm.compression != "none" and plan.precision.reduce_dtype == "fp64",
        reason="messages are encoded from fp32, and the compression error is kept in fp32",
        fix='set plan.precision.reduce_dtype to "fp32" or "bf16", or leave plan.comm.compression = "none"',
        candidates={"precision.reduce_dtype": ("fp32", "bf16"), "comm.compression": ("none",)},
    ),
    Rule(
        name="compute.attention with cp",
        broken=lambda plan: plan.parallel.cp > 1 and plan.compute.attention not in ("auto", "varlen"),
        reason="context parallelism splits attention by itself, document by document",
        fix='set plan.compute.attention = "auto", or plan.parallel.cp = 1',
        candidates={"compute.attention": ("auto",)},
    ),
    Rule(
        name="FP8 matmuls with another dtype than bf16 or fp32",
        broken=lambda plan: (
            plan.precision.matmul != "forward"
            and (plan.precision.param_dtype in ("fp16", "fp64") or plan.precision.backward == "fp16")
        ),
        reason="FP8 matmuls round from, and return, bf16 or fp32",
        fix='set plan.precision.param_dtype = "bf16" and backward = "forward", or plan.precision.matmul = "forward"',
        candidates={"precision.matmul": ("forward",), "precision.param_dtype": ("bf16",)},
    ),
    Rule(
        name="FP8 matmuls with overlapped matmuls of tp",
        broken=lambda plan: (
            plan.precision.matmul != "forward" and plan.parallel.tp > 1 and plan.comm.overlap_chunks != 1
        ),
        reason="matmuls that overlap with their collective are computed in chunks, in the dtype of forward",
        fix='set plan.comm.overlap_chunks = 1, or plan.precision.matmul = "forward"',
        candidates={"comm.overlap_chunks": (1,), "precision.matmul": ("forward",)},
    ),
    Rule(
        name="quantized weights with FP8 matmuls",
        broken=lambda plan: plan.precision.quantize != "none" and plan.precision.matmul != "forward",
        reason="FP8 matmuls round the weights once more, so that what is exported is not what was trained",
        fix='set plan.precision.matmul = "forward", or plan.precision.quantize = "none"',
        candidates={"precision.matmul": ("forward",), "precision.quantize": ("none",)},
    ),
    Rule(
        name="quantized weights with overlapped matmuls of tp",
        broken=lambda plan: (
            plan.precision.quantize != "none" and plan.parallel.tp > 1 and plan.comm.overlap_chunks != 1
        ),
        reason="matmuls that overlap with their collective are computed in chunks, with the exact weights",
        fix='set plan.comm.overlap_chunks = 1, or plan.precision.quantize = "none"',
        candidates={"comm.overlap_chunks": (1,), "precision.quantize": ("none",)},
    ),
    Rule(
        name="quantized weights with weights split into ties away from zero",
        broken=lambda plan: plan.precision.quantize != "none" and plan.precision.weights == "split",
        reason="the weights that are exported are a cast, which rounds ties to even",
        fix='set plan.precision.weights to "split_even" or "whole", or plan.precision.quantize = "none"',
        candidates={"precision.weights": ("whole", "split_even"), "precision.quantize": ("none",)},
    ),
    Rule(
        name="quantized inputs beside weights that are not quantized, or as the other kind of number",
        broken=lambda plan: (
            plan.precision.quantize_inputs != "none"
            and (plan.precision.quantize, plan.precision.quantize_inputs) not in QUANTIZED_PAIRS
        ),
        reason="a server multiplies integers by integers, and floating-point numbers by floating-point numbers",
        fix='set plan.precision.quantize = plan.precision.quantize_inputs, or plan.precision.quantize_inputs = "none"',
        candidates={"precision.quantize": ("int8", "fp8"), "precision.quantize_inputs": ("none",)},
    ),
    Rule(
        name="quantized weights with fp64 or with another dtype in backward",
        broken=lambda plan: (
            plan.precision.quantize != "none"
            and (plan.precision.param_dtype == "fp64" or plan.precision.backward == "fp16")
        ),
        reason="grids are computed in fp32, and backward rounds the weights again, from the dtype of forward",
        fix='set plan.precision.param_dtype = "bf16" or "fp32" and backward = "forward", or plan.precision.quantize = "none"',
        candidates={"precision.quantize": ("none",), "precision.param_dtype": ("bf16", "fp32")},
    ),
    Rule(
        name="emulate_fp8 without FP8 matmuls",
        broken=lambda plan: plan.precision.emulate_fp8 and plan.precision.matmul == "forward",
        reason="emulate_fp8 has no effect without FP8 matmuls",
        fix='set plan.precision.matmul = "fp8", or remove plan.precision.emulate_fp8',
        candidates={"precision.matmul": ("fp8", "fp8_block")},
    ),
    Rule(
        name="compiled blocks with recompute or offload of parts of blocks",
        broken=lambda plan: (
            plan.compute.compile == "blocks" and bool({*plan.memory.recompute, *plan.memory.offload} - {"block"})
        ),
        reason="a block is compiled as a whole, and torch.compile chooses what is saved inside of it",
        fix='set plan.memory.recompute and plan.memory.offload to ["block"] or [], or leave plan.compute.compile = "off"',
        candidates={"compute.compile": ("off",)},
    ),
    Rule(
        name="compiled blocks with an fp16 backward",
        broken=lambda plan: plan.compute.compile == "blocks" and plan.precision.backward == "fp16",
        reason="gradients of an fp16 backward declare another dtype than they store, which compiled code does not take",
        fix='set plan.compute.compile = "off", or leave plan.precision.backward = "forward"',
        candidates={"compute.compile": ("off",), "precision.backward": ("forward",)},
    ),
    Rule(
        name="compiled blocks with Triton operators by name",
        broken=lambda plan: (
            plan.compute.compile == "blocks"
            and "triton" in plan.compute.kernels.model_dump(exclude=set(OUTSIDE_OF_BLOCKS)).values()
        ),
        reason="compiled blocks fuse norms, activations and experts with the operators beside them",
        fix='leave "triton" out of plan.compute.kernels, or set plan.compute.compile = "off"',
        candidates={"compute.compile": ("off",)},
    ),
    Rule(
        name="compression settings without compression",
        broken=lambda plan: (
            plan.comm.compression == "none" and (plan.comm.compress_scope, plan.comm.error_feedback) != ("all", True)
        ),
        reason="compress_scope and error_feedback have no effect without compression",
        fix="set plan.comm.compression, or remove compress_scope and error_feedback",
    ),
)
