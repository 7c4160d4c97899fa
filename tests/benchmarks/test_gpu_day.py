"""The measurements for one and two accelerators run on the CPU too, with small models; stages that pass their time are cut."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
CASES = {
    "day": [
        "ceilings,attention,kernels,matmuls,profile",
        "baselines,dropout,experts,fp8",
        "fp8_casts,fp8_grouped,fp8_experts,codecs,chunks,parity,waits,snapshot,profile_experts,compiled,speed",
        "updates,memory,ring,fp8_losses",
        "loop",
        "killed_run",
    ],
    "pair": ["one_rank,zero_3", "zero_0,tp_sp,cp_ring,cp_ulysses,pp", "one_rank_experts,ep", "killed_rank"],
}
"""Stages that run in one process."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of benchmarks/gpu."""
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "stages"), [(script, part) for script, parts in CASES.items() for part in parts])
def test_stages_run_to_their_end(script: str, stages: str, tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    command = [sys.executable, str(GPU / f"{script}.py"), "--small", "--stages", stages, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    results = json.loads(out.read_text())
    for name in stages.split(","):
        assert results[name]["ended"] == "complete"
        assert results[name]["rows"]
        assert not any("error" in row and "system" in row for row in results[name]["rows"]), results[name]["rows"]


@pytest.mark.parametrize("script", CASES)
def test_every_stage_is_in_a_case_and_the_default_fits_its_limit(script: str, load: Callable[[str], Any]) -> None:
    module = load(script)
    assert sorted(module.STAGES) == sorted(",".join(CASES[script]).split(","))
    seconds = [stage.seconds for stage in module.STAGES.values() if stage.by_default]
    assert module.START_SECONDS + sum(seconds) <= module.LIMIT_SECONDS


def test_a_stage_that_passes_its_time_is_cut_and_keeps_its_rows(tmp_path: Path, load: Callable[[str], Any]) -> None:
    stages, bench = load("stages"), load("bench")
    written: list[dict[str, Any]] = []

    def endless(_: Any) -> Iterator[dict[str, Any]]:
        yield {"row": 1}
        yield {"row": 2}
        written.append(json.loads(out.read_text()))
        while True:
            with suppress(Exception):  # as stages do whose other rows still run
                time.sleep(60)

    def broken(_: Any) -> Iterator[dict[str, Any]]:
        yield {"row": 3}
        raise ValueError("broken")

    def whole(_: Any) -> list[dict[str, Any]]:
        return [{"row": 4}]

    table = {run.__name__: stages.Stage(run, 1, "") for run in (endless, broken, whole)}
    out, device = tmp_path / "folder" / "out.json", load("weft.device.detect").detect()
    failed = stages.run_stages(table, table, bench.Bench(device, torch.device("cpu"), True), out, timed=True)
    results = json.loads(out.read_text())
    assert failed == ["broken"]
    assert results["endless"] | {"seconds": 0} == {"rows": [{"row": 1}, {"row": 2}], "ended": "cut", "seconds": 0}
    assert results["broken"]["rows"] == [{"row": 3}]
    assert "ValueError: broken" in results["broken"]["ended"]
    assert results["whole"]["rows"] == [{"row": 4}]
    assert results["whole"]["ended"] == "complete"
    assert written[0]["endless"]["rows"] == [{"row": 1}, {"row": 2}]  # before the stage ended


def test_packed_rows_of_a_baseline_have_the_losses_of_masks(load: Callable[[str], Any]) -> None:
    systems = load("systems")
    cpu = torch.device("cpu")
    batches = [systems.random_batch(512, 2, 64, cpu, seed, document) for seed, document in ((0, 20), (1, 0))]
    losses = []
    for varlen in (False, True):
        trainer = systems.plain_trainer(systems.TINY["llama"], torch.float32, False, cpu, varlen=varlen)
        losses.append([trainer.step([batch]) for batch in batches * 2])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] < losses[0][0]


def test_mfu_of_packed_rows_counts_attention_inside_of_documents(load: Callable[[str], Any]) -> None:
    speed, systems = load("speed_stages"), load("systems")
    config = systems.TINY["llama"]
    width = config["num_attention_heads"] * config["head_dim"]
    full, halves = torch.arange(128), torch.arange(64).repeat(2)
    difference = speed.flops_per_token(config, full) - speed.flops_per_token(config, halves)
    assert difference == pytest.approx(6 * config["num_hidden_layers"] * width * 64)
