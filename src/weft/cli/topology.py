"""weft topology"""

import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Endpoint, HostIndex, Hosts, Interface, Ranks, SetOption, TokenFile


def topology(
    job: Annotated[Path | None, typer.Argument(help="Job as TOML, to show the links of its mesh axes.")] = None,
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    file: Annotated[Path | None, typer.Option(help="Declared topology to show, instead of measuring.")] = None,
    out: Annotated[Path | None, typer.Option(help="TOML file for the topology, for plan.comm.topology.")] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for all results.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit for starting another round of pairs.")] = 5.0,
    cache: Annotated[
        Path | None, typer.Option(help="Folder with measurements; one of the same ranks from the last day is reused.")
    ] = None,
    nnodes: Hosts = 1,
    node_rank: HostIndex = 0,
    rdzv_endpoint: Endpoint = None,
    token_file: TokenFile = None,
    interface: Interface = None,
) -> None:
    """Measure latency and bandwidth between ranks.

    Shows classes of links, slow links, and the links of each mesh axis of a job.
    """
    if nnodes > 1:  # torch prints a stack trace for each lost connection of its store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from weft.cli.outputs import check_outputs
    from weft.inputs import ranks_on_cpu
    from weft.job import Job
    from weft.plan import check_plan, resolve_plan
    from weft.topology.topology import Topology

    check_outputs(out=out, json=json)
    recipe = job or Path(str(files("weft.recipes") / "first.toml"))
    chosen = Job.load(recipe, set_) if job or set_ else None
    declared = Topology.load(file) if file else None
    if chosen and declared is None and nnodes == 1 and (ranks := nproc_per_node or ranks_on_cpu()):
        check_plan(chosen.plan, ranks)

    from weft.comm.measure_links import measure_links
    from weft.device.detect import detect
    from weft.launch.launcher import default_ranks
    from weft.launch.rendezvous import parse_rendezvous
    from weft.observe.topology import print_topology, write_topology
    from weft.topology.axis_links import explain_plan
    from weft.topology.measurement import to_topology
    from weft.topology.topology import save_text

    measured = None
    if declared:
        found, source = declared, f"declared in {file}"
        if nproc_per_node is not None:
            found.check_fits([nproc_per_node], where=str(file))
    else:
        rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)
        nproc_per_node = nproc_per_node or default_ranks(detect())
        if chosen and rendezvous is None:  # refuse a plan that does not fit before measuring
            check_plan(chosen.plan, nproc_per_node)
        measured, source = measure_links(nproc_per_node, rendezvous=rendezvous, seconds=seconds, cache=cache)
        found = to_topology(measured)
    lines = explain_plan(found, resolve_plan(chosen.plan, found.world_size, native_bf16=False)) if chosen else []
    print_topology(found, measured, source, lines)
    if out is not None:
        save_text(found.to_toml(), out)
    if json is not None:
        write_topology(found, measured, source, lines, json)
