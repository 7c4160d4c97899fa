"""End-to-end pipeline runs in the rank pool, compared with a run on one rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from tests.training.test_run import held_out_loss_of_the_export
from weft.job import Job
from weft.observe.report import write_report
from weft.training.metrics import read_evaluations, read_metrics

MODEL = {**family("llama"), "vocab_size": 300, "num_hidden_layers": 4, "tie_word_embeddings": True}
STEPS = {"steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "evaluate_every": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, plan
    "one rank": (1, {"parallel": {"zero": 0}}),
    "pp2": (2, {"parallel": {"pp": 2, "zero": 1}, "pipeline": {"schedule": "zb-h1"}}),
    "pp2 x dp2": (4, {"parallel": {"pp": 2, "zero": 3}, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}}),
    "pp2 x tp2": (4, {"parallel": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zbv", "virtual_stages": 2}}),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the run folder of a layout; each layout runs once."""
    folder, found = tmp_path_factory.mktemp("pipelines"), dict[str, Path]()

    def run(layout: str) -> Path:
        if layout not in found:
            ranks, plan = LAYOUTS[layout]
            settings = {"plan": {**plan, "precision": {"param_dtype": "fp32"}}, "optimizer": {"lr": 1e-2, "eps": 1e-3}}
            job = write_job(folder, train=STEPS, model={"config": MODEL}, **settings)
            found[layout] = train_in_the_pool(Job.load(job, [f"out={folder / layout}"]), ranks)[0]
        return found[layout]

    return run


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one rank"])
def test_pipeline_run_equals_a_run_on_one_rank(layout: str, run_of: Callable[[str], Path]) -> None:
    one, out = run_of("one rank"), run_of(layout)
    expected, rows = read_metrics(one / "metrics.jsonl"), read_metrics(out / "metrics.jsonl")
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=1e-5)
    assert [row.grad_norm for row in rows] == pytest.approx([row.grad_norm for row in expected], rel=1e-5)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    assert all(row.comm_bytes > 0 and not row.skipped for row in rows)
    evaluations = [read_evaluations(folder / "evaluations.jsonl") for folder in (out, one)]
    steps, losses = ([[getattr(e, key) for e in side] for side in evaluations] for key in ("step", "held_out_loss"))
    assert steps[0] == steps[1] == [0, 2, 3]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert held_out_loss_of_the_export(out) == pytest.approx(losses[1][-1], rel=1e-5)
    weights, those = (AutoModelForCausalLM.from_pretrained(folder / "export").state_dict() for folder in (out, one))
    assert weights.keys() == those.keys()
    for name, weight in those.items():
        assert (weights[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_summary_and_the_report(layout: str, run_of: Callable[[str], Path]) -> None:
    out = run_of(layout)
    summary = json.loads((out / "run.json").read_text())
    assert summary["world_size"] == LAYOUTS[layout][0]
    assert summary["sample"]
    measured, predicted = summary["memory"]["measured"], summary["memory"]["predicted"]
    # With zero 3, embedding and head stay gathered until the last backward, and a block may be prefetched.
    unit = 4 * 300 * 32 if LAYOUTS[layout][1]["parallel"].get("zero", 3) == 3 else 0
    for kind, size in predicted.items():
        spare = unit if kind.startswith("g") else 0
        assert size - 1000 <= measured[kind] <= size + spare + 1000, kind
    assert "bigram" in write_report(out).read_text()
