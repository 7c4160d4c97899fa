"""weft doctor"""

from pathlib import Path
from typing import Annotated, Optional

import typer


def doctor(
    run: Annotated[Optional[Path], typer.Argument(help="Run folder, to find what makes the run slow.")] = None,  # noqa: UP045
    kernels: Annotated[
        bool, typer.Option(help="Compile all Triton kernels for A100, H100 and B200; no GPU is needed.")
    ] = False,
    json: Annotated[Optional[Path], typer.Option(help="JSON file for the diagnosis of a run.")] = None,  # noqa: UP045
) -> None:
    """Show the device of this machine and its fused operators; or find what makes a run slow.

    The exit code is 1 if a kernel does not compile or spills registers, or if a part of the run is to blame.
    """
    if run is not None:
        from weft.cli.diagnosis import diagnose_run

        raise typer.Exit(diagnose_run(run, json))
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
