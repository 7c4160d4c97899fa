"""weft memory"""

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer


def memory(
    job: Annotated[Path, typer.Argument(help="Job as TOML. No weights and no data are read.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")] = 1,
    rank: Annotated[Optional[int], typer.Option(help="A rank; default the fuller of the first and the last.")] = None,  # noqa: UP045
    set_: Annotated[list[str], typer.Option("--set", help="A dotted key of the job, key=value; may be repeated.")] = [],  # noqa: B006
    device: Annotated[
        Optional[Literal["cpu", "cuda", "npu"]],  # noqa: UP045
        typer.Option(help="What the ranks run on; default what is here."),
    ] = None,
    json: Annotated[Optional[Path], typer.Option(help="File for all figures.")] = None,  # noqa: UP045
) -> None:
    """Show where a rank's memory goes, and how to save it.

    What each way to hold less would save and cost, before anything runs.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job

    chosen = Job.load(job, set_)
    check_outputs(json=json)

    import transformers

    from weft.device.device import detect
    from weft.planner.dryrun.memory_options import compare_options, print_rungs, write_rungs

    transformers.logging.set_verbosity_error()
    rungs = compare_options(chosen, world_size, rank, device or detect().type)
    print_rungs(rungs)
    if json is not None:
        write_rungs(rungs, json)
