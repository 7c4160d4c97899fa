"""Waits of the host for the device in a step of `weft train`, which an accelerator would spend idle."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from tests.lab.waits import counted
from weft.job import Job
from weft.training.loop import Loop
from weft.training.session import Session
from weft.training.step_report import StepReport

COUNTED_STEP = 3  # the first two are measured in other ways
SEEN: list[dict[str, int]] = []
_patches: list[Any] = []


def count_waits(session: Session) -> None:
    """Count the waits of step 3, in its own thread."""
    run_step = Loop.run_step

    def run(loop: Loop) -> StepReport:
        if loop.position.step + 1 != COUNTED_STEP:
            return run_step(loop)
        with counted() as calls:
            report = run_step(loop)
        SEEN.append(dict(calls))
        return report

    _patches.append(mock.patch.object(Loop, "run_step", run))
    _patches[-1].start()


def take_waits(session: Session) -> dict[str, int]:
    _patches.pop().stop()
    (found,) = SEEN
    SEEN.clear()
    return found


KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dense, zero 3": (2, "llama", {"parallel": {"zero": 3}}),
    "dense, zero 0": (2, "llama", {"parallel": {"zero": 0}}),
    "fp16 with a dynamic scale": (2, "llama", {"precision": {"param_dtype": "fp16", "loss_scale": "dynamic"}}),
    "experts": (2, "qwen3_moe", {}),
    "tp": (2, "llama", {"parallel": {"tp": 2}}),
    "experts over ep": (2, "qwen3_moe", {"parallel": {"ep": 2}}),
    "replicas": (2, "qwen3_moe", {"parallel": {"ep": 2, "expert_balance": "replicate"}}),
    "pipeline": (2, "qwen3_moe", {"parallel": {"pp": 2}}),
}


LAYERS = {
    "experts over ep": Counter({"dispatch.dispatch: tolist": 2}),
    "replicas": Counter({"replicas.__call__: cpu": 2}),
}
"""Waits for the counts of two layers."""
ON_THE_HOST = (
    *("attention_plan.", "rows.encode_documents", "batches."),  # read documents in host memory
    *(f"replicas.__call__: {name}" for name in ("numpy", "__int__", "tolist")),  # of counts that have arrived
)


@pytest.mark.parametrize("kind", KINDS)
def test_waits_of_a_step(kind: str, tmp_path: Path) -> None:
    """Once, for loss, norm and what ranks agree on; under ep, each layer waits for its counts."""
    ranks, name, plan = KINDS[kind]
    steps = {"steps": COUNTED_STEP, "evaluate_every": 0}
    job = Job.load(write_job(tmp_path, model={"config": {**family(name), "vocab_size": 300}}, plan=plan, train=steps))
    run = observe(job, ranks, fault=count_waits, probe=take_waits)
    expected = Counter({"step.read: tolist": 1}) + LAYERS.get(kind, Counter())
    for calls in run.facts:
        assert (
            Counter({where: count for where, count in calls.items() if not where.startswith(ON_THE_HOST)}) == expected
        )
