"""weft advise"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import PerHost


def advise(
    scenario: Annotated[str, typer.Argument(help="nlp, vision or multimodal.")],
    device: Annotated[str | None, typer.Option(help="Device by name, such as H100; or use --cluster.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts with --device.")] = 1,
    per_host: PerHost = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster as TOML file, instead of --device.")] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Training time available, in days.")] = 30.0,
    tokens: Annotated[
        float, typer.Option(min=0, help="Training tokens; 0: 20 per parameter active for a token.")
    ] = 0.0,
) -> None:
    """Show which models given devices can train.

    Lists models of common sizes with their best plans, days and dollars.
    """
    from weft.errors import DeviceError
    from weft.planner.costmodel.cluster_file import choose_cluster

    machine = choose_cluster(cluster, device, nnodes, per_host)
    if machine.groups:
        raise DeviceError(
            f"{cluster} has tables [[host]]",
            where="weft advise",
            rule="it counts devices of one kind",
            fix="give a cluster file of like hosts, or use `weft plan`, which plans one job for unlike hosts",
        )

    # After the checks above, because importing torch takes seconds.
    from weft.observe.scenarios import print_plans
    from weft.planner.search.scenarios import find_scenario, plan_scenario

    kind = find_scenario(scenario)
    print_plans(kind, machine.cluster, plan_scenario(kind, machine.cluster, tokens, machine.scalar), days)
