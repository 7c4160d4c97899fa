"""Report of a run with a trainer."""

import json
from pathlib import Path

import pytest
import tomli_w

from weft.errors import DataError
from weft.posttraining.report import curves_of, read_history, write_report
from weft.training.metrics import format_seconds

HISTORY = [
    {"eval_loss": 0.7, "eval_rewards/margins": 0.0, "eval_runtime": 1.0, "step": 0},
    {"loss": 0.69, "grad_norm": 2.0, "learning_rate": 0.1, "logps/chosen": -3.0, "epoch": 0.5, "step": 1},
    {"loss": float("nan"), "grad_norm": 1.0, "learning_rate": 0.0, "logps/chosen": -2.5, "epoch": 1.0, "step": 2},
    {"eval_loss": 0.6, "eval_rewards/margins": 0.25, "eval_runtime": 1.0, "step": 2},
    {"train_runtime": 65.0, "train_loss": 0.66, "step": 2},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tables = {"model": {"path": "base"}, "data": {"path": "rows"}, "trainer": {"kind": "dpo"}, "out": str(tmp_path)}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY}))
    return tmp_path


def test_curves_have_steps_of_training_and_of_evaluations() -> None:
    curves = {curve.name: curve for curve in curves_of(HISTORY)}
    assert list(curves) == ["loss", "rewards/margins", "grad_norm", "logps/chosen"]
    assert curves["loss"].evaluation == [(0, 0.7), (2, 0.6)]
    assert [step for step, _ in curves["loss"].training] == [1, 2]
    assert curves["grad_norm"].points == [(1, 2.0), (2, 1.0)]


def test_the_page_has_figures_plots_and_job(run: Path) -> None:
    html = write_report(run).read_text()
    assert "This run is not complete" in html  # there is no model
    assert '<dd class="value">0.6</dd><dd class="note">evaluation, from 0.7</dd>' in html
    assert f"trained in {format_seconds(65.0)}" in html
    assert html.count("<figure") == 2
    assert "logps/chosen" in html
    assert "learning_rate" not in html
    assert "http" not in html.partition("</style>")[2].replace("http://www.w3.org", "")
    (run / "export").mkdir()
    assert "This run is not complete" not in write_report(run).read_text()


def test_an_interrupted_run_has_the_logs_of_its_newest_checkpoint(run: Path) -> None:
    (run / "checkpoint-2").mkdir()
    (run / "trainer_state.json").rename(run / "checkpoint-2" / "trainer_state.json")
    assert json.dumps(read_history(run)) == json.dumps(HISTORY)


@pytest.mark.parametrize("text", [None, "", "[1]", '{"log_history": '])
def test_missing_and_damaged_logs_are_refused(run: Path, text: str | None) -> None:
    (run / "trainer_state.json").unlink()
    if text is not None:
        (run / "trainer_state.json").write_text(text)
    with pytest.raises(DataError, match="no logs of a trainer"):
        write_report(run)
