"""Hosts of a hostfile: the command of each host, started over ssh or by mpirun of Open MPI.

On each host a supervisor (`host_supervisor`) starts Weft's own launcher. ssh is started once a host, mpirun once for all hosts,
with one program a host. The token is written to their standard input, so that no process list and no file shows it.
"""

import os
import shlex
import shutil
import socket
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import JobError
from weft.launch.environment import FIRST_PORT, LOOPBACK, PORTS, started_rank
from weft.launch.schedulers.host_command import host_command
from weft.launch.schedulers.host_streams import Connection
from weft.launch.schedulers.hostfile import HostEntry

SUPERVISOR = "weft.launch.schedulers.host_supervisor"
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=15", "ControlMaster=no")
"""Options of ssh, after those of the user, which take precedence. A master that stays would keep the output open."""
SSH, MPIRUN = "ssh", "mpirun"
MPI_OPTIONS = (
    ("--stdin", "all"),
    ("--bind-to", "none"),  # else Open MPI gives each of two launchers, and all their ranks, a single core
    ("--mca", "orte_abort_on_non_zero_status", "0"),  # else it kills the hosts that still save
)


@dataclass(frozen=True)
class HostsJob:
    """Command to be started on the hosts of a hostfile."""

    job: Path
    hosts: Sequence[HostEntry]
    endpoint: str
    """ADDRESS:PORT of host 0."""
    python: str
    """Interpreter on all hosts."""
    folder: Path
    """Working directory on all hosts."""
    command: str = "train"
    """Subcommand of weft."""
    arguments: Sequence[str] = ()
    """Further arguments of the subcommand."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables on all hosts."""
    ssh_options: Sequence[str] = ()
    """KEY=VALUE options of ssh."""


def connections(request: HostsJob, launcher: str) -> list[Connection]:
    """Processes that start the command on all hosts: one ssh a host, or one mpirun.

    Args:
        request: command and hosts.
        launcher: "ssh" or "mpirun".

    Raises:
        JobError: mpirun cannot take a user or an option of ssh.
    """
    commands = [_supervised(request, host) for host in range(len(request.hosts))]
    if launcher == SSH:
        return [
            Connection(_ssh(request, entry, command), [host], entry.hostname)
            for host, (entry, command) in enumerate(zip(request.hosts, commands, strict=True))
        ]
    return [Connection(_mpirun(request, commands), range(len(commands)), MPIRUN)]


def _supervised(request: HostsJob, host: int) -> list[str]:
    """Command of one host, with its supervisor."""
    slots = request.hosts[host].slots
    command = host_command(
        request.command,
        str(request.job.absolute()),
        [*request.arguments, *(("--nproc-per-node", str(slots)) if slots else ())],
        hosts=len(request.hosts),
        host=host,
        endpoint=request.endpoint,
        python=request.python,
    )
    variables = [f"{name}={value}" for name, value in request.environment.items()]
    return [*(["env", *variables] if variables else []), request.python, "-m", SUPERVISOR, str(host), *command]


def _ssh(request: HostsJob, entry: HostEntry, command: Sequence[str]) -> list[str]:
    remote = f"cd {shlex.quote(str(request.folder))} && exec {shlex.join(command)}"
    return [*_ssh_words(request), "-T", "-x", entry.name, remote]


def _ssh_words(request: HostsJob) -> list[str]:
    return ["ssh", *(word for option in (*request.ssh_options, *SSH_OPTIONS) for word in ("-o", option))]


def _mpirun(request: HostsJob, commands: Sequence[Sequence[str]]) -> list[str]:
    """Call of mpirun with one program a host, as each host has its own arguments."""
    for entry in request.hosts:
        if entry.name != entry.hostname:
            raise JobError(
                f"the host {entry.name} with --launcher mpirun",
                where=entry.where,
                rule="mpirun takes no user in the name of a host",
                fix=f"write {entry.hostname}, with --ssh-option User={entry.name.partition('@')[0]}",
            )
    if spaces := [option for option in request.ssh_options if len(option.split()) != 1]:
        raise JobError(
            f"--ssh-option {spaces[0]!r} with --launcher mpirun",
            where="command line",
            rule="mpirun splits its call of ssh at spaces",
            fix="write the option into ~/.ssh/config",
        )
    call = [MPIRUN, *(word for option in MPI_OPTIONS for word in option)]
    call += ["--mca", "plm_rsh_agent", " ".join(_ssh_words(request))]
    call += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    for host, (entry, command) in enumerate(zip(request.hosts, commands, strict=True)):
        call += [":"] if host else []
        call += ["-np", "1", "--host", entry.hostname, "--wdir", str(request.folder), *command]
    return call


def check_launcher(launcher: str, environment: Mapping[str, str]) -> None:
    """Refuse a launcher that is missing or of another kind, and to launch from a rank.

    Raises:
        JobError: see above.
    """
    if started := started_rank(environment):
        raise JobError(
            f"weft launch hosts in rank {started.rank} of {started.world_size} that {started.launcher} has started",
            where="environment",
            rule="one launcher starts the ranks of a job",
            fix="run the command once, outside of the other launcher, or `weft train JOB` in its ranks",
        )
    if shutil.which(launcher) is None:
        raise JobError(
            f"the command {launcher} is not found",
            where="PATH",
            rule=f"--launcher {launcher} starts the hosts by the command {launcher}",
            fix="install it (Debian: openssh-client, openmpi-bin), or print the commands with --dry",
        )
    if launcher == MPIRUN:
        version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, errors="replace").stdout
        if "Open MPI" not in version:
            raise JobError(
                f"mpirun is of another kind: {next(iter(version.splitlines()), 'it prints no version')}",
                where="PATH",
                rule="--launcher mpirun needs mpirun of Open MPI, which passes its standard input to all processes",
                fix="--launcher ssh, or load the module of Open MPI",
            )


def find_endpoint(hosts: Sequence[HostEntry], out: str) -> str:
    """ADDRESS:PORT of host 0, as seen from here; the port is derived from the run folder.

    A host often knows its own name only by a loopback address. Then it is this machine, and its address is that on the route to
    the next host.

    Raises:
        JobError: a name has no IPv4 address.
    """
    address = _address(hosts[0]) if len(hosts) > 1 else LOOPBACK
    if len(hosts) > 1 and address.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((_address(hosts[1]), FIRST_PORT))  # sends nothing
            address = str(route.getsockname()[0])
    return f"{address}:{FIRST_PORT + zlib.crc32(os.path.abspath(out).encode()) % PORTS}"


def _address(entry: HostEntry) -> str:
    try:
        return socket.gethostbyname(entry.hostname)
    except OSError as error:
        raise JobError(
            f"{entry.hostname} has no IPv4 address here: {error}",
            where=entry.where,
            rule="the hosts meet at an IPv4 address of host 0, which is found by its name",
            fix="write the address into the hostfile, or set --rdzv-endpoint ADDRESS:PORT",
        ) from None


def parse_pairs(option: str, entries: Sequence[str], example: str) -> dict[str, str]:
    """Parse repeated KEY=VALUE options.

    Raises:
        JobError: an entry has another form, or a key twice.
    """
    pairs: dict[str, str] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not (equals and key.isidentifier() and value.isprintable()) or key in pairs:
            raise JobError(
                f"{option} {entry!r}" + (f" sets {key} twice" if key in pairs else ""),
                where="command line",
                rule="KEY=VALUE, each key once",
                fix=f"for example {option} {example}",
            )
        pairs[key] = value
    return pairs
