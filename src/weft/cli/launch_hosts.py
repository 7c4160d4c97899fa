"""weft launch hosts"""

import json
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Endpoint, Interface, MaxRestarts, OutOption, ResumeOption, SetOption


class Launcher(StrEnum):
    """Programs that start the command on the hosts."""

    ssh = "ssh"
    mpirun = "mpirun"


class Command(StrEnum):
    """Subcommand that runs on all hosts."""

    train = "train"
    doctor = "doctor"


def hosts(
    job: Annotated[Path, typer.Argument(help="Job as TOML, at the same path on all hosts.")],
    hostfile: Annotated[
        Path, typer.Option(help="Hosts: lines `host slots=8` or `host:8`, or a rank table of HCCL in JSON.")
    ],
    launcher: Annotated[Launcher, typer.Option(help="ssh to each host, or mpirun of Open MPI.")] = Launcher.ssh,
    command: Annotated[Command, typer.Option(help="train, or doctor to check all hosts at once.")] = Command.train,
    set_: SetOption = [],  # noqa: B006
    resume: ResumeOption = None,
    max_restarts: MaxRestarts = 0,
    out: OutOption = None,
    rdzv_endpoint: Endpoint = None,
    interface: Interface = None,
    env: Annotated[list[str], typer.Option(help="Variable on all hosts, NAME=VALUE; repeatable.")] = [],  # noqa: B006
    ssh_option: Annotated[list[str], typer.Option(help="Option of ssh, KEY=VALUE such as Port=2222; repeatable.")] = [],  # noqa: B006
    python: Annotated[str, typer.Option(help="Python on all hosts; default: the path of this one.")] = sys.executable,
    dry: Annotated[bool, typer.Option("--dry", help="Print the commands; start nothing.")] = False,
) -> None:
    """Train a job on the hosts of a hostfile, over ssh or by mpirun; end all when one fails."""
    from weft.errors import Stopped
    from weft.job import Job
    from weft.launch.log import log
    from weft.launch.schedulers.hostfile import read_hostfile
    from weft.plan import check_plan

    entries = read_hostfile(hostfile)
    chosen = Job.load(job, [*set_, *([f"out={json.dumps(str(out))}"] if out else [])])
    if all(entry.slots for entry in entries):
        check_plan(chosen.plan, sum(entry.slots or 0 for entry in entries))

    from weft.launch.agent import SECONDS_TO_END  # after the checks above, because importing torch takes seconds
    from weft.launch.rendezvous import new_token, parse_endpoint
    from weft.launch.schedulers.host_streams import HostStreams
    from weft.launch.schedulers.hosts import HostsJob, check_launcher, connections, find_endpoint, parse_pairs

    arguments = [word for setting in set_ for word in ("--set", setting)]
    arguments += ["--interface", interface] if interface else []
    arguments += _arguments_of_run(command, resume, max_restarts, out)
    if rdzv_endpoint:
        parse_endpoint(rdzv_endpoint)
    request = HostsJob(
        job=job,
        hosts=entries,
        endpoint=rdzv_endpoint or find_endpoint(entries, chosen.out),
        python=python,
        folder=Path.cwd(),
        command=command.value,
        arguments=arguments,
        environment=parse_pairs("--env", env, "NCCL_DEBUG=INFO"),
        ssh_options=[f"{key}={value}" for key, value in parse_pairs("--ssh-option", ssh_option, "Port=2222").items()],
    )
    processes = connections(request, launcher.value)
    if dry:
        for process in processes:
            print(shlex.join(process.argv))
        return
    check_launcher(launcher.value, os.environ)
    seconds = SECONDS_TO_END + chosen.guard.hang_timeout_seconds
    streams = HostStreams(processes, [entry.hostname for entry in entries], seconds, restarts=max_restarts > 0)
    code = streams.run(new_token())
    if streams.signals and code == 128 + streams.signals[0]:
        if command is Command.train:
            log("resume with the same command and --resume auto")
        raise Stopped(streams.signals[0])
    raise typer.Exit(code)


def _arguments_of_run(command: Command, resume: str | None, max_restarts: int, out: Path | None) -> list[str]:
    """Options of a run for the command on the hosts.

    Raises:
        JobError: the doctor has some.
    """
    from weft.errors import JobError

    arguments = ["--resume", resume] if resume else []
    arguments += ["--max-restarts", str(max_restarts)] if max_restarts else []
    arguments += ["--out", str(out)] if out else []
    if arguments and command is not Command.train:
        raise JobError(
            "--resume, --max-restarts or --out with --command doctor",
            where="command line",
            rule="the doctor starts no run",
            fix="leave the option out, or set the run folder with --set out=FOLDER",
        )
    return arguments
