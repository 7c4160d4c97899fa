"""Speed of each parallel axis on 2 and 4 CPU ranks, beside one rank and beside torch and Transformers.

    python benchmarks/cpu_axes.py            # about 11 minutes on two free cores
    python benchmarks/cpu_axes.py --quick    # a smoke run on 2 ranks
    python benchmarks/cpu_axes.py --axes tp,cp-ring --ranks 2

The method is described in benchmarks/README.md.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from peers.axes import build_torch_plain, build_torch_tensor_parallel, build_transformers
from peers.beside import COLUMNS, Result, columns_of, measure, start_base
from peers.figures import choose
from peers.systems import Step, build_torch, build_weft_plan, installed
from peers.turns import ENVIRONMENT, stop
from peers.workload import LLAMA, QWEN3_MOE, Workload
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from weft.errors import RankFailure

MODELS = {"llama": LLAMA, "moe": QWEN3_MOE}
GLOBAL_BATCH, SEQ_LEN, QUICK_SEQ_LEN = 4, 512, 128
PEERS = {"torch": "torch", "transformers": "accelerate"}  # system -> required package
CHECKED_STEPS, QUICK_CHECKED_STEPS = 3, 2  # the first steps, which also warm up
TOLERANCE = 1e-4  # of losses near 9, in fp32


@dataclass(frozen=True)
class Cell:
    """One axis on a number of ranks: Weft's plan, and the other systems with the same axis."""

    axis: str
    model: str
    ranks: int
    parallel: dict[str, Any]
    """Table `parallel` of Weft's plan."""
    peers: dict[str, Callable[[Workload, str], Step]] = field(default_factory=dict)
    """Builder of each other system, called with the workload and the folder of its weights."""


def torch_zero_3(workload: Workload, folder: str) -> Step:
    """torch with `fully_shard` on each block."""
    return build_torch(workload, 3, "fp32")


def torch_tensors(workload: Workload, folder: str, sequence_parallel: bool) -> Step:
    """torch with `parallelize_module`."""
    return build_torch_tensor_parallel(workload, sequence_parallel)


def torch_plain(workload: Workload, folder: str) -> Step:
    """torch on one rank."""
    return build_torch_plain(workload)


def cells_of(ranks: int) -> list[Cell]:
    """Cells of the table for a number of ranks; with one rank, a plain torch loop beside Weft."""
    if ranks == 1:
        return [Cell("none", "llama", 1, {"zero": 0}, {"torch": torch_plain})]

    def transformers(**degrees: int) -> dict[str, Callable[[Workload, str], Step]]:
        return {"transformers": partial(build_transformers, degrees=degrees)}

    tensors = {"torch": partial(torch_tensors, sequence_parallel=False), **transformers(tp_size=ranks)}
    sequences = {"torch": partial(torch_tensors, sequence_parallel=True)}
    half = ranks // 2
    cells = [
        Cell("zero-3", "llama", ranks, {"zero": 3}, {"torch": torch_zero_3, **transformers(fsdp_size=ranks)}),
        Cell("tp", "llama", ranks, {"zero": 0, "tp": ranks, "sp": False}, tensors),
        Cell("tp-sp", "llama", ranks, {"zero": 0, "tp": ranks, "sp": True}, sequences),
        Cell("cp-ring", "llama", ranks, {"zero": 0, "cp": ranks}),
        Cell("cp-ulysses", "llama", ranks, {"zero": 0, "cp": ranks, "cp_ulysses": ranks}),
        Cell("ep", "moe", ranks, {"ep": ranks}, transformers(fsdp_size=ranks, ep_size=ranks)),
        Cell("tp-ep", "moe", ranks, {"tp": 2, "ep": ranks}, transformers(tp_size=2, fsdp_size=half, ep_size=ranks)),
    ]
    if ranks == 4:
        cells.insert(-2, Cell("cp-2x2", "llama", 4, {"zero": 0, "cp": 4, "cp_ulysses": 2}))
    return cells


AXES = list(dict.fromkeys(cell.axis for ranks in (1, 2, 4) for cell in cells_of(ranks)))


