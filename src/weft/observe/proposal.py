"""Output of `weft plan`: tables for the terminal, and the plan file."""

import math
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from weft.observe.expert_reasons import expert_reasons
from weft.observe.figures import format_bytes
from weft.planner.costmodel.step_time import CALIBRATED, UNCALIBRATED
from weft.planner.search.alternatives import EQUAL, TERMS, reason
from weft.planner.search.propose import Proposal, describe, planned
from weft.planner.search.strategy import Cost, cluster_text, predict
from weft.training.metrics import format_dollars

MIN_GAIN = 0.005  # minimum relative gain of compressed gradients that is printed
MEMORY = ("states", "activations", "transient", "reserve", "framework")  # terms of a memory estimate
WIDTH = 150  # minimum line width in characters, so that table cells are not truncated


def wide_console() -> Console:
    """Console that is wide enough for the tables of plans."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    return console


def print_proposal(found: Proposal) -> None:
    """Print the best layouts, time and memory of the chosen one by term, the reasons against alternatives, and the cost."""
    console = wide_console()
    first = found.best[0]
    console.print(f"{cluster_text(found.space.cluster)}, {parameters_in_words(found.space.shape.parameters)}")
    console.print(_layouts_table(found))
    if any(abs(slower) < EQUAL for slower in found.slower[1:]):
        console.print(
            f"Step times within {EQUAL:.0%} of each other count as equal; among them the layout with the fewest techniques "
            "is chosen."
        )
    calibrated = found.scalar != 1
    low, high = (first.time.seconds * found.scalar * factor for factor in (CALIBRATED if calibrated else UNCALIBRATED))
    how = "calibrated" if calibrated else "not calibrated on this machine"
    console.print(f"90 % interval of the measured step time ({how}): {low:.3g} to {high:.3g} s.")
    console.print(terms_table(found))
    for choice, why in found.refused:
        console.print(f"refused: {describe(choice)}: {why}", markup=False)
    for line in _alternatives(found):
        console.print(line, markup=False)
    if found.fewest:
        cluster, choice = found.fewest
        console.print(
            f"fewest devices: {cluster.num_devices}, {choice.time.seconds * found.scalar:.3g} s per step: {describe(choice)}"
        )
    if parts := _costs(found.costs[0]):
        console.print("; ".join(parts))


def _layouts_table(found: Proposal) -> Table:
    """Table of the best layouts."""
    timed = ["by operators"] * bool(found.by_operators)
    columns = ("step", "tokens/s", "MFU", "memory", "slower", *timed)
    table = Table("layout", *(Column(name, justify="right") for name in columns))
    for index, (choice, its) in enumerate(zip(found.best, found.costs, strict=True)):
        table.add_row(
            describe(choice),
            f"{choice.time.seconds * found.scalar:.3g} s",
            f"{its.tokens_per_second:,.0f}",
            "" if its.mfu is None else f"{its.mfu:.1%}",
            format_bytes(choice.memory.total),
            compared(found.slower[index]) if index else "chosen",
            *(f"{found.by_operators[index].seconds:.3g} s" for _ in timed),
        )
    return table


def _alternatives(found: Proposal) -> list[str]:
    """Lines about layouts with another value of a setting, compressed gradients or less memory."""
    first = found.best[0]
    lines = ["Best layout with another value of one setting, compared with the chosen one:"]
    lines += [f"  {reason(alternative, first, found.space.cluster)}" for alternative in found.alternatives]
    for axis, why in found.space.unsplit.items():
        if axis != "ep" or found.space.shape.experts:
            lines.append(f"  {axis}: {why}")
    lines += expert_reasons(found.space, first.layout, found.scalar)
    for name, seconds in found.compressed.items():
        if (gained := seconds / first.time.seconds - 1) < -MIN_GAIN:
            lines.append(f"gradients compressed to {name}: {gained:+.1%}")
    lower_memory = [
        f"within {format_bytes(choice.memory.total)}: {describe(choice)}, {choice.time.seconds / first.time.seconds - 1:+.1%}"
        for choice in found.lower_memory
    ]
    return [*lines, *dict.fromkeys(lower_memory)]  # the same line may occur for several shares of the memory


def _costs(cost: Cost) -> list[str]:
    """Costs of a layout that are known, as text."""
    parts = []
    if cost.dollars_per_trillion_tokens:
        parts.append(f"{format_dollars(cost.dollars_per_trillion_tokens / 1e6)} per million tokens")
    if cost.dollars_per_month:
        parts.append(f"{cost.dollars_per_month:,.0f} dollars per month")
    if cost.joules_per_token:
        parts.append(f"{1 / cost.joules_per_token:.3g} tokens/J")
    if cost.grams_co2_per_million_tokens:
        parts.append(f"{cost.grams_co2_per_million_tokens:.3g} g CO2 per million tokens")
    if math.isfinite(cost.checkpoint_seconds):
        parts.append(f"goodput {cost.goodput:.1%}, with a checkpoint every {cost.checkpoint_seconds:,.0f} s")
    return parts


def parameters_in_words(count: float) -> str:
    """Number of parameters as text: "0.14 M parameters", "30.5 B parameters", "1.03 T parameters"."""
    if count >= 1e12:
        return f"{count / 1e12:.3g} T parameters"
    return f"{count / 1e9:.3g} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"


def compared(slower: float) -> str:
    """Relative difference of a predicted step time from the chosen one's as text; "equal" within the planner's uncertainty."""
    return "equal" if abs(slower) < EQUAL else f"{slower:+.1%}"


def terms_table(found: Proposal) -> Table:
    """Table of the step time and the peak memory of the chosen layout by term."""
    first = found.best[0]
    table = Table("chosen layout", Column("s", justify="right"), "", Column("memory", justify="right"))
    times = [(name, value * found.scalar) for term, name in TERMS.items() if (value := getattr(first.time, term))]
    bytes_ = [(name, getattr(first.memory, name)) for name in MEMORY]
    if found.traces:
        fullest = max(found.traces, key=lambda trace: trace.count.peak)
        bytes_ = [(f"{name}, counted on rank {fullest.rank}", size) for name, size in fullest.count.peak_bytes.items()]
    for index in range(max(len(times), len(bytes_))):
        time = (times[index][0], f"{times[index][1]:.3g}") if index < len(times) else ("", "")
        size = (bytes_[index][0], format_bytes(bytes_[index][1])) if index < len(bytes_) else ("", "")
        table.add_row(*time, *size)
    return table


def write_plan(found: Proposal, path: Path) -> None:
    """Write the plan of the chosen layout with its prediction, and print the command that trains with it."""
    first = found.best[0]
    job = planned(found.job, found.space, first.layout)
    scalar = found.scalar
    if found.by_operators:  # more accurate than the formulas
        first, scalar = first._replace(time=found.by_operators[0]), 1.0
    plan = job.plan.model_copy(update={"prediction": predict(found.space, first, found.traces, scalar)})
    path.write_text(tomli_w.dumps(plan.model_dump(exclude_none=True)), encoding="utf-8")
    print(f"{path}: weft train JOB --set plan={path} --set train.micro_batch_size={first.layout.micro_batch}")
