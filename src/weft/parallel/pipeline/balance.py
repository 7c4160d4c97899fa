"""Division of the blocks into pipeline stages of equal cost."""

from collections.abc import Callable
from itertools import pairwise

from weft.errors import PlanError, Refusal, raise_if_refused
from weft.parallel.pipeline.schedules import SCHEDULES
from weft.plan import Pipeline, ResolvedPlan


def split_blocks(num_blocks: int, num_stages: int, settings: Pipeline) -> list[range]:
    """Assign blocks to stages: by `stage_blocks` if given, else such that the largest cost of a stage is minimal.

    Among the assignments with this largest cost, choose the smallest sum of squared costs. O(num_blocks^2 num_stages).

    Raises:
        PlanError: a stage would be empty, or `stage_blocks` or `block_costs` do not fit the model.
    """
    if num_stages > num_blocks:
        raise_if_refused(_too_many_stages(num_blocks, num_stages, settings.stages_per_rank))
    counts, costs = settings.stage_blocks, settings.block_costs or (1.0,) * num_blocks
    if counts and (len(counts) != num_stages or sum(counts) != num_blocks):
        raise PlanError(
            f"stage_blocks assigns {sum(counts)} blocks to {len(counts)} stages",
            where="plan.pipeline.stage_blocks",
            rule=f"the model has {num_blocks} blocks, and pp x virtual_stages = {num_stages} stages",
            fix=f"set {num_stages} values with the sum {num_blocks}, or remove the key",
        )
    if len(costs) != num_blocks:
        raise PlanError(
            f"block_costs has {len(costs)} values",
            where="plan.pipeline.block_costs",
            rule=f"the model has {num_blocks} blocks",
            fix=f"set {num_blocks} values, or remove the key",
        )
    if not counts:
        counts = _cheapest_partition(costs, num_stages, settings.embedding_cost, settings.head_cost)
    borders = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(low, high) for low, high in pairwise(borders)]


def reason_against_pp(num_blocks: int, plan: ResolvedPlan) -> Refusal | None:
    """Reason against a pp degree that leaves a rank without blocks, whatever the number of stages per rank.

    Returns:
        The fix is a pp degree that is small enough, or another schedule.
    """
    settings = plan.pipeline
    kind = SCHEDULES.get(settings.schedule)
    fewest, most = kind.virtual_stages if kind else (1, None)
    if plan.parallel.pp * fewest <= num_blocks:
        return None
    each = max(fewest, settings.stages_per_rank) if most is None else fewest
    return _too_many_stages(num_blocks, plan.parallel.pp * fewest, each)


def _too_many_stages(num_blocks: int, num_stages: int, stages_per_rank: int) -> Refusal:
    most, ranks = num_blocks // stages_per_rank, num_stages // stages_per_rank
    fewer = "set plan.parallel.pp = 1"
    if 1 < ranks <= num_blocks:
        fewer = 'set plan.pipeline.schedule to "1f1b", which has one stage for each rank, and remove virtual_stages'
    return Refusal(
        f"{num_blocks} blocks cannot fill {num_stages} stages",
        where="plan.parallel.pp, plan.pipeline.virtual_stages",
        rule="every stage has at least one block",
        fix=f"set plan.parallel.pp to {most} or less" if most > 1 else fewer,
    )


def _cheapest_partition(costs: tuple[float, ...], num_stages: int, embedding: float, head: float) -> tuple[int, ...]:
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, low: int, high: int) -> float:
        return sums[high] - sums[low] + embedding * (stage == 0) + head * (stage == num_stages - 1)

    def best(combine: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """Partition of all blocks with the smallest combined cost, built stage by stage."""
        cuts: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(num_stages):
            left = num_stages - 1 - stage
            cuts = {
                high: min(
                    (combine(total, cost_of(stage, low, high)), (*counts, high - low))
                    for low, (total, counts) in cuts.items()
                    if low < high
                )
                for high in range(stage + 1, len(costs) - left + 1)
            }
        return cuts[len(costs)]

    largest, _ = best(max)
    limit = largest * (1 + 1e-9)
    return best(lambda total, cost: total + (cost**2 if cost <= limit else float("inf")))[1]
