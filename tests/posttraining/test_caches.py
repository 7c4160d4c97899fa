"""Caches of jobs with a trainer: their keys have all that the values depend on."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.lab.pool import run_ranks
from tests.posttraining.conftest import PAIRS
from tests.posttraining.test_run import LAYOUTS, logs_of, train_on_rank
from weft.posttraining.job import Rows, TrainerJob
from weft.posttraining.rows import read_rows

KEPT_END = {"truncation_mode": "keep_end", "max_length": 64}


def job_of(model: Path, folder: Path, out: str, **options: Any) -> TrainerJob:
    rows = folder / "rows.jsonl"
    if not rows.exists():  # the library knows a file by its time
        named = [{**row, "prompt": f"{row['prompt']} {folder.name}"} for row in PAIRS[:8]]
        rows.write_text("".join(json.dumps(row) + "\n" for row in named))
    own = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "precompute_ref_log_probs": True}
    trainer = {"kind": "dpo", "options": {"save_strategy": "no", "logging_steps": 1, **own, **KEPT_END, **options}}
    tables = {"out": str(folder / out), "model": {"path": str(model)}, "data": {"path": str(rows)}, "trainer": trainer}
    return TrainerJob.model_validate({**tables, "plan": LAYOUTS["zero 2"][1].model_dump()})


@pytest.mark.parametrize("options", [{"max_length": 6}, {"ld_alpha": 0.3}], ids=str)
def test_precomputed_log_probabilities_are_those_of_the_options(
    options: dict[str, Any], small_model: Path, tmp_path: Path
) -> None:
    """At the first step the model is its reference: the margin is 0, and the loss that of a coin."""
    run_ranks(2, train_on_rank, job_of(small_model, tmp_path, "first"), None, timeout=120)
    run_ranks(2, train_on_rank, job_of(small_model, tmp_path, "second", **options), None, timeout=120)
    first = logs_of(tmp_path / "second")[0]
    assert (first["loss"], first["rewards/margins"]) == pytest.approx((math.log(2), 0), abs=1e-6)


def test_a_file_with_the_time_of_an_earlier_one_has_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in ("one", "two"):
        path.write_text(json.dumps({"prompt": f"{tmp_path} {text}"}) + "\n")
        os.utime(path, ns=(10**18, 10**18))
        assert read_rows(Rows(path=str(path)), 0)[0]["prompt"] == [f"{tmp_path} {text}"]
