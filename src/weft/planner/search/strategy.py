"""From a layout that was found to a plan that runs, and what it costs: time, memory, energy, money, and what failures take."""

import math
from dataclasses import dataclass, replace
from typing import Any

from weft.plan import BYTES, Plan, Precision, Prediction, state_bytes
from weft.planner.costmodel.frameworks import STACKS, FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape
from weft.planner.dryrun.trace import Trace
from weft.planner.search.search import Choice, Space

RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "light": ("activation", "norm"),
    "attention": ("attention", "activation", "norm"),
    "mlp": ("mlp",),
    "full": ("block",),
}
WRITE_SECONDS = 30.0  # of a checkpoint in the background, at most: nothing newer is safe until then
RESTART_SECONDS = 180.0  # from a failure to the next step: noticed, started again, loaded


def stack_for(precision: Precision) -> FrameworkModel:
    """Weft, with the dtypes of a plan; a forward dtype of "auto" counts as bf16."""
    precision = precision.resolve(native_bf16=True)
    copy = BYTES[precision.param_dtype] if precision.param_dtype != precision.update else 0
    master = BYTES[precision.update] - (copy if precision.weights != "whole" else 0)
    return replace(
        STACKS["weft"],
        weights=float(copy or BYTES[precision.update]),
        optimizer=(master if copy else 0) + 2 * state_bytes(precision),
        stays=float(master if copy else 0),
        gradients=float(BYTES[precision.reduce_dtype]),
        reduce=float(BYTES[precision.reduce_dtype]),
        shards_hold_copy=not copy or precision.weights != "whole",
    )


def plan_of(layout: TrainingLayout, base: Plan, head_cost: float = 0.0) -> Plan:
    """The plan that runs a layout.

    Args:
        layout: as the search found it.
        base: what the layout does not say, formats above all.
        head_cost: of head and loss, in blocks: by it stages are cut.
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
            "pp": layout.pp,
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
    tables: dict[str, Any] = {"parallel": parallel, "pipeline": pipeline, "memory": memory, "prediction": None}
    return base.model_copy(update=tables)


@dataclass(frozen=True)
class Cost:
    """What a step of so many seconds comes to."""

    tokens_per_second: float
    mfu: float
    """Model operations, causal attention, nothing recomputed, over the peak in the format of the products."""
    joules_per_token: float | None
    dollars_per_trillion_tokens: float | None
    dollars_per_month: float | None
    goodput: float
    """Share of the time that makes progress, failures and checkpoints apart."""
    checkpoint_seconds: float
    """Best time between checkpoints; infinite where nothing fails."""


def cost_of(
    shape: Shape,
    layout: TrainingLayout,
    seconds: float,
    cluster: ClusterSpec,
    failure_hours: float,
    scalar: float = 1.0,
) -> Cost:
    """What a layout comes to.

    Args:
        shape: of the model.
        layout: of the run.
        seconds: of a step.
        cluster: its devices, with watts and dollars where they are known.
        failure_hours: mean time between failures of one device with its share of the host; 0: nothing fails.
        scalar: measured over predicted step time.
    """
    device, devices = cluster.device, layout.num_devices
    tokens = layout.global_batch * layout.seq / (seconds * scalar)
    peak = device.peak.get(layout.number, device.peak["bf16"]) * devices
    good, between = goodput(failure_hours * 3600 / devices if failure_hours else math.inf)
    dollars = device.dollars_per_hour * devices
    return Cost(
        tokens_per_second=tokens,
        mfu=tokens * shape.flops(layout.seq) / peak,
        joules_per_token=device.watts * devices / (tokens * good) if device.watts else None,
        dollars_per_trillion_tokens=dollars / 3600 / (tokens * good) * 1e12 if dollars else None,
        dollars_per_month=dollars * 730 if dollars else None,
        goodput=good,
        checkpoint_seconds=between,
    )


def goodput(mean_seconds: float, blocked: float = 0.1) -> tuple[float, float]:
    """Share of time that makes progress, and the best time between checkpoints (Young, 1974; Daly, 2006).

    A failure costs half an interval and what is being written, and a restart; a checkpoint what training waits for its copy.

    Args:
        mean_seconds: between failures of the whole job.
        blocked: seconds that training waits for each checkpoint.
    """
    if math.isinf(mean_seconds):
        return 1.0, math.inf
    between = max(WRITE_SECONDS, math.sqrt(2 * blocked * mean_seconds))
    lost = blocked / between + (between / 2 + WRITE_SECONDS + RESTART_SECONDS) / mean_seconds
    return 1 / (1 + lost), between


def in_words(cluster: ClusterSpec) -> str:
    """Hosts and devices."""
    hosts = f"{cluster.hosts} hosts of " if cluster.hosts > 1 else ""
    return f"{hosts}{cluster.per_host} {cluster.device.name}"


def predict(space: Space, choice: Choice, found: list[Trace], scalar: float = 1.0) -> Prediction:
    """What is written into a plan: seconds by formula; bytes as dry runs have counted them, without any by formula.

    Args:
        space: of the search.
        choice: one layout of it.
        found: dry runs of its ranks.
        scalar: measured over predicted step time of this machine.
    """
    seconds = choice.time.seconds * scalar
    if found:
        memory: dict[str, int] = dict(found[0].count.peak_bytes)
        fullest = max(trace.count.peak for trace in found)
    else:
        parts = ("states", "activations", "transient", "reserve", "framework")
        memory = {name: int(getattr(choice.memory, name)) for name in parts}
        fullest = int(choice.memory.total)
    sent: dict[str, int] = {}
    for message in found[0].count.messages if found else ():
        sent[message.axis] = sent.get(message.axis, 0) + message.bytes
    return Prediction(
        cluster=in_words(space.cluster),
        micro_batch=choice.layout.micro_batch,
        step_seconds=seconds,
        terms={name: value * scalar for name, value in vars(choice.time).items() if value},
        tokens_per_second=space.global_batch * space.seq / seconds,
        memory_bytes=fullest,
        memory=memory,
        sent_bytes=sent,
    )
