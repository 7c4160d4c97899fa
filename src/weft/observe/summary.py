"""The last words of a run on the terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from weft.observe.prediction import compare, in_words
from weft.observe.record import read_run


def print_summary(folder: Path, report: Path) -> None:
    """Print what a run reached, a sample of its text, and where its files are."""
    run = read_run(folder)
    baselines, sample = run.facts.get("baselines") or {}, run.facts.get("sample")
    console, table = Console(), Table(show_header=False, box=None)
    if run.rows:
        table.add_row("loss", f"{run.rows[-1].loss:.4f} after {run.rows[-1].step} steps")
    if run.evaluations:
        table.add_row("held-out loss", f"{run.evaluations[-1].held_out_loss:.4f}")
    for name, loss in baselines.items():
        table.add_row(f"{name} baseline", f"{loss:.4f}")
    table.add_row("model", str(folder / "export"))
    table.add_row("report", str(report))
    if sample:
        console.rule("a sample of its text")
        console.print(sample, markup=False, highlight=False)
        console.rule()
    console.print(table)
    if lines := compare(run):
        planned = Table("weft plan", *(Column(name, justify="right") for name in ("predicted", "measured", "")))
        for row in in_words(lines):
            planned.add_row(*row)
        console.print(planned)
    elif run.job and (found := run.job.plan.prediction) and found.micro_batch != run.job.train.micro_batch:
        console.print(
            f"The plan's prediction is for train.micro_batch = {found.micro_batch}; this run had {run.job.train.micro_batch}."
        )
