"""weft compare"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.training.compare_records import Comparison


Processes = Annotated[int | None, typer.Option(min=1, help="Number of processes; default: minimum of the plan.")]


def compare(
    job: Annotated[Path, typer.Argument(help="Job as TOML.")],
    set_a: Annotated[
        list[str],
        typer.Option(
            help="Set a key of side A, key=value; repeatable. Default: one rank, zero 0, operators of the library."
        ),
    ] = [],  # noqa: B006
    set_b: Annotated[list[str], typer.Option(help="Set a key of side B: plan.* or train.micro_batch_size.")] = [],  # noqa: B006
    set_: Annotated[list[str], typer.Option("--set", help="Set a dotted key of the job for both sides.")] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to run.")] = 3,
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Step whose tensors are compared; default: the first, then the first step with different losses.",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows per step, instead of train.global_batch_size.")] = None,
    nproc_per_node_a: Processes = None,
    nproc_per_node_b: Processes = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest rounding difference, relative to the largest value of a tensor; default: by the coarsest dtype of "
            "both plans, fp64 1e-9, fp32 1e-4, fp16 1e-2, bf16 5e-2.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for both sides; default: run folder with .compare.")] = None,
) -> None:
    """Compare a plan with the untouched model, or two plans.

    Runs both on the same weights and rows, and names the first tensor that differs by more than rounding.

    Exit code 0: the plans agree; 1: they differ; 2: the input was refused.
    """
    from weft.job import Job
    from weft.training.inputs import check_inputs
    from weft.training.run_folder import check_writable

    both = [*set_, *([f"train.global_batch_size={rows}"] if rows is not None else [])]
    job_a, job_b = Job.load(job, [*both, *set_a]), Job.load(job, [*both, *set_b])
    for chosen in (job_a, job_b):
        chosen.check_causal("weft compare")
        check_inputs(chosen)
    folder = out or Path(f"{job_a.out}.compare")
    check_writable(job_a.model_copy(update={"out": str(folder)}), new=True)

    import transformers

    from weft.device.detect import detect_for_launcher
    from weft.plan import min_ranks
    from weft.planner.zero_stage import choose_zero
    from weft.training.compare import check_same_job, untouched
    from weft.training.compare import compare as compare_jobs

    transformers.logging.set_verbosity_error()
    job_a = job_a if set_a else untouched(job_a)
    check_same_job(job_a, job_b)
    device = detect_for_launcher()
    found = compare_jobs(
        choose_zero(job_a, [nproc_per_node_a or min_ranks(job_a.plan)], device)[0],
        choose_zero(job_b, [nproc_per_node_b or min_ranks(job_b.plan)], device)[0],
        folder,
        steps=steps,
        step=step,
        ranks_a=nproc_per_node_a,
        ranks_b=nproc_per_node_b,
        tolerance=tolerance,
    )
    print_comparison(found, folder)
    raise typer.Exit(0 if found.agrees else 1)


def print_comparison(found: "Comparison", folder: Path) -> None:
    """Print losses and gradient norms by step, tensors by kind, and the first tensor that differs."""
    from rich.console import Console
    from rich.table import Column, Table

    from weft.training.compare_records import relative

    console = Console(highlight=False, soft_wrap=True)
    steps = Table("step", "loss A", "loss B", "difference", "gradient norm A", "norm B", "difference")
    for step, (a, b) in enumerate(found.steps, 1):
        loss, norm = relative(a.loss, b.loss), relative(a.grad_norm, b.grad_norm)
        numbers = (
            f"{a.loss:.6f}",
            f"{b.loss:.6f}",
            f"{loss:.1e}",
            f"{a.grad_norm:.6f}",
            f"{b.grad_norm:.6f}",
            f"{norm:.1e}",
        )
        steps.add_row(str(step), *numbers)
    console.print(steps)
    kinds = Table(f"tensors of step {found.step}", "compared", "differ", Column("largest difference", overflow="fold"))
    for kind, tensors in found.by_kind().items():
        worst = max(tensors, key=lambda tensor: tensor.size / tensor.tolerance)
        kinds.add_row(
            f"{kind}s", str(len(tensors)), str(sum(t.exceeds for t in tensors)), f"{worst.size:.1e} {worst.name}"
        )
    console.print(kinds)
    for side, step, problem in found.problems():
        console.print(f"step {step} of {side} was skipped: {problem}", markup=False)
    if first := found.first:
        of_step = f" of step {found.step}" if found.step > 1 else ""
        console.print(f"The first tensor{of_step} that differs is the {first}", markup=False)
    elif found.first_step:
        console.print(
            f"No tensor of step {found.step} differs, but losses or gradient norms differ from step {found.first_step} on."
        )
    else:
        console.print(f"The plans agree: no relative difference exceeds rounding ({found.tolerance:g}).")
    console.print(f"Both sides are kept in {folder}.", markup=False)
