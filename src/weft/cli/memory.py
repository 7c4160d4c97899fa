"""weft memory"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import DeviceType, SetOption, TracedJob, WorldSize


def memory(
    job: TracedJob,
    world_size: WorldSize = 1,
    rank: Annotated[
        int | None, typer.Option(help="Rank; default: first or last, whichever has the higher peak.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    device: DeviceType = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for all results.")] = None,
) -> None:
    """Show the memory of a rank, and options to reduce it.

    Predicts the saving and the cost of each option before anything runs.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job
    from weft.plan import check_plan
    from weft.training.inputs import check_config

    chosen = Job.load(job, set_)
    chosen.check_causal("weft memory")
    check_config(chosen.model)
    check_plan(chosen.plan, world_size)
    check_outputs(json=json)

    import transformers

    from weft.device.detect import detect
    from weft.launch.log import log
    from weft.planner.dryrun.memory_options import OPTIONS, compare_options, print_options, write_options
    from weft.planner.dryrun.replicas import replica_bounds

    transformers.logging.set_verbosity_error()
    log(f"{len(OPTIONS)} dry runs, one for each option")
    options = compare_options(chosen, world_size, rank, device or detect().type)
    print_options(options)
    for line in replica_bounds(chosen, world_size):
        print(line)
    if json is not None:
        write_options(options, json)
