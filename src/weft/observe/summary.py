"""The last words of a run on the terminal."""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from weft.checkpoint.folders import list_checkpoints, step_of
from weft.job import Job
from weft.observe.prediction import compare, in_words
from weft.observe.record import read_run
from weft.train.checkpoints import checkpoint_folder


def print_summary(folder: Path, report: Path | None) -> None:
    """Print what a run reached, a sample of its text, and where its files are."""
    run = read_run(folder)
    baselines, sample = run.facts.get("baselines") or {}, run.facts.get("sample")
    console, lines = Console(), dict[str, str]()
    if run.rows:
        lines["loss"] = f"{run.rows[-1].loss:.4f} after {run.rows[-1].step} steps"
    if run.evaluations:
        lines["held-out loss"] = f"{run.evaluations[-1].held_out_loss:.4f}"
    for name, loss in baselines.items():
        lines[f"{name} baseline"] = f"{loss:.4f}"
    if (folder / "export").is_dir():
        lines["model"] = str(folder / "export")
    if report:
        lines["report"] = str(report)
    if sample:
        console.rule("a sample of its text")
        console.print(sample, markup=False, highlight=False)
        console.rule()
    for name, text in lines.items():  # a path stays on its line, however long
        console.print(f"{name:<18}{text}", markup=False, highlight=False, soft_wrap=True)
    if compared := compare(run):
        planned = Table("weft plan", *(Column(name, justify="right") for name in ("predicted", "measured", "")))
        for row in in_words(compared):
            planned.add_row(*row)
        console.print(planned)
    elif run.job and (found := run.job.plan.prediction) and found.micro_batch != run.job.train.micro_batch_size:
        console.print(
            f"The plan's prediction is for train.micro_batch_size = {found.micro_batch}; this run had {run.job.train.micro_batch_size}."
        )


def print_end(job: Job, report: Path | None, argv: Sequence[str]) -> None:
    """Print what a run reached; if a signal ended it, also where it is saved, and the command that resumes it.

    Args:
        argv: the command that trained.
    """
    print_summary(Path(job.out), report)
    rows, saved = read_run(Path(job.out)).rows, next(iter(list_checkpoints(checkpoint_folder(job))), None)
    if rows and rows[-1].step >= job.train.steps:
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if saved is None:
        return console.print("no checkpoint was saved: the same command begins again")
    if not rows or step_of(saved) >= rows[-1].step:
        console.print(f"saved after step {step_of(saved)} in {saved}")
    else:
        console.print(f"the newest checkpoint is of step {step_of(saved)}, in {saved}: steps after it are repeated")
    console.print(f"resume with: {resume_command(argv)}")


def resume_command(argv: Sequence[str]) -> str:
    """The command that resumes an interrupted one: the same options, with `--resume auto`.

    Args:
        argv: of the interrupted command, its program first.
    """
    program, *arguments = argv
    kept: list[str] = []
    for number, argument in enumerate(arguments):
        value = number > 0 and arguments[number - 1] == "--resume"
        if argument != "--resume" and not value and not argument.startswith("--resume="):
            kept.append(argument)
    found = shutil.which(Path(program).name)
    if found is not None and Path(found).resolve() == Path(program).resolve():
        program = Path(program).name
    return shlex.join([program, *kept, "--resume", "auto"])
