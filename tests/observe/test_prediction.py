"""Comparison of prediction and measurement: only for the same micro-batch size, with marked errors."""

from pathlib import Path

import pytest

from tests.observe.run_folder import JOB, write_run
from weft.job import Job
from weft.observe.prediction import Comparison, compare, table_rows
from weft.observe.record import read_run
from weft.observe.report import write_report
from weft.observe.summary import print_summary
from weft.plan import Prediction


def job_with(seconds: float, micro_batch: int) -> Job:
    prediction = Prediction(
        cluster="2 CPU",
        micro_batch=micro_batch,
        step_seconds=seconds,
        terms={"compute": seconds},
        tokens_per_second=1.0,
        memory_bytes=1,
        memory={"parameters": 1},
        sent_bytes={"tp": 1_400_000, "dp_shard": 2_000_000},
    )
    return JOB.model_copy(update={"plan": JOB.plan.model_copy(update={"prediction": prediction})})


def test_prediction_is_compared_with_the_measurement(tmp_path: Path) -> None:
    run = write_run(tmp_path, job=job_with(1.03, JOB.train.micro_batch_size))
    lines = {line.name: line for line in compare(read_run(run))}
    assert not lines["step"].is_off  # steps take 1 to 1.1 s
    assert lines["sent over tp"].off == 0
    assert lines["sent over dp_shard"].off == pytest.approx(-0.5)  # half of the predicted bytes
    assert lines["sent over dp_shard"].is_off
    assert lines["memory"].is_off
    assert "Predicted and measured" in write_report(run).read_text(encoding="utf-8")


def test_prediction_for_another_micro_batch_size_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path / "other", job=job_with(1.0, JOB.train.micro_batch_size + 1))
    assert compare(read_run(other)) == []
    print_summary(other, tmp_path / "report.html")
    assert f"for train.micro_batch_size = {JOB.train.micro_batch_size + 1}" in capsys.readouterr().out
    assert compare(read_run(write_run(tmp_path / "none"))) == []


def test_table_rows() -> None:
    rows = table_rows([Comparison("step", "time", 2.0, 2.5), Comparison("sent over tp", "bytes", 0.0, 1e6)])
    assert rows == [("step", "2 s", "2.5 s", "+25.0% (off)"), ("sent over tp", "0 MB", "1 MB", "+inf% (off)")]
