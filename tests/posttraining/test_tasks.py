"""Tasks in jobs with a trainer: the scores are those of `weft eval` on the exported model, and training is unchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.stock import flat
from tests.evaluation.test_evaluation import assert_equal, evaluate_in_the_pool
from tests.lab.pool import run_ranks
from tests.posttraining.conftest import ROWS, experts_model, line
from tests.posttraining.test_run import FP32, job_of, logs_of, train_on_rank
from weft.errors import JobError
from weft.job import Adapter, Eval
from weft.plan import Parallel, Plan
from weft.posttraining.export import export_model
from weft.posttraining.job import TrainerJob
from weft.posttraining.report import write_report
from weft.posttraining.run import changes
from weft.posttraining.trainers import check_job
from weft.training.metrics import read_task_evaluations

Writer = Callable[[list[Any]], Path]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-0": (2, {"zero": 0}),
    "zero-2": (2, {"zero": 2}),
    "zero-3": (2, {"zero": 3}),
    "tp-2": (2, {"tp": 2}),
    "tp-2-without-sp": (2, {"tp": 2, "sp": False}),
    "cp-2": (2, {"cp": 2}),
    "ep-2": (2, {"ep": 2}),
    "tp-2-zero-3": (4, {"tp": 2, "zero": 3}),
}


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[str, ...]:
    """Paths of a multiple choice, which divides unevenly over two ranks, and of texts."""
    rows = {
        "facts": [{"prompt": f"Say {i} :", "choices": [line(i), line(i + 1)], "answer": i % 2} for i in range(7)],
        "texts": [{"text": f"Say {i} : {line(i)}"} for i in range(5)],
        "says": [{"prompt": "Say 1 :", "answer": line(1)}],
    }
    for name, records in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tuple(str(tmp_path / f"{name}.jsonl") for name in rows)


def with_tasks(job: TrainerJob, tasks: tuple[str, ...], **settings: Any) -> TrainerJob:
    return job.model_copy(update={"eval": Eval(tasks=tasks, **settings)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_exported_model(
    layout: str, small_model: Path, write_rows: Writer, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    (ranks, parallel), out = LAYOUTS[layout], tmp_path / "run"
    model = experts_model(tmp_path / "experts", small_model) if "ep" in parallel else small_model
    plan = Plan(parallel=Parallel(**parallel), precision=FP32)
    job = job_of("dpo", model, write_rows(ROWS["dpo"]), out, plan, learning_rate=3e-2)
    job = with_tasks(job, tasks[:2], every=2, batch_size=3)
    check_job(job, ranks)
    out.mkdir()
    (out / "job.toml").write_text(job.to_toml())
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    found = read_task_evaluations(out / "eval.jsonl")
    assert [evaluation.step for evaluation in found] == [0, 2, 3]
    exported = evaluate_in_the_pool(out / "export", tasks[:2], ranks=1)
    assert_equal(flat(found[-1].tasks), flat(exported.tasks))
    base = evaluate_in_the_pool(model, tasks[:2], ranks=1, out=tmp_path / "base.json")
    assert_equal(flat(found[0].tasks), flat(base.tasks))
    assert abs(found[0].values()["texts/bits_per_byte"] - found[-1].values()["texts/bits_per_byte"]) > 1e-2
    page = write_report(out).read_text()
    assert "<h2>Evaluation</h2>" in page
    assert "Values at step 3" in page
    printed = changes(out)
    assert "tasks       after step 0 -> after step 3" in printed
    assert any(text.startswith("  texts/bits_per_byte ") for text in printed)


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_training_is_bit_equal_with_and_without_tasks(
    kind: str, small_model: Path, write_rows: Writer, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    rows, plan = write_rows(ROWS[kind]), Plan(parallel=Parallel(zero=3), precision=FP32)
    for name, names in (("with", tasks[:2]), ("without", ())):
        job = job_of(kind, small_model, rows, tmp_path / name, plan, logging_steps=2)
        run_ranks(2, train_on_rank, with_tasks(job, names, every=1), None, timeout=120)
    assert logs_of(tmp_path / "with") == logs_of(tmp_path / "without")
    assert [row.step for row in read_task_evaluations(tmp_path / "with" / "eval.jsonl")] == [0, 1, 2, 3]
    assert not (tmp_path / "without" / "eval.jsonl").exists()


def test_scores_of_adapters_are_those_of_the_merged_model(
    small_model: Path, write_rows: Writer, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    out, plan = tmp_path / "run", Plan(parallel=Parallel(zero=3), precision=FP32)
    job = job_of("dpo", small_model, write_rows(ROWS["dpo"]), out, plan, learning_rate=3e-2)
    job = with_tasks(job.model_copy(update={"adapter": Adapter(kind="lora", r=4)}), tasks[:2], limit=4)
    out.mkdir()
    (out / "job.toml").write_text(job.to_toml())
    run_ranks(2, train_on_rank, job, None, timeout=120)
    (found,) = read_task_evaluations(out / "eval.jsonl")  # eval.every = 0: once, at the end
    assert found.step == 3
    assert found.tasks["facts"].n == 4
    assert changes(out)[-2].startswith("tasks       after step 3: facts/acc ")
    export_model(out, tmp_path / "merged", merge=True, dtype="fp32")
    merged = evaluate_in_the_pool(tmp_path / "merged", tasks[:2], ranks=1, limit=4)
    assert_equal(flat(found.tasks), flat(merged.tasks))


def test_a_resumed_run_evaluates_the_steps_that_are_left(
    small_model: Path, write_rows: Writer, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    saving, plan = {"save_strategy": "steps", "save_steps": 2}, Plan(parallel=Parallel(zero=2), precision=FP32)
    job = job_of("dpo", small_model, write_rows(ROWS["dpo"]), tmp_path / "run", plan, **saving)
    job = with_tasks(job, tasks[:1], every=1)
    run_ranks(2, train_on_rank, job, None, timeout=120)
    again = job.model_copy(update={"out": str(tmp_path / "again")})
    run_ranks(2, train_on_rank, again, str(tmp_path / "run" / "checkpoint-2"), timeout=120)
    whole, rest = (read_task_evaluations(tmp_path / name / "eval.jsonl") for name in ("run", "again"))
    assert [row.step for row in rest] == [3]
    assert rest[0] == whole[-1]


def test_tasks_that_cannot_be_evaluated_are_refused(
    small_model: Path, write_rows: Writer, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    job = job_of("dpo", small_model, write_rows(ROWS["dpo"]), tmp_path / "run", Plan())
    with pytest.raises(JobError, match="the task says generates text"):
        check_job(with_tasks(job, tasks), 2)
    with pytest.raises(JobError, match="there is no task capitols"):
        check_job(with_tasks(job, ("capitols",)), 2)
    (tmp_path / "job.toml").write_text(with_tasks(job, tasks).to_toml().replace('"dpo"', '"reward"'))
    with pytest.raises(JobError, match=r"trainer\.kind = reward with eval\.tasks"):
        TrainerJob.load(tmp_path / "job.toml")
