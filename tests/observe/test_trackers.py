"""Experiment trackers: the values of a run in the files that each library writes without a server."""

import json
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from weft.errors import JobError
from weft.job import Job
from weft.observe import trackers
from weft.training.functions import Callback
from weft.training.metrics import Evaluation, StepMetrics

JOB = {"model": {"config": {"model_type": "llama"}}, "optimizer": {"lr": 0.25}, "out": "runs/a-name"}


def follow(name: str) -> None:
    """Follow a run of two steps and an evaluation."""
    callback = Callback.load(f"weft.observe.trackers:{name}", Job.parse(JOB))
    for step in (1, 2):
        callback.step(StepMetrics(step, 3.5 - step, 1.0, 0.1, 64, 0.5, 128.0, None, 2**20, 7, 1.0, False))
        callback.evaluation(Evaluation(step, 4.5 - step))
    callback.checkpoint(Path("step-00000002"))
    callback.end(Path("runs/a-name"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    follow("mlflow")
    (losses,) = (tmp_path / "mlruns").rglob("metrics/loss")
    assert [line.split()[1:3] for line in losses.read_text().splitlines()] == [["2.5", "1"], ["1.5", "2"]]
    run = losses.parents[1]
    assert (run / "metrics/held_out_loss").read_text().split()[1] == "3.5"
    assert not (run / "metrics/mfu").exists()
    assert (run / "params/optimizer.lr").read_text() == "0.25"
    assert (run / "tags/mlflow.runName").read_text() == "a-name"


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read by its import
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # TRL may have imported it in an earlier test
    follow("trackio")
    rows = rows_of(next(tmp_path.glob("*.db")))
    assert [json.loads(row)["loss"] for row in rows if "loss" in json.loads(row)] == [2.5, 1.5]


def rows_of(file: Path) -> list[str]:
    with sqlite3.connect(file) as database:
        return [row for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    follow("wandb")
    (file,) = tmp_path.rglob("run-*.wandb")
    deadline = time.monotonic() + 30
    for words in (b"held_out_loss", b"tokens_per_second", b"optimizer.lr", b"a-name"):
        while words not in file.read_bytes():  # another process writes it
            assert time.monotonic() < deadline, words
            time.sleep(0.05)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match=f"{name} cannot be imported") as caught:
        getattr(trackers, name)(Job.parse(JOB))
    assert caught.value.fix == f'pip install "weft-train[{name}]"'
