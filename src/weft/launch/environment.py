"""Environment variables of ranks, and who started this process: Weft's launcher, torchrun, srun, mpirun, or others.

started_rank(os.environ)      # None: nobody has started several ranks; the command starts its own

All variables of launchers are read here, and those of their restarts in `rounds.py`. Imports no torch.
"""

import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import JobError
from weft.launch.parent_death import LAUNCHER_VARIABLE
from weft.launch.rounds import RESTARTS_VARIABLE, LaunchRound, round_of

ATTEMPT_VARIABLE, HANG_TIMEOUT_VARIABLE = "WEFT_ATTEMPT", "WEFT_HANG_TIMEOUT"  # in the environment of the ranks
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
INTERACTIVE_STEP = 0xFFFFFFFA  # first of the ids that Slurm gives to shells of salloc and to batch scripts
FIRST_PORT, PORTS = 20000, 20000
"""Range of ports that are derived from the id of a job, below the ports that Linux gives to outgoing connections."""
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of one rank take cores from the other ranks
    **dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK_INTERFACE),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Expandable segments avoid fragmentation of the accelerator's memory. A setting of the user takes precedence.
ALLOCATOR = {f"PYTORCH_{device}_ALLOC_CONF": "expandable_segments:True" for device in ("CUDA", "NPU")}
WEFT, TORCHRUN, SRUN, OPEN_MPI, MPICH, RAY, POD, OTHER = (
    "Weft's launcher",
    "torchrun",
    "srun",
    "mpirun",
    "mpiexec",
    "Ray Train",
    "Kubernetes",
    "another launcher",
)


@dataclass(frozen=True)
class StartedRank:
    """This process as a rank that a launcher has started."""

    launcher: str
    """Name of the launcher, for messages."""
    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_world_size: int | None
    """Number of ranks of this host; None if the launcher does not say it."""
    attempt: int = 0
    """Number of restarts by the launcher before this one."""
    job: str = ""
    """Identity of this attempt of the job on this host: the same for its ranks, and different from that of other jobs."""
    launch_round: LaunchRound = field(default_factory=LaunchRound)
    """Identities of this start of the ranks, and of earlier ones of the same job."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) that the environment lacks."""


def check_options(started: StartedRank, ranks: int | None, max_restarts: int, endpoint: str | None) -> None:
    """Refuse options of Weft's launcher for a rank that has been started already.

    Args:
        started: this rank.
        ranks: --nproc-per-node.
        max_restarts: --max-restarts.
        endpoint: --rdzv-endpoint.

    Raises:
        JobError: names the option.
    """
    problem, fix = "", "leave the option out"
    if ranks and ranks != started.local_world_size:
        problem = f"--nproc-per-node {ranks}"
        fix = f"leave the option out: {started.launcher} has started {started.local_world_size} ranks on this host"
    elif max_restarts:
        problem = f"--max-restarts {max_restarts}"
        fix = {
            TORCHRUN: f"torchrun --max-restarts {max_restarts}, which resumes from the newest checkpoint",
            SRUN: "sbatch --requeue, which resumes from the newest checkpoint",
        }.get(started.launcher, "run the command again with --resume auto")
    elif endpoint:
        problem = f"--rdzv-endpoint {endpoint}"
    if problem:
        raise JobError(
            f"{problem} in a rank that {started.launcher} has started",
            where="weft train",
            rule="the launcher that starts the ranks of a job decides on their number, their restarts and where they meet",
            fix=fix,
        )


