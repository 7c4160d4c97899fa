"""weft calibrate"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Ranks


def calibrate(
    nproc_per_node: Ranks = None,
    out: Annotated[Path, typer.Option(help="File for the measured cluster, as TOML.")] = Path("cluster.toml"),
    append: Annotated[
        str | None,
        typer.Option(help="Add this host to the file by this name, as a host unlike those that the file has."),
    ] = None,
) -> None:
    """Measure this machine for the planner.

    Measures matmuls, attention, memory and links, and the error of predictions.
    """
    from weft.cli.outputs import check_outputs

    check_outputs(out=out)

    import transformers

    from weft.device.detect import detect
    from weft.launch.launcher import default_ranks
    from weft.planner.calibrate.calibrate import calibrate as measure
    from weft.planner.costmodel.cluster_file import read_cluster_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = read_cluster_file(out) if append else None  # before minutes of measurement
    found, missed = measure(nproc_per_node or default_ranks(detect()))
    if known and append:
        found = known.with_host(append, found)
    out.write_text(found.to_toml(), encoding="utf-8")
    print(f"{out}: mean error of predicted matmul times {missed:.0%}; use it with weft plan JOB --cluster {out}")
