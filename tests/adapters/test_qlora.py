"""QLoRA: adapters beside weights that torchao has quantized, compared with the same weights and PEFT in one process.

torchao is not installed with the tools of development, because Transformers imports it at every start where it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.adapters import (
    assert_adapter_parity,
    batches_for,
    job_for,
    reference,
    run_job,
    start_folder,
)
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from tests.lab.runs import train_in_the_pool
from weft.errors import JobError
from weft.job import Adapter, Job
from weft.plan import Pipeline

pytest.importorskip("torchao", reason='pip install "weft-train[qlora]"')
LLAMA: dict[str, Any] = family("llama")


def quantize(model: Any) -> None:
    """Quantize all linear layers of the blocks with torchao, as stock PEFT expects it."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model.layers, Int8WeightOnlyConfig())


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"cp": 2, "zero": 2}, {"pp": 2}], ids=str)
def test_qlora_equals_peft_on_the_same_quantized_weights(tmp_path: Path, parallel: dict[str, Any]) -> None:
    folder = start_folder(tmp_path / "adapter", LLAMA, "lora")
    expected = reference(LLAMA, folder, batches_for(LLAMA), quantize)
    pipeline = Pipeline(schedule="1f1b") if "pp" in parallel else None
    job = job_for(LLAMA, plan_for("fp32", pipeline, **parallel), Adapter(kind="qlora", r=4, alpha=8, path=str(folder)))
    found = run_ranks(2, run_job, job, batches_for(LLAMA), 1, timeout=120)
    assert_adapter_parity(found, expected, pipeline="pp" in parallel)
    unquantized = reference(LLAMA, folder, batches_for(LLAMA))
    assert abs(unquantized.losses[0] - expected.losses[0]) > 1e-5  # quantization is visible


def test_a_run_holds_int8_weights_and_resumes(tmp_path: Path) -> None:
    constant = {"schedule": "constant", "warmup_steps": 0}
    settings = {"adapter": {"kind": "qlora", "r": 4}, "checkpoint": {"every": 1}, "optimizer": constant}
    job = Job.load(write_job(tmp_path, **settings, plan={"parallel": {"zero": 2}}))
    out, _ = train_in_the_pool(job, 2)
    memory = json.loads((out / "run.json").read_text())["memory"]
    assert memory["measured"]["parameters"] == memory["predicted"]["parameters"]
    assert memory["measured"]["optimizer"] == memory["predicted"]["optimizer"]
    longer = job.model_copy(update={"train": job.train.model_copy(update={"steps": 3})})
    train_in_the_pool(longer, 2, resume="auto")
    assert json.loads((out / "run.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"plan": {"parallel": {"zero": 3}}}, "plan.parallel.zero = 3"),
        ({"plan": {"parallel": {"tp": 2, "zero": 2}}}, "plan.parallel.tp = 2"),
        (
            {"plan": {"parallel": {"zero": 2}, "precision": {"weights": "split", "param_dtype": "bf16"}}},
            "weights = 'split'",
        ),
        ({"guard": {"sdc_check_interval": 1}, "plan": {"parallel": {"zero": 0}}}, "guard.sdc_check_interval = 1"),
    ],
)
def test_plans_that_qlora_does_not_support_are_refused(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    job = Job.load(write_job(tmp_path, adapter={"kind": "qlora"}, **settings))
    with pytest.raises(JobError) as caught:
        train_in_the_pool(job, 2)
    assert key in str(caught.value)
    assert not (tmp_path / "run").exists()
