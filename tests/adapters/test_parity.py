"""Adapters of a job beside stock PEFT in one process: losses, all gradients of adapters, weights of three steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.adapters import (
    AdapterRecord,
    assert_adapter_parity,
    batches_for,
    job_for,
    reference,
    run_job,
    start_folder,
)
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.job import Adapter
from weft.plan import Pipeline

LLAMA: dict[str, Any] = family("llama")
Start = tuple[Path, AdapterRecord]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """Folder of an adapter to start from, and the training by stock PEFT, for each kind."""
    found = {}
    for kind in ("lora", "dora"):
        folder = start_folder(tmp_path_factory.mktemp(kind), LLAMA, kind)
        found[kind] = folder, reference(LLAMA, folder, batches_for(LLAMA))
    return found


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    "parallel",
    [{"zero": 0}, {"zero": 2}, {"zero": 3}, {"tp": 2}, {"tp": 2, "sp": False, "zero": 3}, {"cp": 2}, {"pp": 2}],
    ids=str,
)
def test_adapters_equal_those_of_peft(starts: dict[str, Start], kind: Any, parallel: dict[str, Any]) -> None:
    folder, expected = starts[kind]
    pipeline = Pipeline(schedule="1f1b") if "pp" in parallel else None
    job = job_for(LLAMA, plan_for("fp32", pipeline, **parallel), Adapter(kind=kind, r=4, alpha=8, path=str(folder)))
    found = run_ranks(2, run_job, job, batches_for(LLAMA), 1, timeout=120)
    assert_adapter_parity(found, expected, pipeline="pp" in parallel)
