"""Activation bytes of a layer, counted by dry runs of a few layers instead of estimated by formulas.

A model of few layers is dry-run at two depths for each recompute mode. The difference gives the bytes of a layer, the rest the
bytes of the ends (logits and loss). Layers of one type save the same bytes per token, so the full model and any parallel
layout of it follow. Dry runs with tp = 2 give the tensors that are not sharded over tp: they are the excess over one half.
"""

from collections.abc import Sequence
from typing import Any

from weft.checkpoint.model_config import read_config
from weft.job import Job
from weft.plan import Parallel, Plan
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.costmodel.shape import Recompute
from weft.planner.dryrun.extrapolate import cut_layers, first_layers
from weft.planner.dryrun.trace import trace_all
from weft.planner.search.strategy import RECOMPUTE

KINDS: tuple[Recompute, ...] = ("none", "light", "attention", "mlp", "full")
EXTRA_LAYERS = 2  # additional layers of the deeper model
# Rows per micro-batch: enough for the peak to be at the logits, when all activations are alive and no gradients exist.
ROWS = 8
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def trace_layers(
    job: Job, device_type: str, with_tp: bool = False, kinds: Sequence[Recompute] = KINDS
) -> LayerActivations:
    """Count activation bytes per token, for rows of the job's length.

    Args:
        job: provides model, sequence length and dtypes.
        device_type: device type of the ranks.
        with_tp: True to count with tp = 2 too.
        kinds: recompute modes to count; the first is "none".

    Raises:
        ModelError, PlanError: the model cannot be built or dry-run.
    """
    layers, ends = _saved_bytes(job, device_type, 1, kinds)
    if not with_tp:
        return LayerActivations(layers, ends)
    halves, split_ends = _saved_bytes(job, device_type, 2, kinds)
    return LayerActivations(
        layers, ends, {kind: 2 * half - layers[kind] for kind, half in halves.items()}, 2 * split_ends
    )


def _saved_bytes(
    job: Job, device_type: str, tp: int, kinds: Sequence[Recompute]
) -> tuple[dict[Recompute, float], float]:
    """Activation bytes per token on one tp rank: of a layer by recompute mode, and of the ends."""
    config = read_config(job.model).to_dict()
    shallow = first_layers(config) + 1
    jobs = [_shallow_job(job, config, depth, kind, tp) for kind in kinds for depth in (shallow, shallow + EXTRA_LAYERS)]
    traces = trace_all([(cut, 2 * tp, 0, device_type) for cut in jobs])
    tokens = ROWS * job.data.seq_len
    # During the forward of the head, exactly the saved activations of all layers are alive.
    kept = [trace.count.moments["head", False]["activations"] / tokens for trace in traces]
    layers = {kind: (kept[2 * index + 1] - kept[2 * index]) / EXTRA_LAYERS for index, kind in enumerate(kinds)}
    # Without recomputation, the peak of the step is at the loss.
    return layers, traces[0].count.peak_bytes["activations"] / tokens - shallow * layers["none"]


def _shallow_job(job: Job, config: dict[str, Any], depth: int, recompute: Recompute, tp: int) -> Job:
    """Job with few layers, the same sequence length, and ZeRO 1, which gathers no weights while activations are alive."""
    groups = int(config.get("n_group") or 1)
    few = groups * -(-4 * int(config.get("num_experts_per_tok") or 1) // groups)
    cut = cut_layers(config, depth)
    # With few experts, activations per token are the same, and the experts' gradients do not determine the peak.
    cut |= {name: min(few, int(value)) for name, value in config.items() if name in EXPERTS and value}
    memory = job.plan.memory.model_copy(
        update={"recompute": RECOMPUTE[recompute], "recompute_interval": 1, "offload": ()}
    )
    plan = Plan(parallel=Parallel(zero=1, tp=tp), precision=job.plan.precision, memory=memory)
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"path": None, "config": cut}),
            "train": job.train.model_copy(update={"global_batch_size": 2 * ROWS, "micro_batch_size": ROWS}),
            "plan": plan,
        }
    )
