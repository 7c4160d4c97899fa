"""World size of a restarted job."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.jobs import write_job
from weft.errors import RankFailure
from weft.job import Job
from weft.training.resize import Resize, fit_plan


def job_of(folder: Path, **parallel: Any) -> Job:
    return Job.load(write_job(folder, plan={"parallel": parallel}))


def failure_of(rank: int | None) -> RankFailure:
    return RankFailure("it failed", rank=rank)


def test_world_size_fits_the_plan(tmp_path: Path) -> None:
    job = job_of(tmp_path, tp=2)
    found = [fit_plan(job, ranks, 4) for ranks in (4, 3, 2)]
    assert [one and one[0] for one in found] == [4, 2, 2]
    assert fit_plan(job, 1, 4) is None
    fewer = fit_plan(job_of(tmp_path, dp_replicate=2, dp_shard=2), 3, 4)
    assert fewer is not None
    assert (fewer[0], fewer[1].plan.parallel.data_ranks) == (3, 3)


@pytest.mark.must("fault: The same rank fails twice in a row")
def test_rank_that_fails_twice_in_a_row_is_excluded(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    resize = Resize(job, 4, tmp_path / "resolved.toml")
    assert [resize(failure_of(rank), 4) for rank in (3, 2, 3)] == [4, 4, 4]
    assert resize(failure_of(3), 4) == 3
    assert Job.load(tmp_path / "resolved.toml").plan.parallel.dp_shard == 3
    assert [resize(failure_of(1), 3) for _ in range(2)] == [3, 2]
    assert [resize(failure_of(1), 2) for _ in range(2)] == [2, 1]
    assert [resize(failure_of(0), 1) for _ in range(2)] == [1, 1]  # a single rank cannot be excluded


def test_a_run_folder_that_cannot_be_written_is_named_when_ranks_are_excluded(tmp_path: Path) -> None:
    (tmp_path / "job.toml").mkdir()  # no file replaces a folder, also for root
    resize = Resize(job_of(tmp_path / "job.toml"), 4, tmp_path / "job.toml")
    assert resize(failure_of(3), 4) == 4  # the same job needs no write
    with pytest.raises(RankFailure, match=r"it failed\nthe job cannot continue with 3 ranks: .* cannot be written"):
        resize(failure_of(3), 4)


def test_failures_without_a_rank_exclude_no_rank(tmp_path: Path) -> None:
    resize = Resize(job_of(tmp_path), 4, tmp_path / "resolved.toml")
    assert [resize(failure_of(None), 4) for _ in range(3)] == [4, 4, 4]


def test_lost_host_is_excluded_and_readmitted(tmp_path: Path) -> None:
    job = job_of(tmp_path, dp_replicate=2, dp_shard=2)
    resize = Resize(job, 4, tmp_path / "resolved.toml")
    for available, expected in ((2, (1, 2)), (4, (2, 2))):
        assert resize(failure_of(None), available) == available
        parallel = Job.load(tmp_path / "resolved.toml").plan.parallel
        assert (parallel.dp_replicate, parallel.dp_shard) == expected


def test_job_fails_if_its_plan_fits_no_world_size(tmp_path: Path) -> None:
    resize = Resize(job_of(tmp_path, tp=2), 4, tmp_path / "resolved.toml")
    with pytest.raises(RankFailure, match="it failed"):
        resize(failure_of(None), 1)
