"""Profiles of a job: run it, merge the files of its ranks, and compare two plans."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.errors import DataError, JobError
from weft.files import replace_file
from weft.job import Eval, Job, read_plan
from weft.observe.profile.page import (
    COMPARISON,
    PAGE,
    describe_work,
    write_comparison_page,
    write_profile_page,
)
from weft.observe.profile.ranks import read_profiles
from weft.observe.profile.summary import FILE, summarize
from weft.observe.profile.trace import write_trace
from weft.planner.train import train
from weft.training.profiler import FOLDER, STEPS_AFTER
from weft.training.progress import WARM_UP_STEPS

__all__ = ["COMPARISON", "PAGE", "compare_profiles", "profile_job", "write_profile"]


def job_to_profile(job: Job, steps: int, warmup: int, ranks: Sequence[int], out: Path) -> Job:
    """Job that ends after the profile, without evaluations and checkpoints.

    Args:
        steps: number of steps to profile.
        warmup: number of unprofiled steps before them, besides the two warm-up steps of a process.
        ranks: ranks to profile; empty for the first eight.
        out: run folder.
    """
    first = WARM_UP_STEPS + warmup + 1
    last = first + steps - 1
    changes = {
        "steps": max(job.train.steps, last + STEPS_AFTER),
        "evaluate_every": 0,
        "callbacks": (),
        "profile_steps": f"{first}-{last}",
        "profile_ranks": tuple(ranks),
        "profile_only": True,
    }
    checkpoint = job.checkpoint.model_copy(update={"every": 0, "memory_every": 0, "folder": "", "remote": ""})
    parts = {"train": job.train.model_copy(update=changes), "checkpoint": checkpoint, "eval": Eval(), "out": str(out)}
    return job.model_copy(update=parts)


def profile_job(
    job: Job,
    out: Path,
    *,
    steps: int = 3,
    warmup: int = 2,
    ranks: Sequence[int] = (),
    nproc: int | None = None,
) -> Path:
    """Run some steps of a job, profile them, and write trace and page; see `job_to_profile` for the arguments.

    Returns:
        The profile folder.

    Raises:
        WeftError: a subclass, as of `weft.planner.train.train`.
    """
    run = train(job_to_profile(job, steps, warmup, ranks, out), ranks=nproc)
    write_profile(run / FOLDER)
    return run / FOLDER


def write_profile(folder: Path) -> dict[str, Any]:
    """Write the merged trace, the summary and the page of a profile folder, and compress the traces of the ranks.

    Returns:
        The summary.

    Raises:
        DataError: the folder has no profile, or a file in it is damaged.
        OSError: a file cannot be written.
    """
    profiles = read_profiles(folder)
    summary = summarize(profiles, folder.parent)
    write_trace(profiles, folder)
    replace_file(folder / FILE, json.dumps(summary))
    write_profile_page(summary, folder)
    for profile in profiles:
        path = folder / f"rank-{profile.rank}.trace.json"
        if path.exists():
            replace_file(path.with_name(path.name + ".gz"), gzip.compress(path.read_bytes(), compresslevel=5))
            path.unlink()
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a profile folder, or of the profile in a run folder.

    Raises:
        DataError: the folder has no summary, or it is damaged.
    """
    path = next((path for path in (folder / FILE, folder / FOLDER / FILE) if path.exists()), None)
    try:
        summary = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict) or not {"work", "terms", "seconds"} <= summary.keys():
        raise DataError(
            f"there is no profile in {folder}",
            rule=f"a profile has a file {FILE}",
            fix="name a folder that weft profile wrote, or a plan as TOML",
        )
    return summary


def compare_profiles(sides: tuple[Path, Path], out: Path, profile_plan: Callable[[Path, Path], Path]) -> Path:
    """Write the page of two plans side by side.

    Args:
        sides: each a profile folder, a run folder with a profile, or a plan as TOML.
        out: folder for the page and for the runs of plans.
        profile_plan: profiles a plan: (plan file, run folder) -> profile folder.

    Returns:
        Path of the page.

    Raises:
        DataError: a folder has no profile.
        JobError: the profiles are of different models or batches, or a plan is refused.
    """
    for side in sides:
        if not side.is_dir():
            read_plan(side)  # refused before the other side runs
    folders = [
        side if side.is_dir() else profile_plan(side, out / name) for side, name in zip(sides, "ab", strict=True)
    ]
    a, b = map(read_summary, folders)
    if a["work"] != b["work"]:
        raise JobError(
            f"A is {describe_work(a['work'])}; B is {describe_work(b['work'])}",
            where=f"--compare {sides[0]} {sides[1]}",
            rule="profiles are compared that do the same work: the same model and the same rows a step",
            fix="profile both plans with the same job",
        )
    out.mkdir(parents=True, exist_ok=True)
    return write_comparison_page(a, b, (str(sides[0]), str(sides[1])), out)
