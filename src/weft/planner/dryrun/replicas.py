"""Memory and messages of replicas of hot experts, which a dry run does not count: it routes evenly, and makes no replicas."""

from weft.job import Job
from weft.plan import resolve_plan
from weft.planner.costmodel.experts import held_replicas
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.peak_memory import replica_memory
from weft.planner.search.space_of_job import shape_of


def replica_bounds(job: Job, world_size: int) -> list[str]:
    """Line with the most that replicas add to the counts of a rank; empty without them.

    Args:
        world_size: number of ranks.
    """
    plan = resolve_plan(job.plan, world_size, native_bf16=True)
    if plan.parallel.expert_balance != "replicate":
        return []
    shape, train = shape_of(job), job.train
    layout = layout_of(plan, job.data.seq_len, train.global_batch_size, train.micro_batch_size)
    held = max(replica_memory(shape, layout, rank) for rank in range(layout.pp))
    of_slots = held_replicas(shape, layout)
    size = of_slots / layout.expert_slots
    return [
        f"Replicas of hot experts, not counted above: at most {(held + 2 * of_slots) / 2**30:,.3f} GiB more at the peak, and "
        f"for each of at most {layout.expert_slots} replicas of a rank {size / 1e6:,.3f} MB of weights received and as many of "
        "gradients sent, in a layer and micro-batch"
    ]
