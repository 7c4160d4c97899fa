"""Output of `weft plan` for unlike hosts: the placements, what unequal shares gain, and the plan file."""

import math
from pathlib import Path

import tomli_w
from rich.table import Column, Table

from weft.observe.figures import format_bytes
from weft.observe.proposal import wide_console
from weft.planner.search.unlike import UnlikeProposal, describe, plan_with_prediction, text_of
from weft.training.metrics import format_dollars


def print_unlike(found: UnlikeProposal) -> None:
    """Print the best placements, the terms of the chosen one, and its speed beside equal shares and single groups."""
    console = wide_console()
    console.print(text_of(found.groups), markup=False)
    table = Table("layout", "hosts in order", *(Column(name, justify="right") for name in ("step", "memory", "slower")))
    first = found.best[0]
    for placed in found.best:
        table.add_row(
            describe(placed).replace("[", "\\["),
            ", ".join(group.name for group in placed.order),
            f"{placed.seconds:.3g} s",
            format_bytes(max(placed.memory.values())),
            "chosen" if placed is first else f"{placed.seconds / first.seconds - 1:+.1%}",
        )
    console.print(table)
    console.print("; ".join(f"{name} {seconds:.3g} s" for name, seconds in first.terms.items()))
    console.print(
        f"equal rows and stages: {found.equal.seconds:.3g} s, {found.equal.seconds / first.seconds:.2f} x as long"
    )
    for name, seconds in found.alone.items():
        took = f"{seconds:.3g} s, {seconds / first.seconds:.2f} x as long" if math.isfinite(seconds) else "does not fit"
        console.print(f"{name} alone: {took}", markup=False)
    if parts := _prices(found):
        console.print("; ".join(parts))


def _prices(found: UnlikeProposal) -> list[str]:
    """Price, energy and emission of the chosen placement, where the device of every host has them."""
    first, groups = found.best[0], found.groups
    tokens = first.layout.global_batch * first.layout.seq / first.seconds
    devices = [(group.cluster.device, group.cluster.num_devices) for group in groups]
    parts = []
    if all(device.dollars_per_hour for device, _ in devices):
        hourly = sum(device.dollars_per_hour * count for device, count in devices)
        parts.append(f"{format_dollars(hourly / 3600 / tokens * 1e6)} per million tokens")
    if all(device.watts for device, _ in devices):
        parts.append(f"{tokens / sum(device.watts * count for device, count in devices):.3g} tokens/J")
        grams = sum(device.watts * count * device.grams_co2_per_kwh for device, count in devices) / 3.6e6
        parts += [f"{grams / tokens * 1e6:.3g} g CO2 per million tokens"] if grams else []
    return parts


def write_unlike_plan(found: UnlikeProposal, path: Path) -> None:
    """Write the plan of the chosen placement, and print the command that trains with it and the order of hosts."""
    first, plan = found.best[0], plan_with_prediction(found)
    path.write_text(tomli_w.dumps(plan.model_dump(exclude_none=True)), encoding="utf-8")
    assert plan.prediction is not None
    ranks = ", ".join(f"--node-rank {index} on {name}" for index, name in enumerate(plan.prediction.hosts))
    print(f"{path}: weft train JOB --set plan={path} --set train.micro_batch_size={first.layout.micro_batch}, {ranks}")
