"""Checkpoints are independent of the layout: any layout loads them, and saves them again bitwise equal."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.checkpoints import tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint.folders import folder_of
from weft.job import Model

TWO_STAGES = {"num_hidden_layers": 4, "tie_word_embeddings": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 0}),
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 3": (4, {"zero": 3}),
    "three ranks, uneven": (3, {"zero": 3}),
    "hsdp": (4, {"zero": 3, "dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "tp x dp": (4, {"tp": 2, "zero": 3}),
    "tp x dp, zero 1": (4, {"tp": 2, "zero": 1}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "pp x dp": (4, {"pp": 2, "zero": 3}),
    "pp x tp": (4, {"pp": 2, "tp": 2}),
    "ep": (2, {"ep": 2}),
    "ep, zero 1": (4, {"ep": 2, "zero": 1}),
    "ep x tp": (4, {"ep": 2, "tp": 2}),
    "ep x etp": (4, {"ep": 2, "etp": 2, "zero": 1}),
    "ep x etp, zero 3": (8, {"ep": 2, "etp": 2, "tp": 2, "zero": 3}),
}
PLAIN = [name for name in LAYOUTS if "ep" not in name]
# family: (configuration changes, supported layouts)
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (TWO_STAGES, PLAIN),
    "phi3": ({}, ["one rank", "zero 3", "tp", "tp x dp", "tp x dp, zero 1"]),  # packed projections
    "gpt2": ({}, ["one rank", "tp x dp", "pp x tp", "zero 1"]),  # packed, with biases
    "qwen3_moe": ({}, ["one rank", "zero 3", "ep", "ep, zero 1", "ep x etp", "ep x tp", "pp x dp"]),
    # Three experts on two or four ranks: the experts are sharded along another dim than the first.
    "mixtral": ({"num_local_experts": 3}, ["one rank", "zero 3", "tp x dp", "hsdp", "three ranks, uneven", "pp x dp"]),
    "gpt_oss": ({}, ["one rank", "ep x tp", "ep x etp, zero 3", "tp", "ep x etp"]),
}


def _source(name: str) -> Model:
    return Model(config={**family(name), **MODELS[name][0]})


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_loads_checkpoints_of_other_layouts_bit_equal(name: str, tmp_path: Path) -> None:
    source, layouts = _source(name), MODELS[name][1]
    before: Path | None = None
    for layout in [*layouts, layouts[0]]:
        ranks, degrees = LAYOUTS[layout]
        run = tmp_path / layout.replace(" ", "-")
        plan, steps = plan_for("fp32", **degrees), (0, 0) if before else (0, 2)
        weights = run_ranks(ranks, train_and_save, source, plan, run, steps, before)[0]
        folder = folder_of(run, steps[1])
        found = tensors_of(folder)
        if before:
            again = tensors_of(before)
            assert found.keys() == again.keys()
            for key, tensor in again.items():
                assert torch.equal(found[key], tensor), f"{layout}: {key}"
        assert any(key.startswith("exp_avg/") for key in found)
        for key, tensor in weights.items():
            if f"weights/{key}" in found:
                assert torch.equal(found[f"weights/{key}"], tensor), f"{layout}: {key}"
        before = folder
