"""What `weft advise` says, on the terminal."""

from rich.console import Console
from rich.table import Column, Table

from weft.planner.costmodel.hardware import GIB, ClusterSpec
from weft.planner.search.propose import describe
from weft.planner.search.scenarios import Option, Scenario, recommended
from weft.planner.search.strategy import in_words

WIDTH = 150  # letters of a line, at least: rather wrapped than cut


def print_options(scenario: Scenario, cluster: ClusterSpec, found: list[Option], days: float) -> None:
    """Print a line a model, and which of them to take."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    console.print(f"{scenario.name} on {in_words(cluster)}: {scenario.note}")
    numbers = ("rows a step", "step", "tokens/s", "MFU", "GiB", "tokens, billions", "days", "dollars")
    table = Table("model", "best plan", *(Column(name, justify="right") for name in numbers))
    for option in found:
        if option.choice is None or option.cost is None:
            table.add_row(option.model, "nothing fits")
            continue
        table.add_row(
            option.model,
            describe(option.choice),
            f"{option.global_batch:,}",
            f"{option.choice.time.seconds:.3g} s",
            f"{option.cost.tokens_per_second:,.0f}",
            "" if option.cost.mfu is None else f"{option.cost.mfu:.0%}",
            f"{option.choice.memory.total / GIB:.0f}",
            f"{option.tokens / 1e9:,.1f}",
            f"{option.days:,.3g}",
            f"{option.dollars:,.0f}" if option.dollars else "",
        )
    console.print(table)
    best = recommended(found, days)
    if best and best.choice:
        console.print(
            f"Take {best.model}: the largest that is trained in {days:g} days, in {best.days:.3g}. {describe(best.choice)}"
        )
    else:
        console.print(f"None is trained in {days:g} days: take more devices, fewer tokens or more time.")
