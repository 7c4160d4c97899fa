"""Frozen weights in 4 bits: adapters beside them, compared with PEFT and the same rounded weights in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.adapters import (
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
from weft.memory.nf4 import CODE
from weft.plan import Pipeline

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LLAMA: dict[str, Any] = {**family("llama"), **WIDE}
MIXTRAL: dict[str, Any] = {**family("mixtral"), **WIDE}


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The definition: each value of a block of 64 is the nearest number times the largest magnitude of the block."""
    blocks = values.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    code = torch.tensor(CODE)
    return (code[(blocks[..., None] / scales[..., None] - code).abs().argmin(-1)] * scales).view(values.shape)


def round_weights(model: Any) -> None:
    """Round the weights of linear layers of blocks, and of experts, but routers."""
    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim > 1 and ".gate.weight" not in name:
            parameter.data = nearest(parameter.data)


@pytest.mark.parametrize(
    "parallel",
    [
        {"zero": 0},
        {"zero": 1},
        {"zero": 2},
        {"zero": 3},
        {"cp": 2, "zero": 3},
        {"pp": 2},
        {"pp": 2, "zero": 3},
        {"tp": 2},
        {"tp": 2, "sp": True, "zero": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_parity(tmp_path: Path, kind: str, parallel: dict[str, Any]) -> None:
    folder = start_folder(tmp_path / "adapter", LLAMA, kind)
    expected = reference(LLAMA, folder, batches_for(LLAMA), round_weights)
    pipeline = Pipeline(schedule="1f1b") if "pp" in parallel else None
    plan = plan_for("fp32", pipeline, **parallel)
    plan = plan.model_copy(update={"precision": plan.precision.model_copy(update={"frozen_weights": "nf4"})})
    job = job_for(LLAMA, plan, Adapter(kind=kind, r=4, alpha=8, path=str(folder)))
    found = run_ranks(2, run_job, job, batches_for(LLAMA), 1, timeout=120)
    assert_adapter_parity(found, expected, pipeline="pp" in parallel)
    unquantized = reference(LLAMA, folder, batches_for(LLAMA))
    assert abs(unquantized.losses[0] - expected.losses[0]) > 1e-5  # rounding is visible
