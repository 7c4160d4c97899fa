"""Evaluation over ranks, of folders, runs and models in training, beside lm-eval alone in one process."""

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from tests.evaluation.stock import flat, stock_results, write_tasks
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import run_ranks, start_ranks
from tests.lab.runs import train_in_the_pool
from weft.cli.app import app
from weft.errors import CheckpointError, JobError, ModelError
from weft.evaluation import run as run_module
from weft.evaluation.language_model import divide
from weft.evaluation.rank import evaluate_settings
from weft.evaluation.results import ModelResults
from weft.evaluation.run import Settings, evaluate_model
from weft.evaluation.source import model_folder
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.observe.report import write_report
from weft.training.metrics import read_metrics, read_task_evaluations

SHARP = {"vocab_size": 300, "initializer_range": 0.3}  # logits far from zero, so that an error would show


def assert_equal(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> None:
    """Compare results; perplexities by their logarithms, which are mean log-likelihoods."""
    for task, values in expected.items():
        own = {name: value for name, value in found[task].items() if name in values}
        logs = [
            {name: math.log(value) if "perplexity" in name else value for name, value in side.items()}
            for side in (own, values)
        ]
        assert logs[0] == pytest.approx(logs[1], abs=1e-6, rel=1e-6), task
    assert found.keys() == expected.keys()


def evaluate_in_the_pool(*arguments: Any, ranks: int, **options: Any) -> ModelResults:
    """`evaluate_model` on ranks of the pool."""
    start_ranks(ranks)
    with in_the_pool():
        return evaluate_model(*arguments, ranks=ranks, **options)


@contextmanager
def in_the_pool() -> Iterator[None]:
    """Context in which `launch` runs on ranks of the pool."""
    with (
        mock.patch.object(run_module, "launch", _launch),
        mock.patch.object(run_module, "early_forkserver", return_value=nullcontext()),
    ):
        yield


def _launch(argv: list[str], *, ranks: int, **_: Any) -> None:
    run_ranks(ranks, run_rank, json.loads(Path(argv[-1]).read_text()), timeout=180)


def run_rank(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    with mock.patch("weft.evaluation.rank.connect", return_value=(rank, world_size, rank)):
        evaluate_settings(Settings(**settings), Heartbeat.open())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Run of four steps with checkpoints of steps 2 and 4, and tasks."""
    folder = tmp_path_factory.mktemp("trained")
    model = {"config": {**family("llama"), **SHARP}}
    path = write_job(folder, model=model, train={"steps": 4}, checkpoint={"every": 2, "keep": 0})
    job = Job.load(path, ["optimizer.lr=0.01"])
    return train_in_the_pool(job, 1)[0], write_tasks(folder)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_folder_gives_the_results_of_stock_lm_eval(ranks: int, trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    run, tasks = trained
    out = tmp_path / "eval.json"
    found = evaluate_in_the_pool(run / "export", tuple(tasks), ranks=ranks, batch_size=2, out=out)
    assert_equal(flat(found.tasks), stock_results(run / "export", tmp_path, "facts", "texts", "says"))
    assert found.step is None
    assert found.tasks["facts"].n == 7
    assert ModelResults.read(out) == found


def test_limit_and_checkpoint_of_a_step(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    run, tasks = trained
    options: dict[str, Any] = {"ranks": 2, "out": tmp_path / "eval.json", "limit": 5}
    newest = evaluate_in_the_pool(run, (tasks[1],), **options)
    assert (newest.step, newest.tasks["texts"].n) == (4, 5)
    assert_equal(flat(newest.tasks), stock_results(run / "export", tmp_path, "texts", limit=5))
    earlier = evaluate_in_the_pool(run, (tasks[1],), step=2, **options)
    assert earlier.step == 2
    with model_folder(run, 2) as (folder, _):
        assert_equal(flat(earlier.tasks), stock_results(folder, tmp_path, "texts", limit=5))
    assert flat(earlier.tasks) != flat(newest.tasks)
    assert not list(run.glob(".eval-*"))


def test_requests_of_one_text_stay_together_and_parts_are_balanced() -> None:
    texts = ["a long context " * 9, "b", "a long context " * 9, "c", "another context", "d"]
    parts = divide(texts, 2)
    assert parts == [[0, 1, 2, 5], [3, 4]]
    assert divide(texts, 1) == [list(range(6))]
    assert [part for part in divide(["x"], 3) if part] == [[0]]


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-0": (2, {"zero": 0}),
    "zero-3": (2, {"zero": 3}),
    "tp-2": (2, {"tp": 2}),
    "tp-2-zero-3": (4, {"tp": 2, "zero": 3}),
    "cp-2": (2, {"cp": 2}),
    "ep-2": (2, {"ep": 2}),
    "pp-2": (2, {"pp": 2}),
    "pp-2-tp-2": (4, {"pp": 2, "tp": 2}),
    "pp-2-zero-2": (4, {"pp": 2, "zero": 2}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_model_in_training_gives_the_results_of_stock_lm_eval_on_its_export(plan: str, tmp_path: Path) -> None:
    ranks, parallel = PLANS[plan]
    facts, texts, _ = write_tasks(tmp_path)
    config = {**family("qwen3_moe" if "ep" in parallel else "llama"), **SHARP}
    job = write_job(
        tmp_path,
        model={"config": config},
        train={"steps": 2, "micro_batch_size": 1},
        optimizer={"lr": 0.01},
        eval={"tasks": [facts, texts], "every": 1, "batch_size": 3},
        plan={"parallel": parallel},
    )
    out, _ = train_in_the_pool(Job.load(job), ranks)
    found = read_task_evaluations(out / "eval.jsonl")
    assert [evaluation.step for evaluation in found] == [0, 1, 2]
    assert_equal(flat(found[-1].tasks), stock_results(out / "export", tmp_path, "facts", "texts"))
    assert flat(found[0].tasks) != flat(found[-1].tasks)
    page = write_report(out).read_text()
    assert "<h2>Evaluation</h2>" in page
    assert "texts/" not in page
    assert "word_perplexity" in page


def test_training_is_bit_equal_with_and_without_evaluation(tmp_path: Path) -> None:
    facts, _, _ = write_tasks(tmp_path)
    model = {"attention_dropout": 0.1}
    rows = []
    for name, tasks in (("with", [facts]), ("without", [])):
        path = write_job(tmp_path, train={"steps": 3}, eval={"tasks": tasks, "every": 1})
        job = Job.load(path, [f"out={tmp_path / name}"])
        config = {**job.model.config, **model}  # type: ignore[dict-item]
        job = job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
        rows.append([(row.loss, row.grad_norm) for row in read_metrics(train_in_the_pool(job, 2)[0] / "metrics.jsonl")])
    assert rows[0] == rows[1]
    assert not (tmp_path / "without" / "eval.jsonl").exists()


def test_random_state_of_the_caller_is_kept(trained: tuple[Path, list[str]]) -> None:
    from weft.evaluation.tasks import seeded

    random.seed(7), torch.manual_seed(7)
    before = random.getstate(), torch.get_rng_state()
    with seeded():
        random.random(), torch.rand(1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_task_that_generates_is_refused_during_training(tmp_path: Path) -> None:
    says = write_tasks(tmp_path)[2]
    job = Job.load(write_job(tmp_path, eval={"tasks": [says]}))
    with pytest.raises(JobError, match="the task says generates text") as caught:
        train_in_the_pool(job, 1)
    assert "weft eval" in str(caught.value.fix)
    assert not (tmp_path / "run").exists()


def test_missing_folders_steps_and_tokenizers_are_refused(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    run, tasks = trained
    evaluate = partial(evaluate_in_the_pool, tasks=tuple(tasks[:1]), ranks=1, out=tmp_path / "eval.json")
    with pytest.raises(CheckpointError, match="is no run folder and no model folder"):
        evaluate(tmp_path)
    with pytest.raises(CheckpointError, match="is no run folder"):
        evaluate(run / "export", step=2)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3") as caught:
        evaluate(run, step=3)
    assert "4, 2" in str(caught.value.rule)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((run / "export" / "config.json").read_text())
    with pytest.raises(ModelError, match="there is no tokenizer"):
        evaluate(tmp_path / "bare")


@pytest.mark.must("command: eval")
@pytest.mark.must("format: results of evaluation, eval.json")
def test_command_writes_eval_json_and_the_report_shows_it(trained: tuple[Path, list[str]]) -> None:
    run, tasks = trained
    start_ranks(2)
    with in_the_pool():
        result = CliRunner().invoke(app, ["eval", str(run), "--tasks", ",".join(tasks[:2]), "--nproc-per-node", "2"])
    assert result.exit_code == 0, result.output
    assert "acc_norm" in result.output
    written = ModelResults.read(run / "eval.json")
    assert (written.step, list(written.tasks)) == (4, ["facts", "texts"])
    assert written.versions.keys() == {"weft", "lm_eval", "torch", "transformers"}
    assert "Step 4, evaluated with lm-eval" in write_report(run).read_text()
