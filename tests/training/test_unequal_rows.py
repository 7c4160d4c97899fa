"""Complete runs with unequal rows of data ranks: the losses of equal rows, resume under other rows, and bad input."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from weft.data import RowSplit
from weft.data.row_split import proportional
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.plan import Parallel, Plan
from weft.training.job_checks import check_rows_per_rank
from weft.training.metrics import read_metrics

FP64 = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
FP32 = {"param_dtype": "fp32"}
WITH_ROUTER_LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "vocab_size": 300}


def losses(out: Path) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in read_metrics(out / "metrics.jsonl")]


def job_with(folder: Path, rows: list[int], precision: dict[str, Any], **tables: dict[str, Any]) -> Job:
    folder.mkdir(exist_ok=True)
    plan = {"precision": precision, "parallel": {"zero": 2, "rows_per_rank": rows}}
    train = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 3, "evaluate_rows": 4, **tables.pop("train", {})}
    optimizer = {"warmup_steps": 0, "schedule": "constant"}
    return Job.load(write_job(folder, plan=plan, train=train, optimizer=optimizer, **tables))


@pytest.mark.sweep
def test_losses_equal_those_of_equal_rows_with_router_losses(tmp_path: Path) -> None:
    model = {"config": {**family("mixtral"), **WITH_ROUTER_LOSSES}}
    found = []
    for name, rows in (("even", []), ("uneven", [5, 3])):
        job = job_with(tmp_path / name, rows, FP32, model=model, train={"router_z_loss": 0.01})
        out, _ = train_in_the_pool(job, 2)
        found.append(losses(out))
    for even, uneven in zip(*found, strict=True):
        assert uneven == pytest.approx(even, rel=1e-5)


def test_resume_under_other_rows_trains_on_the_same_rows(tmp_path: Path) -> None:
    whole, _ = train_in_the_pool(job_with(tmp_path / "whole", [6, 2], FP64), 2)
    first = job_with(tmp_path / "parts", [6, 2], FP64, train={"steps": 2}, checkpoint={"every": 2})
    train_in_the_pool(first, 2)
    second = job_with(tmp_path / "parts", [3, 5], FP64, checkpoint={"every": 2})
    parts, _ = train_in_the_pool(second, 2, resume="auto", accept_changes=True)
    for expected, found in zip(losses(whole), losses(parts), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "micro_batch", "fix"),
    [((6, 3), 4, r"rows_per_rank = \[6, 2\]"), ((7, 1), 2, "micro_batch_size to 7 or more")],
)
def test_rows_that_do_not_fit_the_job_are_refused(rows: tuple[int, ...], micro_batch: int, fix: str) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": micro_batch}
    plan = Plan(parallel=Parallel(rows_per_rank=rows)).resolve(2)
    job = Job.parse({"model": {"path": "x"}, "train": train}).model_copy(update={"plan": plan})
    with pytest.raises(JobError, match=fix):
        check_rows_per_rank(job)


def test_rows_that_do_not_fit_the_plan_or_the_loop_are_refused() -> None:
    plan = Plan(parallel=Parallel(rows_per_rank=(3, 1)))
    with pytest.raises(PlanError, match="set 4 values"):
        plan.resolve(4)
    with pytest.raises(PlanError, match="train with weft train"):
        plan.resolve_for_own_rows(2, "weft.prepare")


def test_rows_in_proportion_to_speeds() -> None:
    assert proportional(32, (3.0, 1.0)) == (24, 8)
    assert proportional(8, (1.0, 1.0, 1.0)) == (3, 3, 2)
    assert proportional(4, (100.0, 1.0, 1.0)) == (2, 1, 1)
    assert proportional(100, (0.331, 0.669)) == (33, 67)


def test_every_micro_batch_has_rows_of_all_ranks_in_proportion() -> None:
    split = RowSplit(16, 4, 2, (12, 4))
    assert [split.sizes(rank) for rank in (0, 1)] == [[4, 4, 4], [2, 1, 1]]
    assert split.micro_batches(1) == [(range(12, 14), 2), (range(14, 15), 1), (range(15, 16), 1)]
