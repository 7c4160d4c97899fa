"""Environment variables of ranks: those of Weft's launcher, and those of torchrun, srun and mpirun."""

import re
import sys
import zlib
from collections.abc import Mapping

from weft.errors import JobError

ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
ATTEMPT_VARIABLE, HANG_TIMEOUT_VARIABLE = "WEFT_ATTEMPT", "WEFT_HANG_TIMEOUT"  # in the environment of the ranks
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
FIRST_PORT, PORTS = 20000, 20000
"""Range of ports that are derived from the id of a job, below the ports that Linux gives to outgoing connections."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) for a rank of another launcher.

    Args:
        environment: environment of this process.

    Returns:
        The missing variables; empty if the process has them, or is not one of several ranks.

    Raises:
        JobError: the variables of a rank are incomplete, or the launcher is not known.
    """
    if "RANK" in environment:
        if missing := [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name not in environment]:
            raise JobError(
                f"RANK is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
                where="environment",
                rule="a rank knows its rank, the number of ranks, and its rank on its host",
                fix="set LOCAL_RANK=0 where each host has one rank, or start the ranks with torchrun",
            )
        return {}
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:  # srun; a batch script alone has no step
        names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
        job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
        address = first_node(nodes)
    elif "OMPI_COMM_WORLD_RANK" in environment:
        names = {
            "RANK": "OMPI_COMM_WORLD_RANK",
            "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
            "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        }
        job, address = environment.get("PMIX_NAMESPACE", ""), "127.0.0.1"
        on_one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]
        if not on_one_host and "MASTER_ADDR" not in environment:
            raise JobError(
                "mpirun started ranks on several hosts, and MASTER_ADDR is not set",
                where="environment",
                rule="the ranks meet at the host of rank 0",
                fix="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port there> ...",
            )
    elif int(environment.get("PMI_SIZE", "1")) > 1:
        raise JobError(
            f"an MPI launcher started {environment['PMI_SIZE']} ranks in a way that is not known",
            where="environment",
            rule="ranks of torchrun, srun, and mpirun of Open MPI are joined",
            fix="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each rank, or use torchrun",
        )
    else:
        return {}
    found = {name: environment[source] for name, source in names.items()}
    if environment.get("SLURM_GPUS_PER_TASK") == "1":  # each rank sees its own device alone, as device 0
        found["LOCAL_RANK"] = "0"
    found |= {"MASTER_ADDR": address, "MASTER_PORT": str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)}
    return {name: value for name, value in found.items() if name not in environment}


def first_node(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return prefix.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    first = re.match(r"\d+", numbers)
    return f"{prefix}{first.group() if first else ''}{suffix.partition(',')[0]}"
