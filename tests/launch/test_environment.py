"""Ranks of srun and mpirun get the variables of torchrun."""

import pytest

from weft.errors import JobError
from weft.launch.environment import first_node, rank_variables

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}
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
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "started 4 ranks"),
    ],
)
def test_ranks_are_not_mistaken_for_single_processes(environment: dict[str, str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        rank_variables(environment)
