"""weft dryrun"""

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer


def dryrun(
    job: Annotated[Path, typer.Argument(help="Job as TOML. No weights and no data are read.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")],
    rank: Annotated[
        list[int], typer.Option(help="A rank to look at; may be repeated. Default the first and the last.")
    ] = [],  # noqa: B006
    set_: Annotated[list[str], typer.Option("--set", help="A dotted key of the job, key=value; may be repeated.")] = [],  # noqa: B006
    device: Annotated[
        Optional[Literal["cpu", "cuda", "npu"]],  # noqa: UP045
        typer.Option(help="What the ranks run on; default what is here."),
    ] = None,
    json: Annotated[Optional[Path], typer.Option(help="File for all figures, with every message.")] = None,  # noqa: UP045
) -> None:
    """Count a step's memory, messages and FLOPs for each rank.

    For any number of ranks, without launching them.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job

    chosen = Job.load(job, set_)
    check_outputs(json=json)

    import transformers

    from weft.device.device import detect
    from weft.planner.dryrun.table import print_traces, write_traces
    from weft.planner.dryrun.trace import trace

    transformers.logging.set_verbosity_error()
    traces = trace(chosen, world_size, rank or sorted({0, world_size - 1}), device or detect().type)
    print_traces(chosen, traces)
    if json is not None:
        write_traces(traces, json)
