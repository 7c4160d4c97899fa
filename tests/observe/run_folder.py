"""Synthetic run folder, written with `MetricsWriter` like that of a training run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from weft.job import Job
from weft.training.metrics import Evaluation, MetricsWriter, StepMetrics
from weft.training.run_folder import RUN_ID

FACTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "parameters": 30_532_122_624,
    "active_parameters": 3_345_000_000,
    "world_size": 8,
    "device": "cpu",
    "seconds": 812.4,
    "environment": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0", "host": "node-07"},
    "memory": {
        "measured": {
            "parameters": 1.91e9,
            "gathered parameters": 0.62e9,
            "gradients": 1.93e9,
            "optimizer": 3.82e9,
            "activations": 2.7e9,
        },
        "predicted": {
            "parameters": 1.91e9,
            "gathered parameters": 0.60e9,
            "gradients": 1.91e9,
            "optimizer": 3.82e9,
            "activations": 2.4e9,
        },
    },
    "baselines": {"unigram": 6.214, "bigram": 4.387},
    "anatomy": {"embedding": "model.embed_tokens", "blocks": [f"model.layers.{i}" for i in range(24)], "experts": 3072},
    "sample": "def read_lines(path):\n    return [line.strip() for line in path.open()]",
}
POOL = {"requested": 4 * 2**30, "reused": 3 * 2**30, "live": 0, "peak": 2**30, "held": 2**30}
COMM = {
    "tp": {"bytes": 1_400_000, "messages": 96, "exposed_seconds": 0.05, "hidden_seconds": 0.0},
    "dp_shard between": {"bytes": 1_000_000, "messages": 25, "exposed_seconds": 0.1, "hidden_seconds": 0.3},
}
JOB = Job.parse({"model": {"config": {"model_type": "qwen3_moe", "num_hidden_layers": 24}}, "train": {"steps": 400}})


def write_run(folder: Path, *, steps: int = 400, facts: dict[str, Any] | None = None, job: Job = JOB) -> Path:
    """Write a run of `steps` steps: step 37 is skipped, with an evaluation every 50 steps, job.toml and run.json."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_ID).write_text("of a test")
    with MetricsWriter(folder) as writer:
        for step in range(1, steps + 1):
            loss = 3.1 + 5.4 * math.exp(-step / 60) + 0.09 * float(draw.standard_normal())
            seconds = (2.9 if step == 1 else 1.0) + 0.04 * abs(float(draw.standard_normal()))
            skipped = step == 37
            writer.step(
                StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=math.inf if skipped else 0.4 + 6 * math.exp(-step / 30) * float(draw.uniform(0.7, 1.3)),
                    learning_rate=3e-4 * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
                    tokens=65_536,
                    step_seconds=seconds,
                    tokens_per_second=65_536 / seconds,
                    mfu=0.412 / seconds,
                    peak_memory_bytes=11_800_000_000,
                    comm_bytes=2_400_000,
                    loss_scale=65536.0 if step < 37 else 32768.0,
                    skipped=skipped,
                    overflowed=(1,) if skipped else (),
                    peak={"parameters": 2**30, "activations: mlp": 2**31} if step == 2 else None,
                    peak_operation="aten.mm in mlp" if step == 2 else None,
                    comm=COMM,
                    pools={"activations": POOL},
                )
            )
            if step % 50 == 0:
                writer.evaluation(Evaluation(step, 3.2 + 5.2 * math.exp(-step / 60)))
    (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(FACTS if facts is None else facts), encoding="utf-8")
    return folder
