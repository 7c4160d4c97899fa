"""Activations of a model's layers, counted by dry runs of a few of them: what formulas would have to guess.

A model of few layers is run dry at two depths, once for each way to recompute; the difference is that of a layer, the rest
that of the ends. Layers of the same kind keep as much for every token, so that a whole model and any split of it follow. What
each rank of tp keeps whole two of them tell, as they hold more than half.
"""

from typing import Any

from weft.checkpoint.model_config import read_config
from weft.job import Job
from weft.plan import Parallel, Plan
from weft.planner.costmodel.peak_memory import Traced
from weft.planner.costmodel.shape import Recompute
from weft.planner.dryrun.extrapolate import cut_layers, first_layers
from weft.planner.dryrun.trace import trace_all
from weft.planner.search.strategy import RECOMPUTE

MORE = 2  # layers of the deeper model
ROWS = 8  # of a micro-batch: so many that its logits make the fullest moment, when all layers are kept and no gradient is there
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def trace_layers(job: Job, device_type: str, with_tp: bool = False) -> Traced:
    """Bytes for a token, of rows as long as the job's.

    Args:
        job: model, length of rows and formats.
        device_type: what the ranks run on.
        with_tp: whether to look at two ranks of tp, too.

    Raises:
        ModelError, PlanError: the model cannot be built, or not be run dry.
    """
    layers, ends = _kept(job, device_type, 1)
    if not with_tp:
        return Traced(layers, ends)
    halves, split_ends = _kept(job, device_type, 2)
    return Traced(layers, ends, {kind: 2 * half - layers[kind] for kind, half in halves.items()}, 2 * split_ends)


def _kept(job: Job, device_type: str, tp: int) -> tuple[dict[Recompute, float], float]:
    """Bytes for a token on a rank of tp: of a layer, by what it computes again, and of the ends."""
    config = read_config(job.model).to_dict()
    shallow = first_layers(config) + 1
    kinds: list[Recompute] = ["none", "light", "attention", "mlp", "full"]
    jobs = [_cut(job, config, depth, kind, tp) for kind in kinds for depth in (shallow, shallow + MORE)]
    traces = trace_all([(cut, 2 * tp, 0, device_type) for cut in jobs])
    tokens = ROWS * job.data.seq_len
    # In the head's forward all layers have kept what they keep, and nothing else is there.
    kept = [trace.count.moments["head", False]["activations"] / tokens for trace in traces]
    layers = {kind: (kept[2 * place + 1] - kept[2 * place]) / MORE for place, kind in enumerate(kinds)}
    # Where nothing is computed again, the loss makes the fullest moment.
    return layers, traces[0].count.peak_bytes["activations"] / tokens - shallow * layers["none"]


def _cut(job: Job, config: dict[str, Any], depth: int, recompute: Recompute, tp: int) -> Job:
    """The job with a model of few layers, rows of its length and ZeRO 1, which gathers weights apart from activations."""
    groups = int(config.get("n_group") or 1)
    few = groups * -(-4 * int(config.get("num_experts_per_tok") or 1) // groups)
    cut = cut_layers(config, depth)
    # A token keeps as much of few experts, and their gradients do not hide it.
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
