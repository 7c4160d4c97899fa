"""weft profile"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Ranks, SetOption

if TYPE_CHECKING:
    from weft.job import Job


def profile(
    job: Annotated[
        Path | None, typer.Argument(help="Job as TOML; or a run folder, whose profile is written again from its files.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to profile.")] = 3,
    ranks: Annotated[str, typer.Option(help="Ranks to profile, such as 0,1; or all. Default: the first eight.")] = "",
    warmup: Annotated[
        int, typer.Option(min=0, help="Unprofiled steps before them, besides the two warm-up steps of a process.")
    ] = 2,
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: out of the job with .profile.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two plans side by side: plans as TOML, or folders with a profile.")
    ] = None,
) -> None:
    """Profile some steps of a job, and compare two plans.

    Writes profile/profile.html and profile/trace.json.gz into the run folder.
    """
    from weft.errors import JobError
    from weft.inputs import ranks_on_cpu
    from weft.plan import check_plan
    from weft.training.inputs import check_inputs

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would slow down all other processes
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks are forked from this process
    if job is not None and job.is_dir() and compare is None:
        from weft.observe.profile.profile import write_profile
        from weft.training.profiler import FOLDER

        folder = job / FOLDER if (job / FOLDER).is_dir() else job
        _print_verdicts(write_profile(folder), folder)
        return
    needs_job = compare is None or not all(side.is_dir() for side in compare)
    if needs_job and job is None:
        raise JobError(
            "weft profile without a job",
            where="weft profile",
            rule="plans are profiled with a job; only two folders with profiles are compared without one",
            fix="name a job: weft profile job.toml",
        )
    chosen = _load(job, set_) if job is not None and needs_job else None
    ranks_given = nproc_per_node or ranks_on_cpu()
    if chosen:
        check_inputs(chosen)
    if chosen and compare is None and ranks_given:
        check_plan(chosen.plan, ranks_given)
    folder = out or Path(f"{chosen.out}.profile" if chosen else "profile-compare")

    import transformers

    from weft.device.detect import detect_for_launcher
    from weft.job import read_plan
    from weft.launch.launcher import default_ranks
    from weft.observe.profile.profile import compare_profiles, profile_job
    from weft.observe.profile.summary import FILE

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    count = nproc_per_node or default_ranks(detect_for_launcher())
    of_ranks = _parse_ranks(ranks, count)

    def run(one: "Job", into: Path) -> Path:
        return profile_job(one, into, steps=steps, warmup=warmup, ranks=of_ranks, nproc=nproc_per_node)

    if compare is None:
        assert chosen is not None
        import json

        written = run(chosen, folder)
        _print_verdicts(json.loads((written / FILE).read_text(encoding="utf-8")), written)
        return

    def run_plan(plan: Path, into: Path) -> Path:
        assert chosen is not None
        return run(chosen.model_copy(update={"plan": read_plan(plan)}), into)

    print(compare_profiles(compare, folder, run_plan))


def _load(job: Path, assignments: list[str]) -> "Job":
    """Job without its own profile, which the options replace."""
    from weft.job import Job

    chosen = Job.load(job, assignments)
    plain = {"profile_steps": "", "profile_ranks": (), "profile_only": False}
    return chosen.model_copy(update={"train": chosen.train.model_copy(update=plain)})


def _parse_ranks(text: str, count: int) -> list[int]:
    """Ranks of an option: "" for the default, "all", or numbers with commas."""
    from weft.errors import JobError

    if text in ("", "all"):
        return list(range(count)) if text else []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise JobError(
            f"--ranks {text}",
            where="weft profile",
            rule="ranks are numbers with commas, or all",
            fix="for example --ranks 0,1",
        )
    return sorted({int(part) for part in parts})


def _print_verdicts(summary: dict[str, Any], folder: Path) -> None:
    """Print the three numbers, the terms of a step, and the paths of trace and page."""
    from rich.console import Console
    from rich.table import Table

    from weft.observe.profile.page import PAGE, findings, seconds_text
    from weft.observe.profile.summary import verdicts
    from weft.observe.profile.trace import FILE

    console = Console(highlight=False)
    numbers, terms = Table("number", "", "", ""), Table("term of a step", "time", "share")
    for found in verdicts(summary):
        passed = {True: "yes", False: "no", None: "?"}[found.passed]
        numbers.add_row(found.name, "–" if found.value is None else f"{found.value:.1%}", passed, found.text)
    for term, seconds in [*summary["terms"].items(), ("step", summary["seconds"])]:
        terms.add_row(term, seconds_text(seconds), f"{seconds / summary['seconds']:.1%}")
    console.print(numbers, terms)
    lines = findings(summary)
    if cost := summary["cost"]:
        lines.append(
            f"A profiled step takes {cost['profiled'] / cost['plain'] - 1:+.1%} against the other steps of this run."
        )
    for line in [*lines, f"trace  {folder / FILE}", f"page   {folder / PAGE}"]:
        console.print(line, markup=False, soft_wrap=True)
