"""A job of 32 real ranks on this host: it loses a rank, starts again, saves, and is continued by 24 ranks."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.kill import Command, differences
from tests.lab.commands import start_weft
from tests.lab.families import family
from tests.lab.jobs import write_job
from weft.training.metrics import read_metrics

RANKS, FEWER, STEPS = 32, 24, 8
SECONDS = 600.0


def command(job: Path, out: Path, ranks: int, *options: str) -> Command:
    return Command(start_weft("train", str(job), "--nproc-per-node", str(ranks), "--out", str(out), *options))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    first, stride = np.arange(800).reshape(-1, 1), 1 + np.arange(800).reshape(-1, 1) % 7
    np.save(folder / "tokens.npy", ((first + stride * np.arange(33)) % 300).astype(np.uint16))
    return write_job(
        folder,
        model={"config": {**family("llama"), "vocab_size": 300}},
        data={"source": "tokens", "path": str(folder / "tokens.npy"), "held_out": 0.1},
        train={"steps": STEPS, "global_batch_size": 96, "micro_batch_size": 1},
        plan={"parallel": {"zero": 3}, "precision": {"param_dtype": "fp32"}},
        optimizer={"lr": 1e-2, "eps": 1e-3},
        checkpoint={"every": 2, "keep": 10},
    )


@pytest.fixture(scope="module")
def reference(job: Path) -> Path:
    """A run without faults."""
    out = job.parent / "reference"
    with command(job, out, RANKS) as running:
        assert running.wait(SECONDS) == 0, running.printed()
    return out


@pytest.mark.exclusive
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.slow("32 ranks on two cores")
def test_a_lost_rank_is_named_once_and_the_run_continues(job: Path, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with command(job, out, RANKS, "--max-restarts", "1") as running:
        os.kill(running.rank_at(17, 4).pid, signal.SIGKILL)
        assert running.wait(SECONDS) == 0, running.printed()
        errors = running.errors()
    assert [line for line in errors if "was killed by SIGKILL; " in line] == [
        line for line in errors if line.startswith("weft: rank 17 on ")
    ]
    assert len([line for line in errors if "rank 17" in line]) == 2  # named, and as the reason of the restart
    assert differences(reference, out) == []


@pytest.mark.exclusive
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.slow("32 ranks on two cores")
def test_fewer_ranks_continue(job: Path, reference: Path, tmp_path: Path) -> None:
    checkpoint = reference / "step-00000004"
    out = tmp_path / "run"
    with command(job, out, FEWER, "--resume", str(checkpoint)) as running:
        assert running.wait(SECONDS) == 0, running.printed()
    expected, found = (
        {row.step: row.loss for row in read_metrics(folder / "metrics.jsonl") if row.step > 4}
        for folder in (reference, out)
    )
    assert expected.keys() == found.keys()
    assert found == pytest.approx(expected, rel=1e-5)
