"""Complete runs with unequal rows of data ranks: the losses of equal rows, resume under other rows, and bad input."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.plans import resolved
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest
from weft.data import RowSplit
from weft.data.row_split import proportional
from weft.errors import PlanError
from weft.job import Job
from weft.plan import Parallel, Plan, refuse_run_keys
from weft.training.job_checks import reason_against_rows
from weft.training.metrics import read_metrics
from weft.training.rebalance import new_rows
from weft.training.session import Session

FP64 = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
FP32 = {"param_dtype": "fp32"}
WITH_ROUTER_LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "vocab_size": 300}


def losses(out: Path) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in read_metrics(out / "metrics.jsonl")]


def job_with(
    folder: Path, rows: list[int], precision: dict[str, Any], rebalance: str = "off", **tables: dict[str, Any]
) -> Job:
    folder.mkdir(exist_ok=True)
    plan = {"precision": precision, "parallel": {"zero": 2, "rows_per_rank": rows, "rebalance": rebalance}}
    train = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 3, "evaluate_rows": 4, **tables.pop("train", {})}
    optimizer = {"warmup_steps": 0, "schedule": "constant"}
    return Job.load(write_job(folder, plan=plan, train=train, optimizer=optimizer, **tables))


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


def slow_rank(session: Session) -> None:
    """Fault: rank 1 needs 0.1 s more for each row."""
    if session.rank == 1:
        session.model.register_forward_pre_hook(
            lambda _, args, kwargs: time.sleep(0.1 * len(kwargs["input_ids"])), with_kwargs=True
        )


def test_rebalance_gives_a_slow_rank_fewer_rows_and_resumes_with_them(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"train": {"steps": 8, "global_batch_size": 16, "micro_batch_size": 8}}
    equal, _ = train_in_the_pool(job_with(tmp_path / "equal", [], FP64, **parts), 2)
    job = job_with(tmp_path / "own", [], FP64, rebalance="auto", checkpoint={"every": 4}, **parts)
    out, printed = train_in_the_pool(job, 2, fault=slow_rank)
    line = re.search(r"step 4: from now on the data ranks have (\d+), (\d+) rows", printed[0])
    assert line is not None
    first, second = map(int, line.groups())
    assert first + second == 16
    assert first > 1.5 * second
    assert read_manifest(folder_of(out, 4)).position.rows_per_rank == (first, second)
    assert [step.rows_per_rank for step in read_metrics(out / "metrics.jsonl")] == [(8, 8)] * 4 + [(first, second)] * 4
    # A resumed run has the rows of its checkpoint.
    resumed = job_with(tmp_path / "resumed", [], FP64, rebalance="auto", checkpoint={"every": 4}, **parts)
    again, _ = train_in_the_pool(resumed, 2, resume=str(folder_of(out, 4)), accept_changes=True)
    assert read_manifest(folder_of(again, 8)).position.rows_per_rank == (first, second)
    for expected, found in zip(losses(equal), losses(out), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    assert losses(again) == losses(out)[4:]


def test_new_rows_need_a_gain_and_a_row_for_each_micro_batch() -> None:
    assert new_rows(RowSplit(16, 8, 2, (8, 8)), [1.0, 3.0]) == (12, 4)
    assert new_rows(RowSplit(16, 8, 2, (12, 4)), [1.0, 1.02]) is None
    assert new_rows(RowSplit(16, 8, 2, (8, 8)), [1.0, 1.04]) is None
    assert new_rows(RowSplit(16, 1, 2, (8, 8)), [1.0, 3.0]) is None
    assert new_rows(RowSplit(16, 8, 2, (8, 8)), [1.0, 30.0]) == (14, 2)


@pytest.mark.parametrize(
    ("rows", "micro_batch", "fix"),
    [((6, 3), 4, r"rows_per_rank = \[6, 2\]"), ((7, 1), 2, "micro_batch_size to 7 or more")],
)
def test_rows_that_do_not_fit_the_job_are_refused(rows: tuple[int, ...], micro_batch: int, fix: str) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": micro_batch}
    plan = resolved(Plan(parallel=Parallel(rows_per_rank=rows)), 2)
    job = Job.parse({"model": {"path": "x"}, "train": train}).model_copy(update={"plan": plan})
    refusal = reason_against_rows(job)
    assert refusal is not None
    assert re.search(fix, refusal.fix)


def test_rebalance_without_checkpoints_is_refused() -> None:
    plan = resolved(Plan(parallel=Parallel(rebalance="auto")), 2)
    job = Job.parse({"model": {"path": "x"}}).model_copy(update={"plan": plan})
    refusal = reason_against_rows(job)
    assert refusal is not None
    assert "without checkpoints during the run" in refusal.what
    for table, change in (
        ("checkpoint", {"every": 4}),
        ("checkpoint", {"memory_every": 4}),
        ("train", {"profile_only": True}),
    ):
        changed = job.model_copy(update={table: getattr(job, table).model_copy(update=change)})
        assert reason_against_rows(changed) is None


@pytest.mark.must("refusal: rows_per_rank")
def test_rows_that_do_not_fit_the_plan_or_the_loop_are_refused() -> None:
    plan = Plan(parallel=Parallel(rows_per_rank=(3, 1)))
    with pytest.raises(PlanError, match="set 4 values"):
        resolved(plan, 4)
    with pytest.raises(PlanError, match="train with weft train"):
        refuse_run_keys(plan, "weft.prepare")


def test_rows_in_proportion_to_speeds() -> None:
    assert proportional(32, (3.0, 1.0)) == (24, 8)
    assert proportional(8, (1.0, 1.0, 1.0)) == (3, 3, 2)
    assert proportional(4, (100.0, 1.0, 1.0)) == (2, 1, 1)
    assert proportional(100, (0.331, 0.669)) == (33, 67)


def test_every_micro_batch_has_rows_of_all_ranks_in_proportion() -> None:
    split = RowSplit(16, 4, 2, (12, 4))
    assert [split.sizes(rank) for rank in (0, 1)] == [[4, 4, 4], [2, 1, 1]]
    assert split.micro_batches(1) == [(range(12, 14), 2), (range(14, 15), 1), (range(15, 16), 1)]
