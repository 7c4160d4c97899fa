"""Resolve a plan for a number of ranks: check every rule, and replace what it leaves open by numbers and dtypes."""

import math
from typing import Literal

from weft.errors import PlanError
from weft.plan.rules import broken_rules, describe, fix_of
from weft.plan.tables import Degree, DType, Parallel, Pipeline, Plan, Precision

Stage = Literal[0, 1, 2, 3]
"""Stage of ZeRO."""
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


class ResolvedParallel(Parallel):
    """Degrees of a plan for a known number of ranks."""

    dp_shard: Degree
    zero: Stage

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different rows of a batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks with different tokens, over which gradients are averaged; ranks of a tp group share tokens."""
        return self.data_ranks * self.cp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.gradient_ranks * self.tp * self.pp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which experts may be split."""
        return self.cp * self.tp * (self.data_ranks if self.zero == 0 else self.dp_shard)


class ResolvedPipeline(Pipeline):
    """Schedule with a number of stages for each rank."""

    virtual_stages: Degree


class ResolvedPrecision(Precision):
    """Dtypes, none of which is left to the device."""

    param_dtype: DType


class ResolvedPlan(Plan):
    """Plan for a known number of ranks on known devices; made by `resolve_plan` alone."""

    parallel: ResolvedParallel
    pipeline: ResolvedPipeline
    precision: ResolvedPrecision


def resolve_plan(plan: Plan, ranks: int, *, native_bf16: bool) -> ResolvedPlan:
    """Check every rule, and replace dp_shard = -1 and the values "auto" of zero, virtual_stages and param_dtype.

    Args:
        plan: plan; one that is resolved for these ranks is checked, since it may be a changed copy, and returned as it is.
        ranks: number of ranks; the product of the degrees must equal it.
        native_bf16: True if the devices of all ranks compute bf16 natively, see `weft.device.device.Device.supports`.

    Raises:
        PlanError: a rule is broken, or the product of the degrees is not `ranks`.
    """
    for rule in broken_rules(plan):
        raise PlanError(describe(rule, plan), where="plan", rule=rule.reason, fix=fix_of(rule, plan))
    if isinstance(plan, ResolvedPlan) and plan.parallel.world_size == ranks:
        return plan
    p = plan.parallel
    others = p.dp_replicate * p.tp * p.cp * p.pp
    degrees = " x ".join(f"{name} {getattr(p, name)}" for name in ("dp_replicate", "tp", "cp", "pp"))
    if p.dp_shard == -1 and ranks % others:
        raise PlanError(
            f"{ranks} ranks cannot be divided by {degrees} = {others}",
            where="plan.parallel",
            rule="the product of the degrees must divide the number of ranks; dp_shard = -1 takes the quotient",
            fix=f"start a multiple of {others} ranks, or choose degrees whose product divides {ranks}",
        )
    dp_shard = ranks // others if p.dp_shard == -1 else p.dp_shard
    if (total := others * dp_shard) != ranks:
        quotient = "choose degrees whose product divides {ranks}, and dp_shard = -1 for the quotient"
        raise PlanError(
            f"{degrees} x dp_shard {dp_shard} = {total}, but there are {ranks} ranks",
            where="plan.parallel",
            rule="the product of the degrees must equal the number of ranks",
            fix=f"start {total} ranks, or "
            + (quotient.format(ranks=ranks) if ranks % others else "set plan.parallel.dp_shard to -1 for the quotient"),
        )
    zero = p.zero
    if zero == "auto":  # no memory is known here, see `weft.planner.zero_stage`
        is_replica = p.dp_replicate * dp_shard * p.cp == 1 and not any(broken_rules(with_zero(plan, 0)))
        zero = 0 if is_replica else 3
    parallel = ResolvedParallel.model_construct(**dict(p) | {"dp_shard": dp_shard, "zero": zero})
    _check_split(parallel)
    stages = plan.pipeline.stages_per_rank if p.pp > 1 or plan.pipeline.virtual_stages != "auto" else 1
    changed = {
        "parallel": parallel,
        "pipeline": ResolvedPipeline.model_construct(**dict(plan.pipeline) | {"virtual_stages": stages}),
        "precision": ResolvedPrecision.model_construct(**dict(plan.precision.resolve(native_bf16))),
    }
    return ResolvedPlan.model_construct(**dict(plan) | changed)


