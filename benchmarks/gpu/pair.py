"""Axes over two accelerators through `weft train`, a killed rank and a resumed run: 300 seconds.

    python benchmarks/gpu/pair.py            # two accelerators
    python benchmarks/gpu/pair.py --small    # two CPU ranks with gloo, and small models

Each stage trains a small model on two ranks, and compares losses and gradient norms with the same job on one rank. It fails if
a step differs by more than the tolerance of its dtype. Rows are written as in day.py, and a stage that passes its seconds is
cut. All seconds are estimates: no stage has run on cards.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bench, Rows
from stages import Stage, parse, require_accelerator, run_stages
from systems import TINY

from weft.checkpoint.folders import list_checkpoints, step_of
from weft.device.detect import detect
from weft.errors import RankFailure
from weft.job import Job
from weft.planner.train import train
from weft.training.metrics import StepMetrics, read_metrics

START_SECONDS = 20
LIMIT_SECONDS = 300
WIDER = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "head_dim": 128,
    "moe_intermediate_size": 704,
}
"""Sizes on an accelerator, about 100 million parameters."""
STEPS, SMALL_STEPS = 30, 6
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-3}
"""Largest difference of a loss; ten times as much for gradient norms."""


@dataclass
class Pair(Bench):
    """Two devices, and the steps of one rank that the axes are compared with, by model."""

    folder: Path = Path()
    one_rank: dict[str, list[StepMetrics]] = field(default_factory=dict)


class Die:
    """Callback of the killed run, on rank 0."""

    def __init__(self, job: Any):
        self.last = job.train.steps - 1

    def on_step(self, metrics: Any) -> None:
        """Kill this rank before the last step."""
        if metrics.step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def job_of(bench: Pair, model: str, name: str, **parallel: Any) -> Job:
    """Job of a model under a plan; runs of one name have one folder."""
    config, steps, seq_len = {**TINY[model], "vocab_size": 2048}, SMALL_STEPS, 128
    if not bench.small:
        config, steps, seq_len = config | WIDER, STEPS, 1024
    return Job.parse(
        {
            "model": {"config": config},
            "data": {"source": "python", "vocab_size": 2048, "seq_len": seq_len},
            "optimizer": {"lr": 1e-3},
            "train": {
                "steps": steps,
                "global_batch_size": 4,
                "micro_batch_size": 1,
                "evaluate_every": 0,
                "evaluate_rows": 4,
            },
            "plan": {"parallel": parallel, "precision": {"param_dtype": "fp32" if bench.small else "bf16"}},
            "out": str(bench.folder / name),
        }
    )


def steps_of(job: Job, ranks: int, **options: Any) -> list[StepMetrics]:
    """Steps of a job that is trained."""
    return read_metrics(train(job, ranks=ranks, log=lambda line: None, **options) / "metrics.jsonl")


def one_rank(bench: Pair, model: str) -> list[StepMetrics]:
    """Steps of one rank, trained once for each model."""
    if model not in bench.one_rank:
        bench.one_rank[model] = steps_of(job_of(bench, model, model, zero=0), 1)
    return bench.one_rank[model]


def reference(model: str, bench: Pair) -> Rows:
    """The job on one rank."""
    yield summary(one_rank(bench, model))


def axis(name: str, model: str, parallel: dict[str, Any], bench: Pair) -> Rows:
    """The job over two ranks."""
    yield from compare(bench, steps_of(job_of(bench, model, name, **parallel), 2), model)


def killed_rank(bench: Pair) -> Rows:
    """A job whose rank 0 is killed ends, and names the rank; then it resumes from its checkpoint."""
    job = job_of(bench, "llama", "killed", zero=3)
    every = job.train.steps // 3  # the second checkpoint waits for the first, so that one is complete
    saving = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every": every})})
    dying = saving.model_copy(update={"train": job.train.model_copy(update={"callbacks": ("pair:Die",)})})
    begin, named = time.perf_counter(), ""
    try:
        train(dying, ranks=2, log=lambda line: None)
    except RankFailure as failure:
        named = str(failure).splitlines()[0]
    yield {"killed": "rank 0", "named": named, "s": time.perf_counter() - begin}
    if not named.startswith("rank 0 was killed by SIGKILL"):
        raise ValueError(f"named: {named!r}")
    at = max(map(step_of, list_checkpoints(Path(job.out))))
    steps = steps_of(saving, 2, resume="auto")
    yield {"newest checkpoint of the killed run": at}
    yield from compare(bench, steps, "llama")


def summary(steps: list[StepMetrics]) -> dict[str, Any]:
    return {"steps": len(steps), "last loss": f"{steps[-1].loss:.4f}", "tokens/s": steps[-1].tokens_per_second}


def compare(bench: Pair, steps: list[StepMetrics], model: str) -> Rows:
    """Row of a run, with its largest relative differences from one rank; an error if they exceed the tolerance."""
    pairs = list(zip(steps, one_rank(bench, model), strict=True))
    loss = max(abs(own.loss / one.loss - 1) for own, one in pairs)
    norm = max(abs(own.grad_norm / one.grad_norm - 1) for own, one in pairs)
    yield {**summary(steps), "loss differs by": f"{loss:.1e}", "norm differs by": f"{norm:.1e}"}
    allowed = TOLERANCE["fp32" if bench.small else "bf16"]
    if not (loss <= allowed and norm <= 10 * allowed):
        raise ValueError(
            f"losses differ by {loss:.1e}, norms by {norm:.1e}; allowed are {allowed:.0e} and {10 * allowed:.0e}"
        )


AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero_3": ("llama", {"zero": 3}),
    "zero_0": ("llama", {"zero": 0}),
    "tp_sp": ("llama", {"zero": 0, "tp": 2, "sp": True}),
    "cp_ring": ("llama", {"zero": 0, "cp": 2}),
    "cp_ulysses": ("llama", {"zero": 0, "cp": 2, "cp_ulysses": 2}),
    "ep": ("qwen3_moe", {"ep": 2}),
    "pp": ("llama", {"zero": 0, "pp": 2}),
}
STAGES = {
    "one_rank": Stage(partial(reference, "llama"), 25, "the dense model on one rank, which the axes are compared with"),
    "one_rank_experts": Stage(partial(reference, "qwen3_moe"), 25, "the model with experts on one rank"),
    **{
        name: Stage(partial(axis, name, model, parallel), 22, f"two ranks with {parallel}")
        for name, (model, parallel) in AXES.items()
    },
    "killed_rank": Stage(killed_rank, 55, "a killed rank is named, and the run resumes with its losses"),
}


def main() -> None:
    arguments = parse(STAGES, __doc__ or "", "runs/pair.json")
    device = detect()
    require_accelerator(device, arguments.small)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # ranks import this file for its callback
    with TemporaryDirectory() as folder:
        bench = Pair(device, device.torch_device(0), arguments.small, Path(folder))
        failed = run_stages(STAGES, arguments.stages, bench, arguments.out, timed=not arguments.small)
    raise SystemExit(f"stages failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
