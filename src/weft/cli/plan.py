"""weft plan"""

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from weft.cli.options import SetOption


def plan(
    job: Annotated[
        Path, typer.Argument(help="Job as TOML: model, sequence length, batch, dtypes; weights and data are not read.")
    ],
    device: Annotated[Optional[str], typer.Option(help="Device by name, such as H100; or use --cluster.")] = None,  # noqa: UP045
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts with --device.")] = 1,
    per_host: Annotated[
        int | None, typer.Option(min=1, help="Devices per host; default: usual number for the device.")
    ] = None,
    cluster: Annotated[Optional[Path], typer.Option(help="Cluster as TOML file, instead of --device.")] = None,  # noqa: UP045
    set_: SetOption = [],  # noqa: B006
    best: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 5,
    margin: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Fraction of device memory that a plan may use.")
    ] = 0.92,
    max_devices: Annotated[Optional[int], typer.Option(min=1, help="Maximum number of devices.")] = None,  # noqa: UP045
    max_dollars: Annotated[
        float | None, typer.Option(min=0, help="Maximum cost of all devices, in dollars per hour.")
    ] = None,
    failure_hours: Annotated[
        float, typer.Option(min=0, help="Mean hours between failures per device; 0: no failures.")
    ] = 0,
    confirm: Annotated[bool, typer.Option(help="Dry-run the best layout for exact memory and messages.")] = True,
    measure: Annotated[
        bool, typer.Option(help="Time the operators of the best layouts on a local device of the cluster's type.")
    ] = False,
    out: Annotated[Path, typer.Option(help="TOML file for the plan and its prediction.")] = Path("plan.toml"),
    explain: Annotated[Optional[Path], typer.Option(help="HTML file for charts of the comparison.")] = None,  # noqa: UP045
    timeline: Annotated[
        Path | None, typer.Option(help="JSON file for a trace of one step, for Perfetto or Chrome.")
    ] = None,
    emit: Annotated[
        Literal["accelerate", "torchtitan", "megatron", "automodel"] | None,
        typer.Option(help="Print the settings of another library for the plan."),
    ] = None,
) -> None:
    """Find the fastest plan for a model on a cluster.

    Needs no device of the cluster, and explains why other plans are slower or do not fit.
    """
    from weft.cli.outputs import check_outputs
    from weft.job import Job
    from weft.planner.costmodel.cluster_file import choose_cluster
    from weft.training.inputs import check_config

    chosen = Job.load(job, set_)
    check_config(chosen.model)
    check_outputs(out=out, explain=explain, timeline=timeline)
    machine = choose_cluster(cluster, device, nnodes, per_host)

    import transformers

    from weft.observe.dry_run_proposal import print_dry_run_proposal, write_dry_run_plan
    from weft.observe.proposal import print_proposal, write_plan
    from weft.observe.proposal_page import write_page
    from weft.observe.unlike_proposal import print_unlike, write_unlike_plan
    from weft.planner.costmodel.timeline import timeline_of, write_trace
    from weft.planner.emit import emit as emit_settings
    from weft.planner.search.by_dry_run import propose_by_dry_run, why_no_formulas
    from weft.planner.search.propose import planned, propose
    from weft.planner.search.unlike import propose_unlike

    transformers.logging.set_verbosity_error()
    limits: dict[str, object] = {"--max-devices": max_devices, "--max-dollars": max_dollars}
    details: dict[str, object] = {
        "--failure-hours": failure_hours,
        "--measure": measure,
        "--explain": explain,
        "--timeline": timeline,
        "--emit": emit,
    }
    if reason := why_no_formulas(chosen):
        refuse_options(details, reason, "these options are for causal language models that train alone")
        if machine.groups:
            refuse_options({"--cluster": cluster}, reason, "all hosts have the same devices")
        by_dry_run = propose_by_dry_run(
            chosen, machine.cluster.within(max_devices, max_dollars), machine.scalar, margin, best
        )
        print_dry_run_proposal(by_dry_run)
        return write_dry_run_plan(by_dry_run, out)
    if machine.groups:
        refuse_options(
            limits | details,
            "unlike hosts",
            "these options are for clusters of like hosts, without tables [[host]] in the cluster file",
        )
        proposal = propose_unlike(chosen, machine.groups, margin, best, confirm)
        print_unlike(proposal)
        return write_unlike_plan(proposal, out)
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
    if emit:
        cluster_used = found.space.cluster
        one = planned(found.job, found.space, found.best[0].layout)
        devices, blocks = cluster_used.num_devices, found.space.shape.layers
        print(emit_settings(one, emit, devices, cluster_used.hosts, blocks), end="")


def refuse_options(options: dict[str, object], what: str, rule: str) -> None:
    """Refuse options that do not apply.

    Args:
        options: values by name.
        what: what they do not apply to.
        rule: what they are for.

    Raises:
        DeviceError: names the options.
    """
    from weft.errors import DeviceError

    if given := [name for name, value in options.items() if value]:
        raise DeviceError(
            f"{', '.join(given)} with {what}", where="weft plan", rule=rule, fix=f"leave out {', '.join(given)}"
        )