def with_zero(plan: Plan, zero: Stage) -> Plan:
    """Copy of a plan with another ZeRO stage."""
    return plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"zero": zero})})


def check_plan(plan: Plan, ranks: int) -> None:
    """Check every rule of a plan for a number of ranks, whatever their devices.

    Raises:
        PlanError: as for `resolve_plan`.
    """
    resolve_plan(plan, ranks, native_bf16=False)


def _check_split(parallel: ResolvedParallel) -> None:
    """Check what is divided among data ranks and among the ranks of experts."""
    if parallel.rows_per_rank and len(parallel.rows_per_rank) != parallel.data_ranks:
        raise PlanError(
            f"rows_per_rank has {len(parallel.rows_per_rank)} values, and there are {parallel.data_ranks} data ranks",
            where="plan.parallel.rows_per_rank",
            rule="it has one number of rows for each data rank: dp_replicate x dp_shard values",
            fix=f"set {parallel.data_ranks} values, or remove the key for equal numbers of rows",
        )
    inside = parallel.expert_ranks
    if inside % (parallel.ep * parallel.etp) == 0:
        return
    degrees = f"dp_shard {parallel.dp_shard} x cp {parallel.cp} x tp {parallel.tp}"
    rule = "experts are split over ranks of dp_shard x cp x tp; with zero = 0, over ranks of dp_replicate too"
    if parallel.etp > 1:
        raise PlanError(
            f"ep {parallel.ep} x etp {parallel.etp} does not divide {degrees}",
            where="plan.parallel.etp",
            rule=rule,
            fix=f"set plan.parallel.ep and etp to numbers whose product divides {inside}",
        )
    divisors = [divisor for divisor in range(1, inside + 1) if inside % divisor == 0]
    raise PlanError(
        f"ep {parallel.ep} does not divide {degrees}",
        where="plan.parallel.ep",
        rule=rule,
        fix=f"set plan.parallel.ep to one of {', '.join(map(str, divisors))} that divides the number of experts",
    )


def refuse_run_keys(plan: Plan, where: str) -> None:
    """Refuse keys that only `weft train` can follow, for a training loop that hands each data rank its rows.

    Args:
        plan: plan.
        where: the entry point, for the message.

    Raises:
        PlanError: the plan has `rows_per_rank` or `rebalance`, or names an attention kernel.
    """
    if plan.compute.kernels.attention not in ("auto", "reference"):
        raise PlanError(
            f'attention = "{plan.compute.kernels.attention}"',
            where=f"plan.compute.kernels.attention, {where}",
            rule="torch keeps the kernel for the whole process; weft train sets it from the start of a run to its end",
            fix="remove plan.compute.kernels.attention, and run the loop inside of torch.nn.attention.sdpa_kernel",
        )
    if plan.parallel.rows_per_rank or plan.parallel.rebalance != "off":
        raise PlanError(
            f'rows_per_rank = {list(plan.parallel.rows_per_rank)} and rebalance = "{plan.parallel.rebalance}"',
            where=f"plan.parallel, {where}",
            rule="they divide the global batches of weft train; this loop hands the same number of rows to each data rank",
            fix="remove plan.parallel.rows_per_rank and rebalance, or train with weft train",
        )


def min_ranks(plan: Plan) -> int:
    """Minimum number of ranks of a plan; dp_shard = -1 counts as the smallest degree that ep allows."""
    p = plan.parallel
    inside = p.cp * p.tp * (p.dp_replicate if p.zero == 0 else 1)
    experts = p.ep * p.etp
    shards = p.dp_shard if p.dp_shard > 0 else experts // math.gcd(experts, inside)
    return p.dp_replicate * shards * p.cp * p.tp * p.pp
