"""Conversion of a layout to a plan, and its cost: throughput, energy, money and goodput under failures."""

import math
from dataclasses import dataclass, replace

from weft.comm.compression.rows import BLOCK, row_bytes
from weft.plan import BYTES, Compute, Plan, Precision, Prediction, bytes_per_state_element
from weft.planner.costmodel.frameworks import WEFT, FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec, DeviceSpec
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape
from weft.planner.dryrun.trace import Trace
from weft.planner.search.space import Choice, Space
from weft.precision.dtypes import missing_fp8

RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "light": ("activation", "norm"),
    "attention": ("attention", "activation", "norm"),
    "mlp": ("mlp",),
    "full": ("block",),
}
WRITE_SECONDS = 30.0  # maximum time of a background checkpoint write; before its end, a failure loses the checkpoint
RESTART_SECONDS = 180.0  # from a failure to the next step: detection, restart, loading


TRAFFIC = {"reference": 2.2, "triton": 1.3, "compiled": 1.0}
"""Memory traffic of norms, activations and sums, relative to Megatron-Core, by what computes them on an accelerator."""


def matmul_dtype(precision: Precision, device: DeviceSpec) -> str:
    """Dtype of the matmuls of the layers, a key of `roofline.BYTES`.

    Args:
        precision: dtypes of the plan.
        device: device to plan for.

    Raises:
        PlanError: FP8 matmuls on a device without FP8 that the plan does not let it emulate.
    """
    if precision.matmul != "forward" and "fp8" in device.peak:
        return precision.matmul
    if precision.matmul != "forward" and not precision.emulate_fp8:
        raise missing_fp8(precision.matmul, device.name)
    is_fp32 = precision.matmul != "forward" or precision.resolve(device.native_bf16).param_dtype in ("fp32", "fp64")
    return "fp32" if is_fp32 else "bf16"


def stack_for(
    precision: Precision,
    compute: Compute,
    device_type: str,
    trained: float = 1.0,
    references: float = 0.0,
    expert_compression: str = "none",
) -> FrameworkModel:
    """Framework model of Weft with the dtypes and the operators of a plan; param_dtype "auto" counts as bf16.

    Args:
        precision: dtypes of the plan.
        compute: operators of the plan; a model whose modules have no fused operator counts as if it had them.
        device_type: "cpu", "cuda" or "npu".
        trained: share of the parameters that is trained; the others have no gradients and no moments.
        references: parameters of further models that are not trained, relative to those of the model.
        expert_compression: value of the plan.
    """
    precision = precision.resolve(native_bf16=True)
    copy = BYTES[precision.param_dtype] if precision.param_dtype != precision.update else 0
    master = BYTES[precision.update] - (copy if precision.weights != "whole" else 0)
    masters = (1 + references) * (master if copy else 0)
    gradient = trained * BYTES[precision.reduce_dtype]
    norms = compute.kernel("rms_norm")
    kind = "compiled" if compute.compile == "blocks" else norms
    if kind == "auto":
        kind = "triton" if device_type == "cuda" else "reference"
    own = WEFT
    return replace(
        own,
        elementwise_traffic=own.elementwise_traffic if device_type == "cpu" else TRAFFIC[kind],
        portable=device_type == "cpu",
        casts_experts=precision.matmul != "fp8_block",
        dispatch_bytes=own.dispatch_bytes if expert_compression == "none" else row_bytes(BLOCK) / BLOCK,
        fused_loss=compute.kernel("linear_cross_entropy") != "reference",
        weight_bytes=(1 + references) * (copy or BYTES[precision.update]),
        optimizer_bytes=masters + trained * 2 * bytes_per_state_element(precision),
        resident_optimizer_bytes=masters,
        gradient_bytes=gradient,
        reduce_bytes=gradient,
        shards_hold_copy=not copy or precision.weights != "whole",
    )


def plan_of(layout: TrainingLayout, base: Plan, head_cost: float = 0.0) -> Plan:
    """Plan of a layout.

    Args:
        layout: result of a search.
        base: plan that provides all other settings, such as dtypes.
        head_cost: time of head and loss in units of one block's time, used to balance pipeline stages.
    """
    shard = layout.shard or layout.dp
    parallel = base.parallel.model_copy(
        update={
            "dp_replicate": layout.dp // shard,
            "dp_shard": shard,
            "zero": layout.zero,
            "tp": layout.tp,
            "sp": layout.sp or layout.tp == 1,
            "cp": layout.cp,
            "cp_ulysses": layout.ulysses,
            "ep": layout.ep,
            "etp": layout.expert_tp or 1,
            "pp": layout.pp,
            "expert_balance": "replicate" if layout.expert_slots else "off",
            "expert_slots": layout.expert_slots or 2,
            "expert_relocate_every": base.parallel.expert_relocate_every if layout.ep > 1 else 0,
        }
    )
    order = {"schedule": layout.schedule, "virtual_stages": layout.vpp, "stage_blocks": (), "block_costs": ()}
    pipeline = base.pipeline.model_copy(update={**order, "head_cost": head_cost if layout.pp > 1 else 0.0})
    memory = base.memory.model_copy(
        update={
            "recompute": RECOMPUTE[layout.recompute],
            "recompute_interval": round(1 / layout.recompute_share),
            "offload": ("block",) if layout.offload else (),
            "optimizer_device": "host" if layout.optimizer_on_host else "device",
        }
    )
    # In a pipeline the schedule says what is joint.
    overlap = "joint" if layout.joint_experts and layout.pp == 1 else "auto"
    rows = base.comm.expert_compression if layout.ep > 1 else "none"
    comm = base.comm.model_copy(update={"expert_overlap": overlap, "expert_compression": rows})
    tables = {"parallel": parallel, "pipeline": pipeline, "memory": memory, "comm": comm, "prediction": None}
    return base.model_copy(update=tables)


