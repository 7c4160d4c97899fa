"""Activation bytes of a layer, counted by dry runs of a few layers instead of estimated by formulas.

A forward of a few layers for each recompute mode gives the bytes of a layer, and a step of fewer layers those of the ends
(logits and loss). Layers of one type save the same bytes per token, so the full model and any parallel layout of it follow.
Dry runs with tp = 2 give the tensors that are not sharded over tp: they are the excess over one half.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from weft.checkpoint.model_config import read_config
from weft.job import Job, packs_base
from weft.plan import Parallel, Plan
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.costmodel.shape import Recompute
from weft.planner.dryrun.extrapolate import cut_layers, first_layers
from weft.planner.dryrun.trace import run_dry, trace_blocks, trace_rank
from weft.planner.search.strategy import RECOMPUTE

KINDS: tuple[Recompute, ...] = ("none", "light", "attention", "mlp", "full")
LAYERS = 2  # layers that are counted: their types may alternate
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
    config = read_config(job.model, in_4_bits=packs_base(job)).to_dict()
    shallow = first_layers(config) + 1
    degrees = (1, 2) if with_tp else (1,)

    def run(tp: int, depth: int, kind: Recompute) -> tuple[Job, int, int, str]:
        return _shallow_job(job, config, depth, kind, tp), 2 * tp, 0, device_type

    forwards = [partial(trace_blocks, *run(tp, shallow + LAYERS + 1, kind)) for tp in degrees for kind in kinds]
    found: list[Any] = run_dry([*(partial(trace_rank, *run(tp, shallow, kinds[0])) for tp in degrees), *forwards])
    steps, blocks = found[: len(degrees)], iter(found[len(degrees) :])
    tokens = ROWS * job.data.seq_len
    layers, ends = [], []
    for step in steps:
        # What is alive when a block begins was saved by the blocks before it.
        alive = {kind: next(blocks) for kind in kinds}
        layers.append({kind: (of[shallow + LAYERS] - of[shallow]) / LAYERS / tokens for kind, of in alive.items()})
        # Without recomputation, the peak of the step is at the loss.
        ends.append(step.count.peak_bytes["activations"] / tokens - shallow * layers[-1][kinds[0]])
    if not with_tp:
        return LayerActivations(layers[0], ends[0])
    unsharded = {kind: 2 * half - layers[0][kind] for kind, half in layers[1].items()}
    return LayerActivations(layers[0], ends[0], unsharded, 2 * ends[1])


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
