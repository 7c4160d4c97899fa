"""Plan: how a model runs on a cluster, as a small frozen object that TOML can hold. Imports no torch."""

import json
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.errors import PlanError

Degree = Annotated[int, Field(ge=1)]
DType = Literal["fp64", "fp32", "bf16", "fp16"]


class Table(BaseModel):
    """A frozen table of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Parallel(Table):
    """Degrees of each way to split the work; their product is the number of ranks."""

    dp_replicate: Degree = 1
    """Copies of the whole data-parallel group; gradients are all-reduced between them."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Data ranks that share one copy of the sharded state; -1 takes what is left of the ranks."""
    zero: Literal[0, 1, 2, 3] = 3
    """What dp_shard splits: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters (ZeRO stages)."""
    tp: Degree = 1
    """Tensor parallelism: ranks that share each matrix."""
    sp: bool = True
    """Sequence parallelism: between the matrices, tp ranks hold a part of the sequence each."""
    cp: Degree = 1
    """Context parallelism: ranks that share each sequence."""
    cp_ulysses: Degree = 1
    """Of cp, the ranks that trade heads for tokens (Ulysses); the others pass keys and values on (ring)."""
    ep: Degree = 1
    """Expert parallelism: ranks that share the experts of a layer."""
    pp: Degree = 1
    """Pipeline parallelism: ranks that share the blocks."""

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows of a batch (needs a resolved dp_shard)."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients are averaged: those that see different tokens, tp ranks apart."""
        return self.data_ranks * self.cp


FEWEST_STAGES = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
"""Fewest stages that each rank holds, by schedule; 1 with those that are not named."""


class Pipeline(Table):
    """How the stages of a pipeline are cut, and in which order they work."""

    schedule: str = "1f1b"
    """Name of a schedule, or a file of one's own that ends in .csv: one line a rank, one cell a slot."""
    virtual_stages: Literal["auto"] | Degree = "auto"
    """Stages that each rank holds; auto: the fewest of the schedule: 2 with interleaved, zbv and dualpipev, else 1."""
    stage_blocks: tuple[Degree, ...] = ()
    """Blocks of each stage, first to last; empty: cut by cost."""
    block_costs: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Cost of each block; empty: all the same."""
    embedding_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost of the embedding, in the unit of block_costs (a block, where that is empty)."""
    head_cost: Annotated[float, Field(ge=0)] = 0.0
    """Cost of last norm, head and loss, in the same unit."""

    @property
    def stages_a_rank(self) -> int:
        """`virtual_stages` as a number."""
        return FEWEST_STAGES.get(self.schedule, 1) if self.virtual_stages == "auto" else self.virtual_stages


class Precision(Table):
    """Number formats of each part of a step."""

    param_dtype: DType | Literal["auto"] = "auto"
    """Dtype of weights and activations in forward and backward; auto: bf16 where the device computes it natively or another
    setting needs it, else fp32. What was chosen is written in the run's job.toml, its checkpoints and its report."""
    backward: Literal["forward", "fp16"] = "forward"
    """Format in which gradients of activations and weights are computed: that of forward, or fp16, scaled, behind a forward in
    bf16, whose activations are cast when they are used."""
    update: DType = "fp32"
    """Format of the weights the optimizer updates, and of its state."""
    reduce_dtype: DType = "fp32"
    """Format in which gradients are summed over ranks and micro-batches."""
    loss_scale: Literal["none", "dynamic"] | Annotated[float, Field(gt=0)] = "none"
    """Factor on the loss that keeps fp16 gradients from underflowing: none, dynamic, or a fixed number."""
    fp32_modules: tuple[Literal["router", "norm", "head"], ...] = ()
    """Parts of the model that compute in float32 whatever the format of forward. The loss always does."""
    weights: Literal["whole", "split", "split_even"] = "whole"
    """How a weight of the update is held: whole, beside its cast for forward; or split into that cast and the rest, in the
    same memory, where ties are rounded away from zero or, with one bit more, to even as a cast does."""
    optimizer_state_dtype: Literal["update", "bf16", "int8", "int4"] = "update"
    """Format of the optimizer's state between updates: that of the update; bfloat16; or 8 or 4 bits, in blocks with a scale."""

    @property
    def needs_bf16(self) -> bool:
        """Whether a setting other than forward works with a bf16 forward alone."""
        return self.weights != "whole" or self.backward == "fp16" or self.update == "bf16"

    def resolve(self, native_bf16: bool) -> "Precision":
        """Replace param_dtype = "auto" by a dtype; any other stays.

        Args:
            native_bf16: whether the device computes bf16 natively, see `weft.device.device.Device.supports`.
        """
        if self.param_dtype != "auto":
            return self
        return self.model_copy(update={"param_dtype": "bf16" if native_bf16 or self.needs_bf16 else "fp32"})


