"""Runs with compressed gradients: resuming under the same and under another layout, and bytes in the metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.checkpoints import tensors_of
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest
from weft.job import Job
from weft.training.metrics import read_metrics

STEPS = 12
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 3": (2, {"zero": 3}),
    "hsdp": (4, {"zero": 2, "dp_replicate": 2}),
    "tp": (4, {"zero": 0, "tp": 2}),
}


def job_of(folder: Path, compression: str, layout: str, out: str = "run", **tables: dict[str, Any]) -> tuple[Job, int]:
    ranks, parallel = LAYOUTS[layout]
    comm = {} if compression == "none" else {"compression": compression}
    settings: dict[str, dict[str, Any]] = {
        "model": {"config": {**family("llama"), "vocab_size": 300}},
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-2, "eps": 1e-3, "warmup_steps": 2},
        "plan": {"parallel": parallel, "precision": {"param_dtype": "fp32"}, "comm": comm},
        "checkpoint": {"every": 6},
    }
    if compression == "1-bit":
        settings["optimizer"] |= {"name": "onebit-adam", "freeze_steps": 3}
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return Job.load(write_job(folder, **settings), [f"out={folder / out}"]), ranks


WholeRun = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """Function that returns the folder of an uninterrupted run with a compression and a layout, trained once."""
    found: dict[tuple[str, str], Path] = {}

    def trained(compression: str, layout: str) -> Path:
        if (compression, layout) not in found:
            job, ranks = job_of(tmp_path_factory.mktemp("whole"), compression, layout)
            found[compression, layout], _ = train_in_the_pool(job, ranks)
        return found[compression, layout]

    return trained


def losses_of(out: Path) -> list[float]:
    return [row.loss for row in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("compression", "layout"), [("2:4", "zero 0"), ("int8", "zero 3"), ("1-bit", "zero 3"), ("1-bit", "hsdp")]
)
def test_resumed_run_is_bit_equal(compression: str, layout: str, whole_run: WholeRun, tmp_path: Path) -> None:
    whole, ranks = whole_run(compression, layout), LAYOUTS[layout][0]
    manifest = read_manifest(folder_of(whole, 6))
    kept = [name for name in manifest.tensors if name.startswith("feedback/")]
    assert {name.split("/")[1] for name in kept} == {f"{rank:05d}" for rank in range(ranks)}
    assert any("/momentum/" in name for name in kept) == (compression == "1-bit")
    again, printed = train_in_the_pool(
        job_of(tmp_path, compression, layout, "again")[0], ranks, resume=str(folder_of(whole, 6))
    )
    assert losses_of(again) == losses_of(whole)[6:]
    assert "begins at zero" not in "".join(printed)
    found, expected = tensors_of(folder_of(again, STEPS)), tensors_of(folder_of(whole, STEPS))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("compression", "before", "after"),
    [("2:4", "zero 0", "zero 3"), ("1-bit", "zero 3", "zero 0"), ("1-bit", "hsdp", "tp")],
)
def test_error_feedback_is_reset_under_another_layout(
    compression: str, before: str, after: str, whole_run: WholeRun, tmp_path: Path
) -> None:
    whole = whole_run(compression, before)
    job, ranks = job_of(tmp_path, compression, after, "again")
    again, printed = train_in_the_pool(job, ranks, resume=str(folder_of(whole, 6)))
    assert "".join(printed).count("error feedback is reset") == 1
    found, expected = losses_of(again), losses_of(whole)[6:]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)  # the loss of equal weights
    assert found[-1] == pytest.approx(expected[-1], rel=0.03)


def test_momentum_is_carried_over_to_another_layout(tmp_path: Path) -> None:
    job, ranks = job_of(tmp_path, "1-bit", "zero 3", train={"steps": 6})
    whole, _ = train_in_the_pool(job, ranks)
    before = tensors_of(folder_of(whole, 6))
    job, ranks = job_of(tmp_path, "1-bit", "zero 0", "again", train={"steps": 7}, optimizer={"lr": 1e-9})
    again, _ = train_in_the_pool(job, ranks, resume=str(folder_of(whole, 6)), accept_changes=True)
    after = tensors_of(folder_of(again, 7))
    names = [name for name in before if name.startswith("exp_avg/")]
    assert any(not torch.equal(before[name], before[name.replace("exp_avg", "carried")]) for name in names)
    for name in names:  # the earlier value after one decay
        carried = after[name.replace("exp_avg", "carried")]
        torch.testing.assert_close(carried, 0.9 * before[name], rtol=1e-6, atol=0)


def test_bytes_in_the_metrics(tmp_path: Path) -> None:
    sent = {}
    for compression in ("none", "2:4"):
        job, ranks = job_of(tmp_path, compression, "zero 0", compression, train={"steps": 1}, checkpoint={"every": 0})
        out, _ = train_in_the_pool(job, ranks)
        sent[compression] = read_metrics(out / "metrics.jsonl")[0].comm_bytes
    assert sent["2:4"] < 0.3 * sent["none"]
