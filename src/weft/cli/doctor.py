"""weft doctor"""

import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Endpoint, HostIndex, Hosts, Interface, Ranks, SetOption, TokenFile


def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(help="Job as TOML, before its run; or a run folder, to diagnose the run. Default: hosts alone."),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    nproc_per_node: Ranks = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what needs ranks, and the dry run of the job.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List green and skipped checks too.")] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for all findings and facts.")] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Hostfile of a launch by ssh, to check its names and ssh from host 0.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="Only show what computes the operators here.")] = False,
    kernels: Annotated[
        bool, typer.Option(help="Only compile all Triton kernels for A100, H100 and B200; no GPU is needed.")
    ] = False,
    nnodes: Hosts = 1,
    node_rank: HostIndex = 0,
    rdzv_endpoint: Endpoint = None,
    token_file: TokenFile = None,
    interface: Interface = None,
) -> None:
    """Check hosts, devices and links before a run, or diagnose a run.

    Start it on all hosts at once, with the options of `weft train`; host 0 prints one table. The exit code is 1 if a line is
    red.
    """
    if operators or kernels:
        _show_operators(kernels)
        return
    if target is not None and target.is_dir():
        from weft.cli.diagnosis import diagnose_run

        raise typer.Exit(diagnose_run(target, json))
    if nnodes > 1:  # torch prints a stack trace for each lost connection of its store
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from weft.cli.outputs import check_outputs
    from weft.job import Job
    from weft.launch.rendezvous import parse_rendezvous
    from weft.launch.schedulers.hostfile import read_hostfile

    check_outputs(json=json)
    names = [entry.name for entry in read_hostfile(hostfile)] if hostfile and node_rank == 0 else []
    recipe = target or Path(str(files("weft.recipes") / "first.toml"))
    job = Job.load(recipe, set_) if target or set_ else None
    rendezvous = parse_rendezvous(node_rank, nnodes, rdzv_endpoint, token_file, interface)

    import transformers

    from weft.observe.doctor.examine import Request, examine
    from weft.observe.doctor.judge import count_levels, exit_code, print_findings, write_findings

    transformers.logging.set_verbosity_error()
    findings, hosts = examine(Request(job, nproc_per_node, rendezvous, quick, names))
    if node_rank == 0:
        title = f"{nnodes} host{'s' * (nnodes > 1)} examined"
        print_findings(findings, title, everything)
        if json is not None:
            write_findings(findings, hosts, json)
    else:
        print(f"host {node_rank}: {count_levels(findings)}; host 0 prints them", flush=True)
    raise typer.Exit(exit_code(findings))


def _show_operators(kernels: bool) -> None:
    """Print the device and its fused operators; with `kernels`, compile all kernels.

    The exit code is 1 if a kernel does not compile or spills registers.
    """
    from rich.console import Console
    from rich.table import Table

    from weft.compute import aot, jit
    from weft.compute.kernels import OPERATORS
    from weft.device.detect import detect

    device, console = detect(), Console(highlight=False)
    dtypes = [name for name in ("bf16", "fp16", "fp64", "float8") if device.supports(name)]
    console.print(f"{device.type} {device.name}; native dtypes: {', '.join(['fp32', *dtypes])}")
    table = Table("operator", "implementation", "", title="fused operators")
    for name, operator in OPERATORS.items():
        for implementation, refusal in operator.refusal.items():
            table.add_row(name, implementation, refusal(device.type) or "used where the modules of a model agree")
    console.print(table)
    if not kernels:
        return
    if not jit.has_triton():
        console.print("Triton is not installed, so that no kernel can be compiled: pip install triton")
        raise typer.Exit(2)
    usages = aot.compile_all(aot.kernels())
    resources = Table("kernel", *(f"sm_{target}" for target in aot.TARGETS), title="kernels, compiled ahead of time")
    for name in dict.fromkeys(usage.kernel for usage in usages):
        found = {usage.target: aot.describe(usage) for usage in usages if usage.kernel == name}
        resources.add_row(name, *(found.get(target, "does not run there") for target in aot.TARGETS))
    console.print(resources)
    if any(usage.error or usage.spilled_bytes for usage in usages):
        raise typer.Exit(1)
