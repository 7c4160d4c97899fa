"""Loss curve of a run restarted under another layout every few steps, beside an uninterrupted run.

python -m tests.faults.curve          # writes docs/resume.svg, prints the largest difference
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.test_runs import LAYOUTS, ORDER, job_of, losses_of, stop_after_5_more
from tests.lab.pool import close_pools
from tests.lab.runs import train_in_the_pool

PICTURE = Path(__file__).parents[2] / "docs" / "resume.svg"
LAYOUTS_IN_TURN = (*ORDER, "zero 1, dp_replicate 2", "zero 3 on 4")
EACH = 5
STEPS = len(LAYOUTS_IN_TURN) * EACH
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 380, 50, 20, 70


def curves(folder: Path) -> tuple[list[float], list[float]]:
    """Losses of the uninterrupted run, and of the restarted run."""
    tables: dict[str, dict[str, Any]] = {"train": {"steps": STEPS}}
    uninterrupted, _ = train_in_the_pool(*job_of(folder, "one rank", "uninterrupted", **tables))
    for layout in LAYOUTS_IN_TURN:
        restarted, _ = train_in_the_pool(
            *job_of(folder, layout, "restarted", **tables), resume="auto", fault=stop_after_5_more
        )
    return losses_of(uninterrupted), losses_of(restarted)


def draw(uninterrupted: list[float], restarted: list[float]) -> str:
    """SVG chart: the uninterrupted run as a line, the restarted run as points, layouts below."""
    low, high = min(uninterrupted), max(uninterrupted)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (step - 0.5) / STEPS

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for index, layout in enumerate(LAYOUTS_IN_TURN):
        begin, end = x(index * EACH + 0.5), x((index + 1) * EACH + 0.5)
        shade = "#f3f3f3" if index % 2 else "#ffffff"
        height = HEIGHT - TOP - BOTTOM
        lines.append(f'<rect x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{height}" fill="{shade}"/>')
        for row, words in enumerate(layout.replace(" on ", ", on ").split(", ")):
            lines.append(text((begin + end) / 2, HEIGHT - BOTTOM + 30 + 12 * row, words))
        lines.append(text((begin + end) / 2, HEIGHT - BOTTOM + 14, f"{index * EACH + 1}-{(index + 1) * EACH}"))
    for share in range(5):
        loss = low + (high - low) * share / 4
        lines.append(text(LEFT - 6, y(loss) + 3, f"{loss:.2f}", "end"))
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(uninterrupted, 1))
    lines.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>')
    for step, loss in enumerate(restarted, 1):
        lines.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3" fill="none" stroke="#d62728"/>')
    lines.append(text(WIDTH - 24, TOP + 14, "line: one rank, uninterrupted; circles: restarted every 5 steps", "end"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(log: Callable[[str], None] = print) -> None:
    with TemporaryDirectory() as folder:
        uninterrupted, restarted = curves(Path(folder))
    close_pools()
    if len(uninterrupted) != len(restarted):
        sys.exit(f"{len(uninterrupted)} steps, but {len(restarted)} with restarts")
    PICTURE.write_text(draw(uninterrupted, restarted), encoding="utf-8")
    worst = max(abs(loss - expected) / expected for loss, expected in zip(restarted, uninterrupted, strict=True))
    ranks = ", ".join(f"{name} ({LAYOUTS[name][0]} ranks)" for name in LAYOUTS_IN_TURN)
    log(f"{STEPS} steps under {ranks}: largest relative difference of a loss {worst:.1e}; {PICTURE.name} written")


if __name__ == "__main__":
    main()
