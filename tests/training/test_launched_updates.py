"""Updates that are launched before the host has read loss and norm: the same bits, and what keeps the host in charge."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from weft.job import Job
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.training.metrics import read_metrics
from weft.training.session import Session

PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero 3": (2, "llama", {"parallel": {"zero": 3}}),
    "zero 0": (2, "llama", {"parallel": {"zero": 0}}),
    "tp": (2, "qwen3_moe", {"parallel": {"tp": 2}}),
    "pipeline": (2, "llama", {"parallel": {"pp": 2}}),
    "fp16": (2, "llama", {"precision": {"param_dtype": "fp16", "loss_scale": "dynamic"}}),
}
IN_CHARGE = {
    "states in host memory": {"plan": {"memory": {"optimizer_device": "host"}}},
    "states of 8 bits": {"plan": {"precision": {"optimizer_state_dtype": "int8"}}},
    "decisions on spikes": {"guard": {"spikes": "skip"}},
    "another optimizer": {"optimizer": {"name": "muon"}},
}
"""Settings with which the host decides on each update."""
_patches: list[Any] = []
LAUNCHED: list[bool] = []
STEPS = 6


def note_updates(session: Session) -> None:
    """Overflow the gradients of step 3 on one rank, and note whether each update is launched before the host decides."""
    step = DistributedOptimizer.step

    def run(optimizer: DistributedOptimizer, factor: Any = 1.0, overflows: Any = None) -> None:
        LAUNCHED.append(overflows is not None)
        step(optimizer, factor, overflows)

    _patches.append(mock.patch.object(DistributedOptimizer, "step", run))
    _patches[-1].start()
    is_spoiled = False

    def spoil(module: Any, args: Any, out: torch.Tensor) -> None:
        nonlocal is_spoiled
        if len(LAUNCHED) == 2 and not is_spoiled and out.requires_grad:
            is_spoiled = True
            out.register_hook(lambda gradient: gradient * torch.inf)

    if session.rank == 0:  # in a pipeline, the first stage
        session.model.get_input_embeddings().register_forward_hook(spoil)


def let_the_host_decide(session: Session) -> None:
    note_updates(session)
    _patches.append(mock.patch.object(DistributedOptimizer, "can_skip_on_device", return_value=False))
    _patches[-1].start()


def take_updates(session: Session) -> tuple[list[bool], dict[str, torch.Tensor]]:
    for patch in reversed(_patches):
        patch.stop()
    _patches.clear()
    launched = list(LAUNCHED)
    LAUNCHED.clear()
    states = session.optimizer.state.values()
    weights = {
        name: parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()
        for name, parameter in session.model.named_parameters()
    }
    return launched, {name: value.clone() for name, value in weights.items()} | {
        f"step {index}": state["step"].clone() for index, state in enumerate(states) if "step" in state
    }


def job_of(folder: Path, name: str, plan: dict[str, Any], **tables: Any) -> Job:
    folder.mkdir(exist_ok=True)
    train = {"steps": STEPS, "evaluate_every": 0, "global_batch_size": 4, "micro_batch_size": 1}
    model = {"config": {**family(name), "vocab_size": 300}}
    return Job.load(write_job(folder, model=model, plan=plan, train=train, **tables))


@pytest.mark.parametrize("kind", PLANS)
def test_losses_norms_and_weights_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    ranks, name, plan = PLANS[kind]
    found: list[Any] = []
    faults: tuple[Callable[[Session], None], ...] = (note_updates, let_the_host_decide)
    for index, fault in enumerate(faults):
        job = job_of(tmp_path / str(index), name, plan)
        found.append(observe(job, ranks, fault=fault, probe=take_updates))
    one, other = found
    rows, others = (read_metrics(run.folder / "metrics.jsonl") for run in found)
    values = [(row.loss, str(row.grad_norm), row.skipped, row.loss_scale) for row in rows]
    assert values == [(row.loss, str(row.grad_norm), row.skipped, row.loss_scale) for row in others]
    skipped = [row.step for row in rows if row.skipped]
    assert 3 in skipped
    for (launched, weights), (waited, expected) in zip(one.facts, other.facts, strict=True):
        assert launched == [True] * STEPS
        assert waited == [False] * (STEPS - len(skipped))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in weights)


@pytest.mark.parametrize("kind", IN_CHARGE)
def test_the_host_decides_where_more_than_the_update_follows(kind: str, tmp_path: Path) -> None:
    tables = {"plan": {}} | IN_CHARGE[kind]
    run = observe(job_of(tmp_path, "llama", **tables), 2, fault=note_updates, probe=take_updates)
    for launched, _ in run.facts:
        assert launched == [False] * (STEPS - 1)
