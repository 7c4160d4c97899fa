"""Share of tensor-parallel communication that is overlapped with matmuls, on an emulated wire between two ranks.

    python benchmarks/cpu_overlap.py             # about 20 minutes
    python benchmarks/cpu_overlap.py --quick     # a smoke run
    python benchmarks/cpu_overlap.py --two       # two real ranks by wall-clock time, on two free cores

A message takes the time of a slow wire (tests/lab/wire.py), which is set so that the messages of a form take 0.5, 1 and 2
times as long as its matmuls. In turn: each message is waited for before anything else runs. Hidden: (in turn - with chunks) /
min(messages, matmuls). Every repeat runs all numbers of chunks, one after the other, so that other work on the machine affects
all of them alike. Seconds are those of one rank on a core plus its waiting for the wire, which do not depend on other
processes; the peer does the same at the same time.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from peers.figures import choose, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from weft.backends.hierarchical import register_backend
from weft.comm import collectives
from weft.comm.overlap import Overlap, all_gather_matmul, copy_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.device.detect import detect

ALPHA = 5e-5  # latency of a message in seconds
COUNTS = (1, 2, 4, 8, 16, 32)
RATIOS = (0.5, 1.0, 2.0)
WARM_UP = 2


class Form(NamedTuple):
    """Matmul with its communication, in one direction."""

    name: str
    direction: str
    sp: bool
    fan: int


FORMS = (
    Form("column", "forward", True, 3),
    Form("column", "backward", True, 3),
    Form("row", "forward", True, 1),
    Form("row", "backward", True, 1),
    Form("column", "backward", False, 3),
    Form("row", "forward", False, 1),
)
"""All forms that communicate; without sequence parallelism, the other two directions send nothing."""


class Run(NamedTuple):
    """One form on one rank."""

    forward: Callable[[Any], list[Tensor]]
    """Forward with an `Overlap`, or without overlap if None."""
    gradients: list[Tensor]
    extra_message: Callable[[], object]
    """Message that the overlapped backward sends in addition to the one without overlap."""


def build(form: Form, tokens: int, hidden: int, group: dist.ProcessGroup) -> Run:
    """Forward and gradients of one form, with random tensors of one rank."""
    ranks = group.size()
    column, width = form.name == "column", hidden if form.name == "column" else hidden * 3 // ranks
    rows = tokens // ranks if column and form.sp else tokens
    x = torch.randn(1, rows, width, requires_grad=True)
    outputs = hidden // ranks if column else hidden
    matrices = [torch.randn(outputs, width, requires_grad=True) for _ in range(form.fan)]
    out_rows = tokens // ranks if form.sp and not column else tokens
    gradients = [torch.randn(1, out_rows, outputs) for _ in range(form.fan)]
    none = [None] * form.fan

    def in_turn() -> list[Tensor]:
        if not column:
            out = F.linear(x, matrices[0])
            return [collectives.reduce_scatter(out, group, 1) if form.sp else collectives.reduce(out, group)]
        full = collectives.gather(x, group, 1) if form.sp else collectives.copy(group, x)[0]
        return [F.linear(full, matrix) for matrix in matrices]

    def forward(overlap: Overlap | None) -> list[Tensor]:
        if overlap is None:
            return in_turn()
        if column:
            gathered = all_gather_matmul(x, matrices, none, overlap, 1) if form.sp else None
            return list(gathered or copy_matmul(x, matrices, none, overlap))
        multiply = partial(matmul_reduce_scatter, dim=1) if form.sp else matmul_all_reduce
        return [multiply(x, matrices[0], None, overlap=overlap)]

    regathers = column and form.sp and form.direction == "backward"
    extra_message = partial(collectives.gather_dim, x.detach(), group, 1) if regathers else lambda: None
    return Run(forward, gradients, extra_message)


def seconds_of(
    run: Run, form: Form, overlap: Overlap | None, wire: Any, figures: tuple[float, float], quiet: Any
) -> float:
    """Seconds of one direction, on the slower rank."""
    wire.reset(wire.clock, 0.0, 0.0)
    outs = run.forward(overlap) if form.direction == "backward" else []
    wire.reset(wire.clock, *figures)
    dist.barrier(quiet)
    wire.clock.restart()
    began = wire.clock.now()
    if form.direction == "forward":
        run.forward(overlap)
    else:
        if overlap is None:
            run.extra_message()
        torch.autograd.backward(outs, run.gradients)
    taken = torch.tensor([wire.clock.now() - began], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX, quiet)
    return taken.item()


def measure_alone(tokens: int, hidden: int, repeats: int, indices: list[int]) -> None:
    """Measure with one process; the peer rank is its mirror image."""
    from tests.lab.wire import CoreClock, new_mirror

    wire = new_mirror(2)
    wire.reset(CoreClock(), 0.0, 0.0)
    measure(wire, dist.group.WORLD, tokens, hidden, repeats, indices)


def measure_two(rank: int, ranks: int, tokens: int, hidden: int, repeats: int, indices: list[int]) -> None:
    """Measure as one of two real ranks."""
    from tests.lab.wire import new_wire

    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    measure(new_wire(), dist.new_group(backend=register_backend()), tokens, hidden, repeats, indices)
    dist.barrier()
    os._exit(0)


def measure(wire: Any, quiet: Any, tokens: int, hidden: int, repeats: int, indices: list[int]) -> None:
    """Measure some forms on one rank; rank 0 prints the table.

    Args:
        wire: emulated wire with its clock, as a process group.
        quiet: process group of the same ranks, for messages that are not measured.
        tokens: tokens of a row.
        hidden: hidden features.
        repeats: repeats of each number of chunks.
        indices: indices in `FORMS`.
    """
    torch.set_num_threads(1)
    rank = wire.rank()
    detect().use(rank)
    table = Table("form", "sp", "messages / matmuls", "in turn, ms: median (min-max)")
    for count in COUNTS:
        table.add_column(f"{count}" if count > 1 else "ms in chunks: 1")
    for column in ("best", "hidden at best (min-max)", "automatic", "over best"):
        table.add_column(column)
    for form in (FORMS[index] for index in indices):
        run = build(form, tokens, hidden, wire)
        alone = [seconds_of(run, form, None, wire, (0.0, 0.0), quiet) for _ in range(WARM_UP + repeats)][WARM_UP:]
        for ratio in RATIOS:
            wire.reset(wire.clock, 0.0, 0.0)
            seconds_of(run, form, None, wire, (0.0, 0.0), quiet)
            sent = sum(transfer.bytes for transfer in wire.transfers)
            figures = ALPHA, ratio * median(alone) / sent
            rows = compare(run, form, wire, figures, quiet, repeats)
            if rank == 0:
                add_row(table, form, ratio, rows, sent * figures[1])
        if rank == 0:
            table.add_section()
    if rank == 0:
        Console(width=230).print(table)


def compare(
    run: Run, form: Form, wire: Any, figures: tuple[float, float], quiet: Any, repeats: int
) -> tuple[dict[int | None, list[float]], int, list[float]]:
    """Seconds by number of chunks (None: in turn) for each repeat; the automatic number; seconds of the matmuls alone."""
    overlaps = {None: None} | {count: Overlap(wire, count) for count in COUNTS}
    found: dict[Any, list[float]] = {count: [] for count in overlaps}
    automatic, alone = Overlap(wire, "auto", wire.clock.now), []
    wire.reset(wire.clock, *figures)
    outs = run.forward(automatic)
    torch.autograd.backward(outs, run.gradients)
    [chosen] = [count for (name, *_), count in automatic.counts.items() if form.direction in name]
    for _ in range(WARM_UP + repeats):
        alone.append(seconds_of(run, form, None, wire, (0.0, 0.0), quiet))
        for count, overlap in overlaps.items():
            found[count].append(seconds_of(run, form, overlap, wire, figures, quiet))
    return {count: values[WARM_UP:] for count, values in found.items()}, chosen, alone[WARM_UP:]


def add_row(table: Table, form: Form, ratio: float, rows: Any, messages: float) -> None:
    found, chosen, alone = rows
    in_turn = found.pop(None)
    medians = {count: median(values) for count, values in found.items()}
    best = min(medians, key=lambda count: medians[count])
    hidden = [
        (before - after) / min(messages, matmuls)
        for before, after, matmuls in zip(in_turn, found[best], alone, strict=True)
    ]
    table.add_row(
        f"{form.name} {form.direction}",
        str(form.sp).lower(),
        f"{ratio}",
        spread([value * 1e3 for value in in_turn], ".1f"),
        *(f"{value * 1e3:.1f}" for value in medians.values()),
        str(best),
        spread(hidden, ".0%"),
        str(chosen),
        f"{medians[chosen] / medians[best] - 1:.1%}",
    )


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Smoke run: small matmuls, one repeat.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each number of chunks.")] = 7,
    tokens: Annotated[int, typer.Option(help="Tokens of a row.")] = 32768,
    hidden: Annotated[int, typer.Option(help="Features between regions.")] = 512,
    forms: Annotated[
        str, typer.Option(help="Comma-separated indices of the forms: lines of the table.")
    ] = "0,1,2,3,4,5",
    two: Annotated[bool, typer.Option("--two", help="Two real ranks by wall-clock time, on two free cores.")] = False,
) -> None:
    """Print the table."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    if quick:
        tokens, hidden, repeats = 128, 128, 1
    indices = [int(index) for index in choose("--forms", forms, list("012345"))]
    if two:
        spawn(measure_two, (2, tokens, hidden, repeats, indices), nprocs=2)
    else:
        sys.path.append(str(Path(__file__).parents[1]))
        measure_alone(tokens, hidden, repeats, indices)


if __name__ == "__main__":
    typer.run(main)
