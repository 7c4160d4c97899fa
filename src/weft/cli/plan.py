"""weft plan"""

from pathlib import Path
from typing import Annotated, Optional

import typer


def plan(
    job: Annotated[
        Path, typer.Argument(help="Job as TOML: model, length, batch and formats. No weights, no data are read.")
    ],
    device: Annotated[Optional[str], typer.Option(help="A device by name, such as H100; or --cluster.")] = None,  # noqa: UP045
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts of that device.")] = 1,
    per_host: Annotated[Optional[int], typer.Option(min=1, help="Devices of a host; default as usual.")] = None,  # noqa: UP045
    cluster: Annotated[Optional[Path], typer.Option(help="A cluster as TOML, instead of --device.")] = None,  # noqa: UP045
    set_: Annotated[list[str], typer.Option("--set", help="A dotted key of the job, key=value; may be repeated.")] = [],  # noqa: B006
    best: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 5,
    margin: Annotated[float, typer.Option(min=0.1, max=1.0, help="Of a device's memory that a plan may fill.")] = 0.92,
    max_devices: Annotated[Optional[int], typer.Option(min=1, help="Devices to use at most.")] = None,  # noqa: UP045
    max_dollars: Annotated[Optional[float], typer.Option(min=0, help="Dollars an hour, of all devices.")] = None,  # noqa: UP045
    failure_hours: Annotated[float, typer.Option(min=0, help="Mean hours between failures of a device; 0: none.")] = 0,
    confirm: Annotated[bool, typer.Option(help="Run the best dry: exact memory and messages.")] = True,
    measure: Annotated[
        bool, typer.Option(help="Time the operators of the best layouts on the device at hand, of the cluster's kind.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File for the plan, as TOML, with its prediction.")] = Path("plan.toml"),
    explain: Annotated[Optional[Path], typer.Option(help="Page with the comparison as charts.")] = None,  # noqa: UP045
    timeline: Annotated[Optional[Path], typer.Option(help="A step as a trace for Perfetto or Chrome.")] = None,  # noqa: UP045
) -> None:
    """Find the fastest way to train a model on a cluster.

    Before a device is rented; and say why not the others.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job

    chosen = Job.load(job, set_)
    check_outputs(out=out, explain=explain, timeline=timeline)

    import transformers

    from weft.observe.proposal import print_proposal, write_plan
    from weft.observe.proposal_page import write_page
    from weft.planner.costmodel.cluster_file import choose_cluster
    from weft.planner.costmodel.timeline import timeline_of, write_trace
    from weft.planner.search.propose import propose

    transformers.logging.set_verbosity_error()
    machine = choose_cluster(cluster, device, nnodes, per_host)
    found = propose(
        chosen,
        machine.cluster.within(max_devices, max_dollars),
        machine.scalar,
        margin,
        best,
        confirm,
        failure_hours,
        by_operators=machine.operators_scalar if measure else None,
    )
    print_proposal(found)
    write_plan(found, out)
    if explain:
        write_page(found, explain)
    if timeline:
        first = found.best[0]
        write_trace(timeline_of(found.space, first.layout), first.time, timeline)
