"""Who started this process; ranks of srun and mpirun get the variables of torchrun."""

import pytest

from weft.errors import JobError
from weft.launch.environment import (
    LOOPBACK_INTERFACE,
    check_options,
    first_node,
    missing_environment,
    rank_variables,
    started_rank,
)

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}
STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)", "SLURM_NODEID": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
WORKER = {"RAY_JOB_ID": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "RANK": "2", "WORLD_SIZE": "4"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("node7", "node7"),
        ("login,gpu[1-2]", "login"),
        ("rack1-[12,14]", "rack1-12"),
        ("a[1-2]-ib", "a1-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_ranks_of_srun() -> None:
    found = rank_variables(SLURM)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03"}
    assert 20000 <= int(port) < 40000
    own = {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "3"}
    assert rank_variables({**SLURM, **own})["LOCAL_RANK"] == "0"
    assert (
        rank_variables({**SLURM, "CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "1"
    )  # one device for all: refused later
    assert rank_variables({**SLURM, "CUDA_VISIBLE_DEVICES": "2,3"})["LOCAL_RANK"] == "1"
    assert rank_variables({**SLURM, "SLURM_PROCID": "6"})["MASTER_PORT"] == port  # the ranks of a job agree
    assert rank_variables({**SLURM, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != port  # two steps at once do not meet


def test_a_batch_script_alone_is_one_process() -> None:
    assert rank_variables({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) == {}


def test_ranks_of_mpirun() -> None:
    found = rank_variables(MPI)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert found["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_hosts_needs_an_address() -> None:
    several = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(JobError, match="MASTER_ADDR is not set"):
        rank_variables(several)
    found = rank_variables({**several, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert "MASTER_ADDR" not in found
    assert "MASTER_PORT" not in found


def test_variables_of_torchrun_are_kept() -> None:
    assert rank_variables({**SLURM, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == {}
    assert rank_variables({}) == {}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, and LOCAL_RANK is not"),
        ({"RANK": "0"}, "WORLD_SIZE and LOCAL_RANK are not"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4"},
            "started 4 ranks, and MPI_LOCALRANKID and MPI_LOCALNRANKS and MASTER_ADDR",
        ),
    ],
)
def test_ranks_are_not_mistaken_for_single_processes(environment: dict[str, str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        rank_variables(environment)


@pytest.mark.parametrize(
    ("environment", "launcher", "numbers"),
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2, 1)),
        ({**STEP, **TORCHRUN}, "torchrun", (3, 4, 1, 2, 1)),
        ({**TORCHRUN, "WEFT_LAUNCHER": "17"}, "Weft's launcher", (3, 4, 1, 2, 1)),
        (STEP, "srun", (5, 8, 1, 2, 0)),
        ({**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_NODEID": "3"}, "srun", (5, 8, 1, 1, 2)),
        (MPI, "mpirun", (1, 2, 1, 2, 0)),
        (
            {**STEP, **MPI, "SLURM_STEP_NUM_TASKS": "1"},
            "mpirun",
            (1, 2, 1, 2, 0),
        ),  # a daemon of mpirun on the second node
        (HYDRA, "mpiexec", (1, 4, 1, 2, 0)),
        (POD, "Kubernetes", (2, 4, 0, 1, 0)),
        ({**POD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "Kubernetes", (2, 4, 1, 2, 0)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", "RAY_JOB_ID": "1"}, "torchrun", (3, 4, 1, 2, 1)),
        (WORKER, "Ray Train", (1, 2, 1, 2, 0)),
        ({**WORKER, "TORCHELASTIC_RESTART_COUNT": "3", "SLURM_RESTART_COUNT": "1"}, "Ray Train", (1, 2, 1, 2, 3)),
        ({**STEP, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "another launcher", (5, 8, 1, 2, 0)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "another launcher", (0, 2, 0, None, 0)),
    ],
)
def test_ranks_of_each_launcher(environment: dict[str, str], launcher: str, numbers: tuple[int | None, ...]) -> None:
    started = started_rank(environment)
    assert started is not None
    assert started.launcher == launcher
    found = (started.rank, started.world_size, started.local_rank, started.local_world_size, started.attempt)
    assert found == numbers


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        {"PMI_SIZE": "1"},
    ],
)
def test_a_single_process_starts_its_own_ranks(environment: dict[str, str]) -> None:
    assert started_rank(environment) is None


def test_the_ranks_of_a_host_agree_on_the_job_and_other_hosts_and_attempts_do_not() -> None:
    def job(environment: dict[str, str]) -> str:
        started = started_rank(environment)
        assert started is not None
        return started.job

    assert job(TORCHRUN) == job({**TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"})
    assert job(TORCHRUN) != job({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert job(TORCHRUN) != job({**TORCHRUN, "GROUP_RANK": "0"})
    assert job(STEP) == job({**STEP, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"})
    assert job(STEP) != job({**STEP, "SLURM_RESTART_COUNT": "1"})
    assert job(STEP) != job({**STEP, "SLURM_NODEID": "1"})
    assert job(WORKER) != job({**WORKER, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert job(MPI) != job({**MPI, "PMIX_NAMESPACE": "prterun-host-2@1"})


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 2),
        (HYDRA, 4),
        ({**POD, "WORLD_SIZE": "4"}, 4),
        ({}, 2),
    ],
)
def test_a_launcher_for_each_host_may_be_a_task(environment: dict[str, str], hosts: int) -> None:
    assert started_rank(environment, hosts) is None


@pytest.mark.parametrize(
    ("environment", "hosts", "said"),
    [
        (TORCHRUN, 2, "--nnodes 2 in one of 4 processes that torchrun has started"),
        (STEP, 2, "--nnodes 2 in one of 8 processes that srun has started"),
        (MPI, 3, "--nnodes 3 in one of 2 processes that mpirun has started"),
        ({**STEP, **MPI}, 1, "srun started mpirun in each of 8 tasks"),
        ({**STEP, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, 1, "srun started torchrun in each of 8 tasks"),
    ],
)
def test_mixed_launchers_are_refused(environment: dict[str, str], hosts: int, said: str) -> None:
    with pytest.raises(JobError, match=said) as refused:
        started_rank(environment, hosts)
    assert refused.value.rule
    assert refused.value.fix


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((3, 0, None), "--nproc-per-node 3 in a rank that srun has started"),
        ((None, 2, None), "--max-restarts 2 in a rank that srun has started"),
        ((2, 0, "10.0.0.1:29400"), "--rdzv-endpoint 10.0.0.1:29400"),
    ],
)
def test_options_of_a_launcher_are_refused_in_a_rank(options: tuple[int | None, int, str | None], said: str) -> None:
    started = started_rank(STEP)
    assert started is not None
    check_options(started, 2, 0, None)
    with pytest.raises(JobError, match=said):
        check_options(started, *options)


def test_missing_variables_of_a_rank() -> None:
    """Ranks of one host talk through its loopback interface; what the user has set is kept."""
    alone, several = started_rank(MPI), started_rank(STEP)
    assert alone is not None
    assert several is not None
    found = missing_environment(alone, {"HF_HUB_OFFLINE": "0"}, None)
    assert found["GLOO_SOCKET_IFNAME"] == LOOPBACK_INTERFACE
    assert found["RANK"] == "1"
    assert "HF_HUB_OFFLINE" not in found
    assert "GLOO_SOCKET_IFNAME" not in missing_environment(several, {}, None)
    assert missing_environment(several, {}, "ib0")["NCCL_SOCKET_IFNAME"] == "ib0"
