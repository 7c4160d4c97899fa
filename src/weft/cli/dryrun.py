"""weft dryrun"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import DeviceType, SetOption, TracedJob, WorldSize


def dryrun(
    job: TracedJob,
    world_size: WorldSize,
    rank: Annotated[list[int], typer.Option(help="Rank to trace; repeatable; default: first and last rank.")] = [],  # noqa: B006
    set_: SetOption = [],  # noqa: B006
    device: DeviceType = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for all results, with every message.")] = None,
) -> None:
    """Compute memory, traffic and FLOPs of a step per rank.

    Works for any number of ranks, without launching them.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job
    from weft.plan import check_plan
    from weft.training.inputs import check_config

    chosen = Job.load(job, set_)
    check_config(chosen.model)
    check_plan(chosen.plan, world_size)
    check_outputs(json=json)

    import transformers

    from weft.device.detect import detect
    from weft.launch.log import log
    from weft.planner.dryrun.replicas import replica_bounds
    from weft.planner.dryrun.table import print_traces, write_traces
    from weft.planner.dryrun.trace import trace

    transformers.logging.set_verbosity_error()
    ranks = rank or sorted({0, world_size - 1})
    log(f"dry run of {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}")
    traces = trace(chosen, world_size, ranks, device or detect().type)
    print_traces(chosen, traces)
    for line in replica_bounds(chosen, world_size):
        print(line)
    if json is not None:
        write_traces(traces, json)