def add_rows(table: Table, cell: Cell, base_speeds: list[float], results: dict[str, Result]) -> None:
    """Add a row for each system."""
    for name, result in results.items():
        table.add_row(
            cell.axis,
            cell.model,
            str(cell.ranks),
            *columns_of(name, results, base_speeds),
            f"{result.communication:.0%}" if cell.ranks > 1 else "",
            f"{result.bytes / 1e6:.1f}" if name == "weft" and cell.ranks > 1 else "",
            f"{result.distance:.0e}",
        )
    table.add_section()


def run_model(
    workload: Workload,
    cells: Sequence[Cell],
    systems: Sequence[str],
    checked: int,
    repeats: int,
    steps: int,
    table: Table,
) -> float:
    """Measure all cells of one model; return the largest difference of a loss from that of one Weft rank."""
    largest = 0.0

    def weft(parallel: dict[str, Any]) -> Callable[[], Step]:
        return partial(build_weft_plan, workload, {"parallel": parallel, "precision": {"param_dtype": "fp32"}})

    with TemporaryDirectory() as folder:
        workload.untouched_model().save_pretrained(folder)
        base = start_base(workload, weft({"zero": 0}), checked)
        for cell in cells:
            builders = {"weft": weft(cell.parallel)}
            builders |= {
                name: partial(build, workload, folder) for name, build in cell.peers.items() if name in systems
            }
            base_speeds, results = measure(builders, cell.ranks, base, repeats, steps)
            add_rows(table, cell, base_speeds, results)
            largest = max(largest, *(result.distance for result in results.values()))
        stop(base.system)
    return largest


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run on 2 ranks: short rows, one repeat.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns per system.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 1,
    axes: Annotated[str, typer.Option(help="Comma-separated axes.")] = ",".join(AXES),
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks.")] = "1,2,4",
    systems: Annotated[str, typer.Option(help="Comma-separated systems to run beside weft.")] = ",".join(PEERS),
) -> None:
    """Print tokens per second, ratios to one Weft rank and to each other system, and the share of communication."""
    os.environ.update(ENVIRONMENT)
    disable_progress_bar()
    asked_axes, asked_systems = choose("--axes", axes, AXES), choose("--systems", systems, list(PEERS))
    seq_len, checked = SEQ_LEN, CHECKED_STEPS
    if quick:
        repeats, ranks, seq_len, checked = 1, "2", QUICK_SEQ_LEN, QUICK_CHECKED_STEPS
    rank_counts = [int(count) for count in choose("--ranks", ranks, ["1", "2", "4"])]
    cells = [cell for count in rank_counts for cell in cells_of(count) if cell.axis in asked_axes]
    console, started, largest = Console(highlight=False, width=150), time.perf_counter(), 0.0
    for name in asked_systems:
        if not installed(PEERS[name]):
            console.print(f"{name}: needs {PEERS[name]}, which is not installed")
    present = [name for name in asked_systems if installed(PEERS[name])]
    table = Table("axis", "model", "ranks", *COLUMNS, "communication", "MB a step", "loss difference")
    for model in dict.fromkeys(cell.model for cell in cells):
        chosen = [cell for cell in cells if cell.model == model]
        workload = Workload(MODELS[model], GLOBAL_BATCH, seq_len)
        try:
            largest = max(largest, run_model(workload, chosen, present, checked, repeats, steps, table))
        except RankFailure as failure:
            console.print(str(failure), markup=False)
            raise typer.Exit(failure.exit_code) from None
    console.print(table)
    cores, agreed = len(os.sched_getaffinity(0)), largest <= TOLERANCE
    seconds = time.perf_counter() - started
    console.print(f"{cores} cores, one thread per rank; ranks beyond {cores} share cores")
    console.print(f"losses {'agree' if agreed else 'DIFFER'}; {repeats} repeats of {steps} steps; {seconds:.0f} s")
    raise typer.Exit(0 if agreed else 1)


if __name__ == "__main__":
    typer.run(main)
