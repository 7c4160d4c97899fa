"""weft plan"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from weft.cli.options import PerHost, SetOption

if TYPE_CHECKING:
    from weft.job import Job
    from weft.planner.costmodel.cluster_file import HostGroup
    from weft.planner.costmodel.hardware import ClusterSpec
    from weft.planner.search.propose import Proposal


def plan(
    job: Annotated[
        Path, typer.Argument(help="Job as TOML: model, sequence length, batch, dtypes; weights and data are not read.")
    ],
    device: Annotated[Optional[str], typer.Option(help="Device by name, such as H100; or use --cluster.")] = None,  # noqa: UP045
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts with --device.")] = 1,
    per_host: PerHost = None,
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

    from weft.observe.proposal import print_proposal, write_plan
    from weft.planner.search.by_dry_run import why_no_formulas
    from weft.planner.search.propose import propose

    transformers.logging.set_verbosity_error()
    details: dict[str, object] = {"--failure-hours": failure_hours, "--measure": measure, "--explain": explain}
    details |= {"--timeline": timeline, "--emit": emit}
    if reason := why_no_formulas(chosen):
        refuse_options(details, reason, "these options are for causal language models that train alone")
        refuse_options({"--cluster": cluster if machine.groups else None}, reason, "all hosts have the same devices")
        within = machine.cluster.within(max_devices, max_dollars)
        return _plan_by_dry_run(chosen, within, machine.scalar, margin, best, out)
    if machine.groups:
        rule = "these options are for clusters of like hosts, without tables [[host]] in the cluster file"
        refuse_options({"--max-devices": max_devices, "--max-dollars": max_dollars} | details, "unlike hosts", rule)
        return _plan_unlike(chosen, machine.groups, margin, best, confirm, out)
    within, by_operators = (
        machine.cluster.within(max_devices, max_dollars),
        machine.operators_scalar if measure else None,
    )
    found = propose(chosen, within, machine.scalar, margin, best, confirm, failure_hours, by_operators=by_operators)
    print_proposal(found)
    write_plan(found, out)
    _write_details(found, explain, timeline, emit)


def _plan_by_dry_run(job: "Job", cluster: "ClusterSpec", scalar: float, margin: float, count: int, out: Path) -> None:
    """Plan of a job for which there are no formulas."""
    from weft.observe.dry_run_proposal import print_dry_run_proposal, write_dry_run_plan
    from weft.planner.search.by_dry_run import propose_by_dry_run

    found = propose_by_dry_run(job, cluster, scalar, margin, count)
    print_dry_run_proposal(found)
    write_dry_run_plan(found, out)


def _plan_unlike(
    job: "Job", groups: "Sequence[HostGroup]", margin: float, count: int, confirm: bool, out: Path
) -> None:
    """Plan for groups of hosts with other devices each."""
    from weft.observe.unlike_proposal import print_unlike, write_unlike_plan
    from weft.planner.search.unlike import propose_unlike

    found = propose_unlike(job, groups, margin, count, confirm)
    print_unlike(found)
    write_unlike_plan(found, out)


def _write_details(found: "Proposal", explain: Path | None, timeline: Path | None, emit: str | None) -> None:
    """Write the page of a comparison and the trace of a step, and print the settings of another library."""
    from weft.observe.proposal_page import write_page
    from weft.planner.costmodel.timeline import timeline_of, write_trace
    from weft.planner.emit import emit as emit_settings
    from weft.planner.search.propose import planned

    first, space = found.best[0], found.space
    if explain:
        write_page(found, explain)
    if timeline:
        write_trace(timeline_of(space, first.layout), first.time, timeline)
    if emit:
        one, cluster = planned(found.job, space, first.layout), space.cluster
        print(emit_settings(one, emit, cluster.num_devices, cluster.hosts, space.shape.layers), end="")


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
