"""Soak test: memory, descriptors, threads and mappings of a long run that saves all the time must not grow.

    python -m tests.faults.soak [--steps 20000] [--every 50] [--memory-every 5]       # writes docs/soak.svg

Samples the launcher, the fork server and each rank of a tiny model from /proc, and draws the four figures over the steps. Exits
with 1 if a figure grows by more than its limit from the second to the last quarter of the run.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.faults.kill import Command, forkserver_of, job_file, ranks_of, weft_train
from tests.lab.families import family

PICTURE = Path(__file__).parents[2] / "docs" / "soak.svg"
LAYOUT = "zero3 on 2"
MODEL = {**family("llama"), "vocab_size": 300}
SECONDS = 1.0  # between two samples
FIGURES = {"resident MiB": 2.0, "descriptors": 0.0, "threads": 0.0, "mappings": 4.0}  # figure -> allowed growth
WIDTH, PANEL, LEFT, GAP = 900, 130, 60, 34
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


@dataclass(frozen=True)
class Sample:
    """Figures of one process at one moment."""

    step: int
    process: str
    figures: tuple[float, ...]
    """Values in the order of FIGURES."""


def read_figures(pid: int) -> tuple[float, ...]:
    """Current figures of a process.

    Raises:
        OSError: the process has ended.
    """
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    descriptors = len(list((proc / "fd").iterdir()))
    mappings = (proc / "maps").read_bytes().count(b"\n")
    return int(status["VmRSS"].split()[0]) / 1024, descriptors, int(status["Threads"]), mappings


def sample_until_end(command: Command) -> list[Sample]:
    """Sample the processes of a run until it ends."""
    samples = list[Sample]()
    command.rank_at(0, 1)
    fork_server = forkserver_of(command.process.pid)
    while command.process.poll() is None:
        ranks = ranks_of(command.process.pid)
        step = max((rank.status().step or 0 for rank in ranks.values()), default=0)
        pids = {"launcher": command.process.pid, "fork server": fork_server}
        pids |= {f"rank {index}": rank.pid for index, rank in sorted(ranks.items())}
        with suppress(OSError, KeyError):  # a process that ends
            samples += [Sample(step, name, read_figures(pid)) for name, pid in pids.items()] if ranks else []
        time.sleep(SECONDS)
    return samples


def growth(samples: Sequence[Sample], steps: int) -> dict[str, list[float]]:
    """Growth by process: median of each figure in the last quarter of the run minus that in the second."""
    found = {}
    for name in dict.fromkeys(sample.process for sample in samples):
        parts = [
            np.median(
                [sample.figures for sample in samples if sample.process == name and low < sample.step / steps <= high],
                0,
            )
            for low, high in ((0.25, 0.5), (0.75, 1.0))
        ]
        found[name] = list(parts[1] - parts[0])
    return found


def draw(samples: Sequence[Sample], steps: int) -> str:
    """SVG chart: a panel for each figure, a line for each process."""
    names = list(dict.fromkeys(sample.process for sample in samples))
    height = len(FIGURES) * (PANEL + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, name in enumerate(names):
        lines.append(f'<text x="{LEFT + 150 * index}" y="16" fill="{COLORS[index % 4]}">{name}</text>')
    for row, figure in enumerate(FIGURES):
        top, high = GAP + row * (PANEL + GAP), max(sample.figures[row] for sample in samples) * 1.1
        lines.append(f'<text x="{LEFT}" y="{top - 4}" font-weight="bold">{figure}</text>')
        for share in (0.0, 0.5, 1.0):
            y = top + PANEL * (1 - share)
            lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{high * share:.0f}</text>')
        for index, name in enumerate(names):
            of_process = [sample for sample in samples if sample.process == name]
            of_process = of_process[:: max(1, len(of_process) // 300)]  # more points are not visible
            x = [LEFT + (WIDTH - LEFT - 20) * sample.step / steps for sample in of_process]
            y = [top + PANEL * (1 - sample.figures[row] / high) for sample in of_process]
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
            lines.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[index % 4]}"/>')
    for share in range(5):
        x = LEFT + (WIDTH - LEFT - 20) * share / 4
        lines.append(
            f'<text x="{x:.1f}" y="{height - GAP + 2}" text-anchor="middle">step {steps * share // 4:,}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Train, sample and draw; exit with 1 if a figure grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--memory-every", type=int, default=5, help="steps between copies in memory")
    options = parser.parse_args()
    began = time.monotonic()
    with TemporaryDirectory() as name:
        saving = {"every": options.every, "memory_every": options.memory_every}
        train = {"steps": options.steps, "micro_batch_size": 4}
        job = job_file(Path(name), LAYOUT, model={"config": MODEL}, train=train, checkpoint=saving)
        with weft_train(job, LAYOUT, Path(name) / "run", installed=True) as command:
            samples = sample_until_end(command)
            if command.wait() != 0:
                sys.exit(command.printed())
    found = growth(samples, options.steps)
    table = Table("process", *(f"{figure} (growth)" for figure in FIGURES))
    for process, more in found.items():
        last = [sample for sample in samples if sample.process == process][-1].figures
        table.add_row(process, *(f"{now:.1f} ({value:+.1f})" for now, value in zip(last, more, strict=True)))
    Console().print(table)
    PICTURE.write_text(draw(samples, options.steps), encoding="utf-8")
    print(f"{options.steps} steps in {time.monotonic() - began:.0f} s, {len(samples)} samples; {PICTURE.name} written")
    sys.exit(any(value > most for more in found.values() for value, most in zip(more, FIGURES.values(), strict=True)))


if __name__ == "__main__":
    main()
