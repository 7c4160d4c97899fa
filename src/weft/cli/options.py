"""Command-line options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

HUB_OFFLINE = "HF_HUB_OFFLINE"
"""Environment variable of Hugging Face libraries: "1" forbids downloads."""

SetOption = Annotated[list[str], typer.Option("--set", help="Set a dotted key of the job, key=value; repeatable.")]
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", help="Checkpoint folder to resume from; auto: newest good checkpoint of the run."),
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="Resume although optimizer, schedule, configuration or tokens changed."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder, instead of out in the job.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks on this host; default: one per accelerator, two on CPU.")]
Step = Annotated[int | None, typer.Option(help="Step of a checkpoint; default: the newest weights.")]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Maximum consecutive restarts without progress.")]
TracedJob = Annotated[Path, typer.Argument(help="Job as TOML; weights and data are not read.")]
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks of the job.")]
DeviceType = Annotated[
    Literal["cpu", "cuda", "npu"] | None, typer.Option(help="Device type of the ranks; default: that of this machine.")
]
Hosts = Annotated[int, typer.Option(min=1, help="Number of hosts; each runs this command.")]
HostRange = Annotated[
    str,
    typer.Option(
        help="Number of hosts; each runs this command. MIN:MAX: MIN hosts start, others join at a checkpoint."
    ),
]
HostIndex = Annotated[int, typer.Option(min=0, help="Index of this host, from 0.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Rendezvous endpoint of several hosts: address or name:port of host 0.")
]
TokenFile = Annotated[Path | None, typer.Option(help="File with the secret of the hosts; default: WEFT_TOKEN.")]
Interface = Annotated[str | None, typer.Option(help="Network interface of this host; default: by route to host 0.")]
PerHost = Annotated[
    int | None,
    typer.Option(
        "--per-host", "--nproc-per-node", min=1, help="Devices per host; default: usual number for the device."
    ),
]