def explain_allocation(environment: Mapping[str, str]) -> str:
    """Line about the nodes of an allocation of Slurm that a command without srun leaves idle; "" where there are none."""
    nodes = int(environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1")
    in_step = int(environment.get("SLURM_STEP_ID") or INTERACTIVE_STEP) < INTERACTIVE_STEP
    if nodes == 1 or in_step:
        return ""
    return (
        f"Slurm has given this job {nodes} nodes ({environment.get('SLURM_JOB_NODELIST', '')}), and this command uses one of "
        "them; to use all, start it with srun --ntasks-per-node=RANKS_OF_A_NODE, or by weft launch slurm"
    )


def has_allocator(environment: Mapping[str, str]) -> bool:
    """True if the user has set options of the allocator of an accelerator."""
    return any(name.endswith("ALLOC_CONF") for name in environment)


def missing_environment(started: StartedRank, environment: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Variables of a rank of Weft's launcher that a rank of another launcher lacks, to be set before torch is imported.

    Args:
        started: this rank.
        environment: environment of this process; what it has is kept.
        interface: network interface for the traffic between ranks; None: loopback if all ranks are on this host, else the
            choice of the libraries.
    """
    if interface is None and started.local_world_size == started.world_size:
        interface = LOOPBACK_INTERFACE
    not_before_torch = (*INTERFACE_VARIABLES, "OMP_NUM_THREADS")  # threads: torch knows whether there is an accelerator
    wanted = {
        **{name: value for name, value in RANK_ENVIRONMENT.items() if name not in not_before_torch},
        **({} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)),
        **({} if has_allocator(environment) else ALLOCATOR),
        ATTEMPT_VARIABLE: str(started.attempt),
        **started.variables,
    }
    return {name: value for name, value in wanted.items() if name not in environment}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of torchrun that the environment of a rank lacks; empty if it lacks none, or if this process is no rank.

    Raises:
        JobError: as `started_rank`.
    """
    started = started_rank(environment)
    return started.variables if started else {}


def started_rank(environment: Mapping[str, str], hosts: int = 1) -> StartedRank | None:
    """Find out who started this process.

    The innermost launcher counts: ranks of torchrun have the variables of srun as well, if srun started torchrun, and so have
    those of mpirun, whose daemons Slurm starts.

    Args:
        environment: environment of this process.
        hosts: number of hosts on which a launcher starts the command (--nnodes), so that the command starts the ranks.

    Returns:
        This rank; None if this process is not one of several ranks, so that a command starts its own.

    Raises:
        JobError: the variables of a rank are incomplete, launchers are mixed, or the launcher is not known.
    """
    if hosts > 1:
        _check_one_launcher_a_task(environment, hosts)
        return None
    if LAUNCHER_VARIABLE in environment and "RANK" in environment:
        return _of_torchrun(WEFT, environment)
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        _check_not_nested(TORCHRUN, environment, environment.get("GROUP_WORLD_SIZE", "1") == "1")
        return _of_torchrun(TORCHRUN, environment)
    if "RANK" in environment:
        return _of_variables(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _of_mpirun(environment)
    if _step_tasks(environment) > 1:
        return _of_srun(environment)
    return _of_mpiexec(environment) if int(environment.get("PMI_SIZE", "1")) > 1 else None


def _of_torchrun(launcher: str, environment: Mapping[str, str]) -> StartedRank:
    """Rank of torchrun, or of Weft's launcher, which sets the same variables."""
    _check_complete(environment)
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", RESTARTS_VARIABLE)
    return StartedRank(
        launcher=launcher,
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=_integer(environment, "LOCAL_WORLD_SIZE"),
        attempt=int(environment.get(RESTARTS_VARIABLE, "0")),
        job=" ".join([launcher, *(environment.get(name, "") for name in names)]),
        launch_round=round_of(environment),
    )


def _of_variables(environment: Mapping[str, str]) -> StartedRank:
    """Rank of Ray Train, of a Kubernetes operator or of a script that sets torchrun's variables.

    The training operator of Kubeflow starts one rank a pod, and sets no LOCAL_RANK (PyTorchJob).
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    launcher = RAY if "RAY_JOB_ID" in environment or "RAY_ADDRESS" in environment else POD if in_pod else OTHER
    variables = {"LOCAL_RANK": "0"} if in_pod and "LOCAL_RANK" not in environment else {}
    complete = {**environment, **variables}
    _check_complete(complete)
    local_rank, local_size = int(complete["LOCAL_RANK"]), _integer(complete, "LOCAL_WORLD_SIZE")
    if variables or complete["WORLD_SIZE"] == "1":
        local_size = 1
    elif local_size is None and _step_tasks(environment) == int(complete["WORLD_SIZE"]):  # a script under srun
        local_rank, local_size = int(environment["SLURM_LOCALID"]), _tasks_here(environment)
    elif local_size is None:
        local_size = _integer(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    of_slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT")
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", RESTARTS_VARIABLE, "RAY_JOB_ID", *of_slurm)
    return StartedRank(
        launcher=launcher,
        rank=int(complete["RANK"]),
        world_size=int(complete["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=local_size,
        attempt=int(environment.get(RESTARTS_VARIABLE, environment.get("SLURM_RESTART_COUNT", "0"))),
        job=" ".join([launcher, *(environment.get(name, "") for name in names)]),
        launch_round=round_of(environment),
        variables=variables,
    )


def _of_mpirun(environment: Mapping[str, str]) -> StartedRank | None:
    """Rank of mpirun of Open MPI; None for a single one."""
    size, local_size = (int(environment[f"OMPI_COMM_WORLD_{name}"]) for name in ("SIZE", "LOCAL_SIZE"))
    if size == 1:
        return None
    _check_not_nested(OPEN_MPI, environment, size == local_size)
    if size != local_size and "MASTER_ADDR" not in environment:
        raise JobError(
            "mpirun started ranks on several hosts, and MASTER_ADDR is not set",
            where="environment",
            rule="the ranks meet at the host of rank 0",
            fix="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port there> ...",
        )
    found = {
        "RANK": environment["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
    }
    return _from_ids(OPEN_MPI, environment, found, local_size, environment.get("PMIX_NAMESPACE", ""), LOOPBACK)


def _of_srun(environment: Mapping[str, str]) -> StartedRank:
    """Task of a step of srun that has several tasks."""
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(_step_tasks(environment)),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
    }
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    return _from_ids(SRUN, environment, found, _tasks_here(environment), job, first_node(nodes))


def _of_mpiexec(environment: Mapping[str, str]) -> StartedRank:
    """Rank of Hydra, the launcher of MPICH and Intel MPI, which gives no id of the job."""
    names = {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID"}
    own = ("MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in (*names.values(), "MPI_LOCALNRANKS", *own) if name not in environment]:
        raise JobError(
            f"an MPI launcher started {environment['PMI_SIZE']} ranks, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            where="environment",
            rule="ranks of torchrun, srun and mpirun of Open MPI are joined, and those of mpiexec of MPICH or Intel MPI if "
            "they have MASTER_ADDR and MASTER_PORT",
            fix="mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <free port there> ..., or use torchrun",
        )
    found = {name: environment[source] for name, source in names.items()}
    job = ":".join(environment[name] for name in own)
    return _from_ids(MPICH, environment, found, int(environment["MPI_LOCALNRANKS"]), job, environment["MASTER_ADDR"])


def _from_ids(
    launcher: str, environment: Mapping[str, str], found: dict[str, str], local_size: int, job: str, address: str
) -> StartedRank:
    """Rank of a launcher that does not set torchrun's variables; `found` holds RANK, WORLD_SIZE and LOCAL_RANK."""
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    variables = {**found, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if environment.get("SLURM_GPUS_PER_TASK") == "1":  # each rank sees its own device alone, as device 0
        variables["LOCAL_RANK"] = "0"
    attempt = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return StartedRank(
        launcher=launcher,
        rank=int(found["RANK"]),
        world_size=int(found["WORLD_SIZE"]),
        local_rank=int(found["LOCAL_RANK"]),
        local_world_size=local_size,
        attempt=attempt,
        job=f"{launcher} {job} {environment.get('SLURM_NODEID', '')} {attempt}",
        launch_round=round_of(environment),
        variables={name: value for name, value in variables.items() if name not in environment},
    )


def _check_one_launcher_a_task(environment: Mapping[str, str], hosts: int) -> None:
    """Refuse --nnodes in a process that is a rank: of torchrun, or one of more or fewer tasks than hosts."""
    tasks = {
        OPEN_MPI: int(environment.get("OMPI_COMM_WORLD_SIZE", "1")),
        SRUN: _step_tasks(environment),
        MPICH: int(environment.get("PMI_SIZE", "1")),
        OTHER: int(environment.get("WORLD_SIZE", "1")),
    }
    launcher, count = next(((name, count) for name, count in tasks.items() if count > 1), ("", hosts))
    if "RANK" in environment and "TORCHELASTIC_RUN_ID" in environment:
        launcher, count = WEFT if LAUNCHER_VARIABLE in environment else TORCHRUN, int(environment["WORLD_SIZE"])
    elif count == hosts:
        return
    raise JobError(
        f"--nnodes {hosts} in one of {count} processes that {launcher} has started",
        where="weft train",
        rule="a launcher starts all ranks, or it starts `weft train --nnodes` once on each host, which starts the ranks",
        fix="leave out --nnodes, --node-rank and --rdzv-endpoint, or start one task a host (srun --ntasks-per-node=1, "
        "mpirun -N 1) without torchrun",
    )


def _check_complete(environment: Mapping[str, str]) -> None:
    if missing := [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name not in environment]:
        raise JobError(
            f"RANK is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            where="environment",
            rule="a rank knows its rank, the number of ranks, and its rank on its host",
            fix="set LOCAL_RANK=0 where each host has one rank, or start the ranks with torchrun",
        )


def _check_not_nested(launcher: str, environment: Mapping[str, str], on_one_host: bool) -> None:
    """Refuse a launcher in each task of srun whose ranks do not know those of the other tasks."""
    tasks = _step_tasks(environment)
    if on_one_host and tasks > 1:
        raise JobError(
            f"srun started {launcher} in each of {tasks} tasks, and each {launcher} starts ranks for its own host alone",
            where="environment",
            rule="one launcher starts the ranks of a job",
            fix="srun --ntasks-per-node=<ranks of a node> weft train JOB, or one task per node with torchrun --nnodes "
            '"$SLURM_NNODES" --rdzv-endpoint HOST:PORT --rdzv-backend c10d ... -m weft train JOB',
        )


def _step_tasks(environment: Mapping[str, str]) -> int:
    """Number of tasks of the step of srun that this process belongs to; 0 in a batch script, which has no step."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return 0
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1"))


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Number of tasks of the step on this node, from a list such as "2(x3),1"."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    counts = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeats or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[-1]


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    return int(environment[name]) if name in environment else None


def first_node(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return prefix.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    first = re.match(r"\d+", numbers)
    return f"{prefix}{first.group() if first else ''}{suffix.partition(',')[0]}"
