"""Terminal output of `weft advise`."""

from rich.table import Column, Table

from weft.observe.proposal import wide_console
from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.search.propose import describe
from weft.planner.search.scenarios import Scenario, ScenarioPlan, recommended
from weft.planner.search.strategy import cluster_text
from weft.training.metrics import format_energy


def print_plans(scenario: Scenario, cluster: ClusterSpec, found: list[ScenarioPlan], days: float) -> None:
    """Print one table row per model, and the recommended model."""
    console = wide_console()
    console.print(f"{scenario.name} on {cluster_text(cluster)}: {scenario.note}")
    columns = ["rows per step", "step", "tokens/s", "MFU", "GiB", "tokens, billions", "days", "dollars", "energy"]
    emission = any(plan.tonnes_co2 for plan in found)
    columns += ["t CO2"] * emission
    table = Table("model", "best plan", *(Column(name, justify="right") for name in columns))
    for plan in found:
        if plan.choice is None or plan.cost is None:
            table.add_row(plan.model, "no plan fits")
            continue
        table.add_row(
            plan.model,
            describe(plan.choice),
            f"{plan.global_batch:,}",
            f"{plan.choice.time.seconds:.3g} s",
            f"{plan.cost.tokens_per_second:,.0f}",
            "" if plan.cost.mfu is None else f"{plan.cost.mfu:.0%}",
            f"{plan.choice.memory.total / GIB:.0f}",
            f"{plan.tokens / 1e9:,.1f}",
            f"{plan.days:,.3g}",
            f"{plan.dollars:,.0f}" if plan.dollars else "",
            format_energy(plan.joules) if plan.joules else "",
            *([f"{plan.tonnes_co2:,.3g}"] if emission else []),
        )
    console.print(table)
    best = recommended(found, days)
    if best and best.choice:
        console.print(
            f"Recommended: {best.model}, the largest model that can be trained within {days:g} days "
            f"({best.days:.3g} days). Plan: {describe(best.choice)}"
        )
    else:
        console.print(
            f"No model can be trained within {days:g} days: use more devices or fewer tokens, or allow more time."
        )
