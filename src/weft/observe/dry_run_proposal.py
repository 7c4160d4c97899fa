"""Output of `weft plan` for models without formulas: the fastest plans, why others do not fit, and the plan file."""

from pathlib import Path

import tomli_w
from rich.table import Column, Table

from weft.observe.figures import format_bytes
from weft.observe.proposal import parameters_in_words, wide_console
from weft.planner.search.by_dry_run import DryRunProposal, describe, plan_with_prediction
from weft.planner.search.strategy import cluster_text
from weft.training.metrics import format_dollars


def print_dry_run_proposal(found: DryRunProposal) -> None:
    """Print the fastest plans, the terms of the first one, its traffic by axis, and the reasons against others."""
    console = wide_console()
    console.print(f"{cluster_text(found.cluster)}, {parameters_in_words(found.parameters)}", markup=False)
    table = Table("plan", *(Column(name, justify="right") for name in ("step", "rows/s", "memory", "slower")))
    first, rows = found.best[0], found.job.train.global_batch_size
    for one in found.best:
        table.add_row(
            describe(one.plan),
            f"{one.time.seconds:.3g} s",
            f"{rows / one.time.seconds:,.1f}",
            format_bytes(one.memory),
            "chosen" if one is first else f"{one.time.seconds / first.time.seconds - 1:+.1%}",
        )
    console.print(table)
    console.print("; ".join(f"{name} {seconds:.3g} s" for name, seconds in vars(first.time).items() if seconds))
    if len(first.traces) > 1:
        peaks = ", ".join(f"stage {stage} {format_bytes(trace.count.peak)}" for stage, trace in enumerate(first.traces))
        console.print(f"memory: {peaks}")
    reasons = {why: name for name, why in reversed(found.refused.items())}  # the first plan with each reason
    for why, name in reversed(reasons.items()):
        console.print(f"  {name}: {why}", markup=False)
    if price := found.cluster.device.dollars_per_hour * found.cluster.num_devices:
        console.print(f"{format_dollars(price / 3600 * first.time.seconds / rows * 1e6)} per million rows")


def write_dry_run_plan(found: DryRunProposal, path: Path) -> None:
    """Write the plan of the fastest candidate, and print the command that trains with it."""
    plan = plan_with_prediction(found, found.best[0])
    path.write_text(tomli_w.dumps(plan.model_dump(exclude_none=True)), encoding="utf-8")
    print(f"{path}: weft train JOB --set plan={path}")
