"""weft advise"""

from pathlib import Path
from typing import Annotated, Optional

import typer


def advise(
    scenario: Annotated[str, typer.Argument(help="nlp, vision or multimodal.")],
    device: Annotated[Optional[str], typer.Option(help="A device by name, such as H100; or --cluster.")] = None,  # noqa: UP045
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts of that device.")] = 1,
    per_host: Annotated[Optional[int], typer.Option(min=1, help="Devices of a host; default as usual.")] = None,  # noqa: UP045
    cluster: Annotated[Optional[Path], typer.Option(help="A cluster as TOML, instead of --device.")] = None,  # noqa: UP045
    days: Annotated[float, typer.Option(min=0.01, help="Time there is.")] = 30.0,
    tokens: Annotated[
        float, typer.Option(min=0, help="To train on; 0: 20 for each parameter that a token meets.")
    ] = 0.0,
) -> None:
    """Show which models the devices at hand can train.

    Models of usual sizes, their best plans, days and dollars.
    """
    from weft.observe.scenarios import print_options
    from weft.planner.costmodel.cluster_file import choose_cluster
    from weft.planner.search.scenarios import find_scenario, options

    kind = find_scenario(scenario)
    machine = choose_cluster(cluster, device, nnodes, per_host)
    print_options(kind, machine.cluster, options(kind, machine.cluster, tokens, machine.scalar), days)
