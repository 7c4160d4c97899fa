"""Terminal summary at the end of a run."""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from weft.checkpoint.folders import list_checkpoints, step_of
from weft.job import Job
from weft.observe.goodput import bill, bill_lines, divide_time, goodput_text
from weft.observe.prediction import compare, table_rows
from weft.observe.record import read_run
from weft.training.checkpoints import checkpoint_folder


def print_summary(folder: Path, report: Path | None) -> None:
    """Print final losses, a text sample, the paths of the results, and the comparison with the plan's prediction."""
    run = read_run(folder)
    baselines, sample = run.facts.get("baselines") or {}, run.facts.get("sample")
    console, lines = Console(), dict[str, str]()
    if run.rows:
        lines["loss"] = f"{run.rows[-1].loss:.4f} after {run.rows[-1].step} steps"
    if run.evaluations:
        lines["held-out loss"] = f"{run.evaluations[-1].held_out_loss:.4f}"
    if (accuracy := run.facts.get("accuracy")) is not None:
        lines["accuracy"] = f"{accuracy:.1%} of held-out answers"
    lines |= {name: f"{value:.4g} on held-out records" for name, value in run.facts.get("metrics", {}).items()}
    for name, loss in baselines.items():
        lines[f"{name} baseline"] = f"{loss:.4f}"
    if goodput := divide_time(run.attempts, run.history):
        lines["goodput"] = goodput_text(goodput)
    if run.job and (found := bill(run.attempts, run.history, run.job.cluster)):
        lines |= bill_lines(found)
    if (folder / "export").is_dir():
        lines["model"] = str(folder / "export")
    if report:
        lines["report"] = str(report)
    if sample:
        console.rule("sample text")
        console.print(sample, markup=False, highlight=False)
        console.rule()
    for name, text in lines.items():  # without line breaks in long paths
        console.print(f"{name:<18}{text}", markup=False, highlight=False, soft_wrap=True)
    if compared := compare(run):
        planned = Table("weft plan", *(Column(name, justify="right") for name in ("predicted", "measured", "")))
        for row in table_rows(compared):
            planned.add_row(*row)
        console.print(planned)
    elif run.job and (plan := run.job.plan.prediction) and plan.micro_batch != run.job.train.micro_batch_size:
        console.print(
            f"The plan's prediction is for train.micro_batch_size = {plan.micro_batch}; "
            f"this run used {run.job.train.micro_batch_size}."
        )


def print_end(job: Job, report: Path | None, argv: Sequence[str]) -> None:
    """Print the summary of a run; for an interrupted run also its newest checkpoint and the command that resumes it.

    Args:
        report: path of the report, if there is one.
        argv: command line of the run.
    """
    print_summary(Path(job.out), report)
    rows, saved = read_run(Path(job.out)).rows, next(iter(list_checkpoints(checkpoint_folder(job))), None)
    if rows and rows[-1].step >= job.train.steps:
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if saved is None:
        return console.print("no checkpoint was saved: the same command starts the run again from the first step")
    if not rows or step_of(saved) >= rows[-1].step:
        console.print(f"saved after step {step_of(saved)} in {saved}")
    else:
        console.print(
            f"the newest checkpoint is from step {step_of(saved)}, in {saved}: later steps are repeated on resume"
        )
    console.print(f"resume with: {resume_command(argv)}")


def resume_command(argv: Sequence[str]) -> str:
    """Command that resumes an interrupted run: the same options with `--resume auto`.

    Args:
        argv: command line of the interrupted run, including the program.
    """
    program, *arguments = argv
    kept: list[str] = []
    for index, argument in enumerate(arguments):
        value = index > 0 and arguments[index - 1] == "--resume"
        if argument != "--resume" and not value and not argument.startswith("--resume="):
            kept.append(argument)
    found = shutil.which(Path(program).name)
    if found is not None and Path(found).resolve() == Path(program).resolve():
        program = Path(program).name
    return shlex.join([program, *kept, "--resume", "auto"])