class Memory(Table):
    """What is not held on the device, or not held at all."""

    recompute: tuple[Literal["block", "attention", "mlp", "activation", "norm"], ...] = ()
    """What backward computes again instead of keeping it: whole blocks, their attention or mlp, or only what activation
    functions and norms make."""
    recompute_interval: Degree = 1
    """Only every so-manieth block does, the first one included."""
    optimizer_device: Literal["device", "host", "disk"] = "device"
    """Where the optimizer's states live between updates."""
    optimizer_bytes: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Bytes of them that a rank has there, the others stay on the device: one number for all ranks, or one for each rank of pp;
    empty: all."""
    offload: tuple[Literal["block", "attention", "mlp"], ...] = ()
    """Parts of blocks whose activations wait elsewhere between forward and backward."""
    offload_to: Literal["host", "disk"] = "host"
    """Where they wait."""
    offload_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of them that a rank has there at most, the others stay on the device; 0: all. One tensor must fit."""
    offload_prefetch: Degree = 1
    """Parts whose activations come back before they are asked for."""
    offload_dir: str = "/var/tmp"
    """Of the disk, not of a file system in memory, as /tmp often is: where each rank keeps files. They have no names, and go
    with the process."""


class Comm(Table):
    """How ranks speak to each other."""

    overlap_chunks: Literal["auto"] | Degree = "auto"
    """Chunks in which tensor-parallel products and their messages run beside each other; auto: for each shape what is fastest
    by a measured model, and 1 where messages cannot be hidden, as on the ranks of one CPU."""
    hierarchy: Literal["auto", "two_level", "flat"] = "auto"
    """Collectives of ranks on several hosts: inside each host and then between hosts (two_level), in one ring of all ranks
    (flat), or what suits the device (auto)."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose weights are gathered ahead of the one that computes (zero = 3). Ranks that share memory, whose gathers take
    the cores from computation, gather none ahead."""
    ulysses_chunks: Degree = 1
    """Groups in which the heads of Ulysses travel, each while that before it is attended to."""
    topology: str = ""
    """File that declares the hosts of the job and the links between their ranks, as `weft topology --out` writes it; empty:
    which ranks share a host is all that is known."""
    compression: Literal["none", "bf16", "fp16", "int8", "2:4", "1-bit"] = "none"
    """Of gradients on their way between data ranks: as they are; 16 bits a number; 8, in blocks with a scale; the two largest
    of every four, 9 bits; or signs, which only optimizer.name = "onebit-adam" can use."""
    compress_scope: Literal["all", "inter_node"] = "all"
    """Which of these messages: all, or those between hosts, where a group of ranks is on several."""
    error_feedback: bool = True
    """Whether what a message leaves out is added to the next one."""


class Prediction(Table):
    """What `weft plan` expected of a plan. `weft train` puts what it measures beside it."""

    cluster: str
    """Hosts and devices it is for, in words."""
    micro_batch: int
    """Rows, of train.micro_batch_size, for which it holds."""
    step_seconds: float
    terms: dict[str, float]
    """Seconds that the step consists of, on the busiest rank."""
    tokens_per_second: float
    memory_bytes: int
    """At the fullest moment of the fullest rank."""
    memory: dict[str, int]
    """What those of the first rank consist of."""
    sent_bytes: dict[str, int] = {}
    """What the first rank sends in a step, by axis; empty where no dry run has counted it."""


