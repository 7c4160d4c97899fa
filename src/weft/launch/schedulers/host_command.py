"""Command that a scheduler starts once on each host."""

import sys
from collections.abc import Sequence


def host_command(
    command: str,
    job: str,
    arguments: Sequence[str] = (),
    *,
    hosts: int | str,
    host: int | str,
    endpoint: str,
    token_file: str | None = None,
    python: str = sys.executable,
) -> list[str]:
    """Command of one host of a job: Weft's own launcher, which starts the ranks of the host and watches them.

    Args:
        command: subcommand of weft that takes the options of several hosts, such as "train".
        job: path of the job file, the same on all hosts.
        arguments: further arguments of the subcommand.
        hosts: number of hosts, or a variable of the scheduler's shell such as "$SLURM_NNODES".
        host: number of the host, from 0, or a variable.
        endpoint: ADDRESS:PORT of host 0.
        token_file: file with the secret of the job, readable by its owner alone; the same path on all hosts. None: the
            command finds the secret in its environment.
        python: interpreter on the hosts.
    """
    several = ["--nnodes", str(hosts), "--node-rank", str(host), "--rdzv-endpoint", endpoint]
    several += ["--token-file", token_file] if token_file else []
    return [python, "-m", "weft", command, job, *arguments, *several]
