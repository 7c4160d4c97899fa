"""Runs of a Mixture-of-Experts model with joint lanes and replicas: the losses of the plain run, also after a resume."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.plans import resolved_job
from tests.lab.runs import train_in_the_pool
from weft.device.cpu import Cpu
from weft.job import Job
from weft.training.metrics import read_metrics
from weft.training.startup import explain_joint_experts

EVERYTHING = {
    "parallel": {"zero": 2, "ep": 2, "expert_balance": "replicate"},
    "comm": {"expert_overlap": "joint"},
    "memory": {"recompute": ["mlp"]},
}
PLAIN = {"parallel": {"zero": 2, "ep": 2}}


def job_of(folder: Path, plan: dict[str, Any], steps: int, **tables: Any) -> Job:
    folder.mkdir(exist_ok=True)
    config = {**family("deepseek_v3"), "vocab_size": 300, "first_k_dense_replace": 0}
    train = {"steps": steps, "global_batch_size": 8, "micro_batch_size": 1, "router_bias_rate": 0.001}
    plan = {**plan, "precision": {"param_dtype": "fp32"}}
    return Job.load(write_job(folder, model={"config": config}, train=train, plan=plan, **tables))


def losses_of(out: Path) -> list[float]:
    return [row.loss for row in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize("steps", [6, pytest.param(200, marks=pytest.mark.slow("two runs of 200 steps"))])
def test_everything_on_equals_everything_off(steps: int, tmp_path: Path) -> None:
    plain, _ = train_in_the_pool(job_of(tmp_path / "plain", PLAIN, steps), 2)
    full, printed = train_in_the_pool(job_of(tmp_path / "full", EVERYTHING, steps), 2)
    assert len(losses_of(plain)) == steps
    assert losses_of(full) == pytest.approx(losses_of(plain), rel=1e-5 if steps < 100 else 1e-3)
    assert printed


def test_a_resumed_run_has_the_losses_of_one_run(tmp_path: Path) -> None:
    whole, _ = train_in_the_pool(job_of(tmp_path / "whole", EVERYTHING, 6), 2)
    checkpoint = {"every": 3, "keep": 0}
    first, _ = train_in_the_pool(job_of(tmp_path / "first", EVERYTHING, 6, checkpoint=checkpoint), 2)
    resumed, _ = train_in_the_pool(
        job_of(tmp_path / "second", EVERYTHING, 6), 2, resume=str(first / "step-00000003"), accept_changes=True
    )
    assert losses_of(resumed)[-3:] == losses_of(whole)[3:]


def test_joint_says_why_it_gains_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path, EVERYTHING, 6)
    job = resolved_job(job, 2)
    device = Cpu().type
    assert "shared memory" in explain_joint_experts(job, device, 1)[0]
    assert explain_joint_experts(job, device, 2) == []
    assert explain_joint_experts(job, "cuda", 1) == []
    one = job.model_copy(update={"train": job.train.model_copy(update={"micro_batch_size": 8})})
    assert "1 micro-batch" in explain_joint_experts(one, "cuda", 2)[0]
    assert explain_joint_experts(job_of(tmp_path, PLAIN, 6), device, 1) == []