class Plan(Table):
    """How a model runs on a cluster. Frozen; read by the runtime, the planner, checkpoints and the report alike."""

    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    precision: Precision = Precision()
    memory: Memory = Memory()
    comm: Comm = Comm()
    prediction: Prediction | None = None
    """What the planner expects of it; written by `weft plan`."""

    def resolve(self, world_size: int) -> "Plan":
        """Check every rule, and replace -1 and the "auto" of virtual_stages by numbers.

        A forward dtype of "auto" stays: `resolve_precision` replaces it, and breaks no rule.

        Args:
            world_size: number of ranks the plan must fill exactly.

        Raises:
            PlanError: a rule of `RULES` is broken, or the degrees do not multiply to `world_size`.
        """
        concrete = self.resolve_precision(native_bf16=False)
        for rule in RULES:
            if rule.broken(concrete):
                raise PlanError(rule.name, where="plan", rule=rule.reason, fix=_fix(rule, concrete))
        parallel = self.parallel
        others = parallel.dp_replicate * parallel.tp * parallel.cp * parallel.pp
        degrees = " x ".join(f"{name} {getattr(parallel, name)}" for name in ("dp_replicate", "tp", "cp", "pp"))
        if parallel.dp_shard == -1:
            if world_size % others:
                raise PlanError(
                    f"{world_size} ranks cannot be divided by {degrees} = {others}",
                    where="plan.parallel",
                    rule="the degrees must divide the number of ranks; dp_shard = -1 takes what is left",
                    fix=f"start a multiple of {others} ranks, or choose degrees whose product divides {world_size}",
                )
            parallel = parallel.model_copy(update={"dp_shard": world_size // others})
        elif others * parallel.dp_shard != world_size:
            raise PlanError(
                f"{degrees} x dp_shard {parallel.dp_shard} = {others * parallel.dp_shard}, but there are {world_size} ranks",
                where="plan.parallel",
                rule="the product of the degrees is the number of ranks",
                fix=f"start {others * parallel.dp_shard} ranks, or "
                + (
                    f"choose degrees whose product divides {world_size}, and dp_shard = -1 to take what is left"
                    if world_size % others
                    else "set plan.parallel.dp_shard to -1 to take what is left"
                ),
            )
        inside = parallel.cp * parallel.tp * (parallel.data_ranks if parallel.zero == 0 else parallel.dp_shard)
        if inside % parallel.ep:
            divisors = [number for number in range(1, inside + 1) if inside % number == 0]
            raise PlanError(
                f"ep {parallel.ep} does not divide dp_shard {parallel.dp_shard} x cp {parallel.cp} x tp {parallel.tp}",
                where="plan.parallel.ep",
                rule="experts are shared by ranks of dp_shard x cp x tp (zero = 0: of dp_replicate too)",
                fix=f"set plan.parallel.ep to one of {', '.join(map(str, divisors))} that divides the number of experts",
            )
        stages = self.pipeline.stages_a_rank if parallel.pp > 1 or self.pipeline.virtual_stages != "auto" else 1
        pipeline = self.pipeline.model_copy(update={"virtual_stages": stages})
        return self.model_copy(update={"parallel": parallel, "pipeline": pipeline})

    def resolve_precision(self, native_bf16: bool) -> "Plan":
        """Replace precision.param_dtype = "auto" by a dtype; see `Precision.resolve`."""
        return self.model_copy(update={"precision": self.precision.resolve(native_bf16)})


class Rule(Table):
    """One line of the table of settings that exclude each other."""

    name: str
    broken: Callable[[Plan], bool]
    reason: str
    fix: str
    candidates: dict[str, tuple[str | int, ...]] = {}
    """By key, values that may mend it where other rules allow; of those, the fix of a plan names the ones that do."""


def _fix(rule: Rule, plan: Plan) -> str:
    """The fix of a broken rule: those of its candidates that break no other rule, and leave none that is about the same key.

    Where every candidate breaks another rule, those after which another key is to be set.
    """
    before = {other.name for other in RULES if other.broken(plan)}
    for allowed in (before, {other.name for other in RULES}):
        found = []
        for key, values in rule.candidates.items():
            mending = []
            for value in values:
                left = [other for other in RULES if other.broken(_changed(plan, key, value))]
                if all(other.name in allowed and key not in other.candidates for other in left):
                    mending.append(value)
            if mending:
                found.append(f"plan.{key} to {' or '.join(map(json.dumps, mending))}")
        if found:
            return f"set {', or '.join(found)}"
    return rule.fix


def _changed(plan: Plan, key: str, value: str | int) -> Plan:
    table, _, name = key.partition(".")
    return plan.model_copy(update={table: getattr(plan, table).model_copy(update={name: value})})


BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
STATE_BYTES = {"bf16": 2, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 128}  # with a float32 number for each block


def state_bytes(precision: Precision) -> float:
    """Bytes of a number of the optimizer's state, between updates."""
    return STATE_BYTES.get(precision.optimizer_state_dtype, BYTES[precision.update])


# The one table of settings that exclude each other: the runtime, the planner and the docs read it.
RULES: tuple[Rule, ...] = (
    Rule(
        name="recompute of blocks and of a part of them",
        broken=lambda plan: "block" in plan.memory.recompute and len(plan.memory.recompute) > 1,
        reason="a block that is computed again keeps nothing inside that a part could leave out",
        fix='set plan.memory.recompute to ["block"], or to parts of a block',
    ),
    Rule(
        name="recompute of mlp and of activation",
        broken=lambda plan: {"mlp", "activation"} <= set(plan.memory.recompute),
        reason="a feed-forward part that is computed again keeps nothing of its activation function",
        fix="leave one of the two out of plan.memory.recompute",
    ),
    Rule(
        name="recompute_interval > 1 without recompute",
        broken=lambda plan: plan.memory.recompute_interval > 1 and not plan.memory.recompute,
        reason="it chooses the blocks that compute again",
        fix="set plan.memory.recompute, or leave plan.memory.recompute_interval at 1",
    ),
    Rule(
        name="offload of blocks and of a part of them",
        broken=lambda plan: "block" in plan.memory.offload and len(plan.memory.offload) > 1,
        reason="the parts of a block are in it",
        fix='set plan.memory.offload to ["block"], or to parts of a block',
    ),
    Rule(
        name="offload of what is recomputed",
        broken=lambda plan: (
            bool({"attention", "mlp"} & set(plan.memory.offload) & set(plan.memory.recompute))
            or ("block" in plan.memory.recompute and bool({"attention", "mlp"} & set(plan.memory.offload)))
        ),
        reason="what is computed again keeps nothing inside that could wait elsewhere; its input is a matter of the block",
        fix='leave the part out of plan.memory.offload or of plan.memory.recompute, or set plan.memory.offload = ["block"]',
    ),
    Rule(
        name="settings of offload without it",
        broken=lambda plan: (
            not plan.memory.offload
            and (plan.memory.offload_to, plan.memory.offload_bytes, plan.memory.offload_prefetch) != ("host", 0, 1)
        ),
        reason="they say where, how much and how early of the activations that plan.memory.offload names",
        fix="set plan.memory.offload, or leave them out",
    ),
    Rule(
        name="optimizer_bytes without another place",
        broken=lambda plan: bool(plan.memory.optimizer_bytes) and plan.memory.optimizer_device == "device",
        reason="it is how much of the optimizer's states leaves the device",
        fix='set plan.memory.optimizer_device to "host" or "disk", or leave out plan.memory.optimizer_bytes',
    ),
    Rule(
        name="optimizer_bytes of another number of stages",
        broken=lambda plan: len(plan.memory.optimizer_bytes) not in (0, 1, plan.parallel.pp),
        reason="there is one number for all ranks, or one for each rank of pp",
        fix="give plan.memory.optimizer_bytes one number, or plan.parallel.pp of them",
    ),
    Rule(
        name="virtual_stages > 1 without a pipeline",
        broken=lambda plan: plan.pipeline.virtual_stages not in ("auto", 1) and plan.parallel.pp == 1,
        reason="virtual stages are what a rank of a pipeline holds more than one of",
        fix="set plan.parallel.pp to the ranks of the pipeline, or leave plan.pipeline.virtual_stages at auto",
    ),
    Rule(
        name="stage_blocks and costs at once",
        broken=lambda plan: (
            bool(plan.pipeline.stage_blocks)
            and (bool(plan.pipeline.block_costs) or plan.pipeline.embedding_cost + plan.pipeline.head_cost > 0)
        ),
        reason="stages are cut either by the given numbers of blocks or by cost",
        fix="leave out plan.pipeline.stage_blocks, or all costs",
    ),
    Rule(
        name="cp_ulysses does not divide cp",
        broken=lambda plan: plan.parallel.cp % plan.parallel.cp_ulysses > 0,
        reason="the ranks of a sequence form a grid: cp = cp_ulysses x ring",
        fix="set plan.parallel.cp_ulysses to a divisor of plan.parallel.cp",
    ),
    Rule(
        name="overlap_chunks without tp",
        broken=lambda plan: plan.comm.overlap_chunks not in ("auto", 1) and plan.parallel.tp == 1,
        reason="it cuts the products of tensor parallelism and their messages",
        fix="set plan.parallel.tp, or leave plan.comm.overlap_chunks at auto",
    ),
    Rule(
        name="dp_shard = 0",
        broken=lambda plan: plan.parallel.dp_shard == 0,
        reason="dp_shard is a number of ranks, or -1 for what is left of them",
        fix="set plan.parallel.dp_shard to -1 or to a positive number",
    ),
    Rule(
        name="fp16 forward without a loss scale",
        broken=lambda plan: plan.precision.param_dtype == "fp16" and plan.precision.loss_scale == "none",
        reason="fp16 gradients below 6e-8 become zero unless the loss is scaled up before backward",
        fix='set plan.precision.loss_scale = "dynamic", or use forward = "bf16"',
    ),
    Rule(
        name="fp16 backward without a loss scale",
        broken=lambda plan: plan.precision.backward == "fp16" and plan.precision.loss_scale == "none",
        reason="fp16 gradients below 6e-8 become zero unless the loss is scaled up before backward",
        fix='set plan.precision.loss_scale = "dynamic", or leave plan.precision.backward = "forward"',
    ),
    Rule(
        name="fp16 backward behind another forward than bf16",
        broken=lambda plan: plan.precision.backward == "fp16" and plan.precision.param_dtype != "bf16",
        reason="a forward in fp16 has its backward in fp16 anyway, and one in fp32 would lose by it",
        fix='set plan.precision.param_dtype = "bf16", or leave plan.precision.backward = "forward"',
    ),
    Rule(
        name="fp16 update",
        broken=lambda plan: plan.precision.update == "fp16",
        reason="fp16 holds no number between 1 and 1.00097, so that small updates of a weight are lost",
        fix='set plan.precision.update to "fp32" (or "bf16")',
        candidates={"precision.update": ("fp32", "bf16", "fp64")},
    ),
    Rule(
        name="split weights of other formats than bf16 and fp32",
        broken=lambda plan: (
            plan.precision.weights != "whole"
            and (plan.precision.param_dtype, plan.precision.update) != ("bf16", "fp32")
        ),
        reason="the upper half of an fp32 number is a bf16 number; no other two formats fit into one another like that",
        fix='set plan.precision.param_dtype = "bf16" and update = "fp32", or leave plan.precision.weights = "whole"',
        candidates={"precision.weights": ("whole",), "precision.param_dtype": ("bf16",), "precision.update": ("fp32",)},
    ),
    Rule(
        name="states of few bits with another update than fp32",
        broken=lambda plan: plan.precision.optimizer_state_dtype != "update" and plan.precision.update != "fp32",
        reason="they are packed from fp32 numbers, and unpacked into fp32 for each update",
        fix='set plan.precision.update = "fp32", or leave plan.precision.optimizer_state_dtype = "update"',
        candidates={"precision.update": ("fp32",), "precision.optimizer_state_dtype": ("update",)},
    ),
    Rule(
        name="a forward format wider than the update format",
        broken=lambda plan: BYTES[plan.precision.param_dtype] > BYTES[plan.precision.update],
        reason="the forward weights are cast from the updated weights; a wider format adds bytes and no information",
        fix="set plan.precision.update at least as wide as plan.precision.param_dtype",
        candidates={"precision.update": ("bf16", "fp32", "fp64"), "precision.param_dtype": ("bf16", "fp32")},
    ),
    Rule(
        name="zero = 0 with gradients reduced in another format than the update's",
        broken=lambda plan: plan.parallel.zero == 0 and plan.precision.reduce_dtype != plan.precision.update,
        reason="replicated gradients are reduced where they are accumulated, in the update format",
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
        reason="messages are made of fp32 numbers, and what they leave out is kept in fp32",
        fix='set plan.precision.reduce_dtype to "fp32" or "bf16", or leave plan.comm.compression = "none"',
        candidates={"precision.reduce_dtype": ("fp32", "bf16"), "comm.compression": ("none",)},
    ),
    Rule(
        name="settings of compression without it",
        broken=lambda plan: (
            plan.comm.compression == "none" and (plan.comm.compress_scope, plan.comm.error_feedback) != ("all", True)
        ),
        reason="they say which messages are compressed, and what becomes of the rest",
        fix="set plan.comm.compression, or leave them out",
    ),
)
