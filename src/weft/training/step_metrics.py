"""Metrics of a step from its result, its messages and its clocks."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from weft.anatomy.flops import training_flops_per_token
from weft.comm.recorder import Message
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES
from weft.training.metrics import StepMetrics, utilization
from weft.training.optimizer import learning_rate
from weft.training.session import Session, row_split
from weft.training.step_report import StepReport


def communication_metrics(
    messages: Sequence[Message], exposed: Mapping[str, float], hidden: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Bytes, number of messages, and exposed and hidden seconds of a step, by mesh axis and link."""
    metrics: dict[str, dict[str, float]] = {}
    for message in messages:
        sent = metrics.setdefault(f"{message.axis} {message.link}".strip(), {"bytes": 0, "messages": 0})
        sent["bytes"] += message.bytes
        sent["messages"] += 1
        sent[f"{message.operation}_bytes"] = sent.get(f"{message.operation}_bytes", 0) + message.bytes
    for where, sent in metrics.items():
        if where in exposed:
            sent |= {"exposed_seconds": exposed[where], "hidden_seconds": hidden.get(where, 0.0)}
    return metrics


def step_metrics_builder(session: Session) -> Callable[[StepReport], StepMetrics]:
    """Function that builds the `StepMetrics` of a step."""
    job, config, relocation = session.job, session.model.config, runtime(session.model).relocation
    causal = job.task.kind == "causal"
    flops_per_token = training_flops_per_token(session.anatomy, config, job.data.seq_len) if causal else 0.0
    device_peak = session.device.peak_flops(DTYPES[job.plan.precision.param_dtype])
    peak_flops = device_peak * dist.get_world_size() if device_peak and causal else None

    def to_metrics(report: StepReport) -> StepMetrics:
        step, result, seconds, measured = report.step, report.result, report.seconds, report.measured
        comm, imbalances = report.comm, report.agreed.imbalances
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate(step, job.train.steps, job.optimizer),
            tokens=result.tokens,
            step_seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            mfu=utilization(flops_per_token * result.tokens / seconds, peak_flops),
            peak_memory_bytes=report.agreed.peak_memory,
            comm_bytes=sum(int(sent["bytes"]) for sent in comm.values()),
            comm=comm or None,
            loss_scale=report.scale.value,
            skipped=result.problem is not None,
            overflowed=result.overflowed,
            expert_imbalance=None if imbalances is None else max(imbalances, default=0.0),
            expert_imbalances=tuple(imbalances or ()),
            router_z_loss=result.router_z_loss,
            rows_per_rank=row_split(session, report.before).rows_per_rank,
            moved_experts=relocation.moved if relocation else None,
            checkpoint_seconds=report.blocked,
            compiled_regions=measured.regions,
            peak=measured.peak.bytes_by_kind if measured.peak else None,
            peak_operation=measured.peak.operation if measured.peak else None,
            pools={name: pool.counters() for name, pool in session.optimizer.pools().items()} or None,
            time=time.time(),
            **report.spent._asdict(),
        )

    return to_metrics