@dataclass(frozen=True)
class Cost:
    """Throughput, efficiency and price of a layout."""

    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization: causal attention, no recomputation, relative to the peak of the matmul dtype."""
    joules_per_token: float | None
    grams_co2_per_million_tokens: float | None
    dollars_per_trillion_tokens: float | None
    dollars_per_month: float | None
    goodput: float
    """Share of time that makes progress, without failures, restarts and checkpoints."""
    checkpoint_seconds: float
    """Optimal checkpoint interval in seconds; infinite without failures."""


def cost_of(
    shape: Shape,
    layout: TrainingLayout,
    seconds: float,
    cluster: ClusterSpec,
    failure_hours: float,
    scalar: float = 1.0,
) -> Cost:
    """Compute the cost of a layout.

    Args:
        seconds: predicted step time.
        cluster: devices, with watts, dollars per hour and emission if known.
        failure_hours: mean time between failures of one device including its share of the host; 0: no failures.
        scalar: measured / predicted step time.
    """
    device, devices = cluster.device, layout.num_devices
    tokens = layout.global_batch * layout.seq / (seconds * scalar)
    peak = device.peak[device.peak_dtype(layout.dtype)] * devices
    good, between = goodput(failure_hours * 3600 / devices if failure_hours else math.inf)
    dollars = device.dollars_per_hour * devices
    joules = device.watts * devices / (tokens * good)
    return Cost(
        tokens_per_second=tokens,
        mfu=tokens * shape.flops(layout.seq) / peak,
        joules_per_token=joules or None,
        grams_co2_per_million_tokens=joules * 1e6 / 3.6e6 * device.grams_co2_per_kwh or None,
        dollars_per_trillion_tokens=dollars / 3600 / (tokens * good) * 1e12 if dollars else None,
        dollars_per_month=dollars * 730 if dollars else None,
        goodput=good,
        checkpoint_seconds=between,
    )


def goodput(mean_seconds: float, blocked: float = 0.1) -> tuple[float, float]:
    """Goodput and optimal checkpoint interval in seconds (Young, 1974; Daly, 2006).

    A failure costs half a checkpoint interval, the write in progress and a restart. A checkpoint costs the time that training
    is blocked.

    Args:
        mean_seconds: mean time between failures of the full job.
        blocked: seconds that training is blocked per checkpoint.

    Returns:
        The share of time that makes progress, and the checkpoint interval.
    """
    if math.isinf(mean_seconds):
        return 1.0, math.inf
    between = max(WRITE_SECONDS, math.sqrt(2 * blocked * mean_seconds))
    lost = blocked / between + (between / 2 + WRITE_SECONDS + RESTART_SECONDS) / mean_seconds
    return 1 / (1 + lost), between


def cluster_text(cluster: ClusterSpec) -> str:
    """Cluster as text, such as "2 hosts of 8 H100"."""
    hosts = f"{cluster.hosts} hosts of " if cluster.hosts > 1 else ""
    return f"{hosts}{cluster.per_host} {cluster.device.name}"


def predict(space: Space, choice: Choice, found: list[Trace], scalar: float = 1.0) -> Prediction:
    """Prediction that is stored in a plan: step time by formula, memory from dry runs if there are any, otherwise by formula.

    Args:
        choice: a layout of the space.
        found: dry runs of the layout's ranks.
        scalar: measured / predicted step time of this machine.
    """
    seconds = choice.time.seconds * scalar
    if found:
        memory: dict[str, int] = dict(found[0].count.peak_bytes)
        fullest = max(trace.count.peak for trace in found)
    else:
        parts = ("states", "activations", "transient", "reserve", "framework")
        memory = {name: int(getattr(choice.memory, name)) for name in parts}
        fullest = int(choice.memory.total)
    return Prediction(
        cluster=cluster_text(space.cluster),
        micro_batch=choice.layout.micro_batch,
        step_seconds=seconds,
        terms={name: value * scalar for name, value in vars(choice.time).items() if value},
        tokens_per_second=space.global_batch * space.seq / seconds,
        memory_bytes=fullest,
        memory=memory,
        sent_bytes=found[0].count.sent_bytes() if found else {},
    )
