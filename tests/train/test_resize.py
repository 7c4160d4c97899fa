"""With how many ranks a job that failed goes on."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.jobs import write_job
from weft.errors import RankFailure
from weft.job import Job
from weft.train.run import Resize, fitting


def job_of(folder: Path, **parallel: Any) -> Job:
    return Job.load(write_job(folder, plan={"parallel": parallel}))


def failure_of(rank: int | None) -> RankFailure:
    return RankFailure("it failed", rank=rank)


def test_the_plan_decides_how_many_fit(tmp_path: Path) -> None:
    job = job_of(tmp_path, tp=2)
    found = [fitting(job, ranks, 4) for ranks in (4, 3, 2)]
    assert [one and one[0] for one in found] == [4, 2, 2]
    assert fitting(job, 1, 4) is None
    fewer = fitting(job_of(tmp_path, dp_replicate=2, dp_shard=2), 3, 4)
    assert fewer is not None
    assert (fewer[0], fewer[1].plan.parallel.data_ranks) == (3, 3)


def test_a_rank_that_fails_twice_in_a_row_is_left_out(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    resize = Resize(job, 4, tmp_path / "resolved.toml")
    assert [resize(failure_of(rank), 4) for rank in (3, 2, 3)] == [4, 4, 4]
    assert resize(failure_of(3), 4) == 3
    assert Job.load(tmp_path / "resolved.toml").plan.parallel.dp_shard == 3
    assert [resize(failure_of(1), 3) for _ in range(2)] == [3, 2]
    assert [resize(failure_of(1), 2) for _ in range(2)] == [2, 1]
    assert [resize(failure_of(0), 1) for _ in range(2)] == [1, 1]  # there are no fewer


def test_hosts_that_fail_are_no_rank(tmp_path: Path) -> None:
    resize = Resize(job_of(tmp_path), 4, tmp_path / "resolved.toml")
    assert [resize(failure_of(None), 4) for _ in range(3)] == [4, 4, 4]


def test_a_lost_host_is_left_out_and_taken_back(tmp_path: Path) -> None:
    job = job_of(tmp_path, dp_replicate=2, dp_shard=2)
    resize = Resize(job, 4, tmp_path / "resolved.toml")
    for available, expected in ((2, (1, 2)), (4, (2, 2))):
        assert resize(failure_of(None), available) == available
        parallel = Job.load(tmp_path / "resolved.toml").plan.parallel
        assert (parallel.dp_replicate, parallel.dp_shard) == expected


def test_a_job_that_fits_no_more_ends(tmp_path: Path) -> None:
    resize = Resize(job_of(tmp_path, tp=2), 4, tmp_path / "resolved.toml")
    with pytest.raises(RankFailure, match="it failed"):
        resize(failure_of(None), 1)
