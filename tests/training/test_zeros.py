"""`optimizer.keep_zeros`: pruned weights stay zero, and the others train as if the zeros had no gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, compare, logits_of, packed_batches, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.errors import JobError
from weft.job import Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Parallel, Plan, Precision
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import train_step

PARALLEL: dict[str, dict[str, Any]] = {"zero 0": {"zero": 0}, "zero 3": {"zero": 3}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
VOCABULARY = 96
PRECISION = Precision(param_dtype="fp64", update="fp64", reduce_dtype="fp64")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model in whose linear layers two of four weights are zero."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**family("llama"), "vocab_size": VOCABULARY}), dtype=torch.float64
    )
    for name, weight in model.named_parameters():
        if "layers" in name and weight.ndim == 2:
            weight.data.unflatten(1, (-1, 4))[..., ::2] = 0
    folder = tmp_path_factory.mktemp("pruned") / "model"
    model.save_pretrained(folder)
    return folder


def run_steps(
    rank: int, world_size: int, folder: Path, plan: Plan, settings: Optimizer, batches: list[MicroBatch]
) -> dict[str, Any]:
    """Losses, gradient norms and weights after some steps."""
    source, device, plan = Model(path=str(folder)), detect(), resolved(plan, world_size)
    mesh = build_mesh(plan, device.type, world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float64), plan, mesh)
    materialize(model, source, device.torch_device(0))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, settings), model, device, keep_zeros=settings.keep_zeros)
    results = []
    for step, batch in enumerate(batches, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, len(batches), settings)
        own = share(batch, data_rank(mesh), plan.parallel.data_ranks, 1)
        results.append(train_step(model, optimizer, own, settings.clip_norm))
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": gather_weights(model),
    }


def reference(folder: Path, batches: list[MicroBatch]) -> dict[str, Any]:
    """Reference: the same steps in one process, with masks made here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    masks = {name: p.detach() != 0 for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    losses, norms = [], []
    for step, batch in enumerate(batches, 1):
        logits, counted = logits_of(model, batch), batch.targets != -100
        loss = F.cross_entropy(logits[counted], batch.targets[counted])
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            p.grad *= masks[name]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), SETTINGS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


@pytest.mark.parametrize("layout", PARALLEL)
def test_other_weights_train_as_in_one_process(layout: str, pruned: Path) -> None:
    plan = Plan(parallel=Parallel(**PARALLEL[layout]), precision=PRECISION)
    settings, batches = SETTINGS.model_copy(update={"keep_zeros": True}), packed_batches(VOCABULARY)
    expected = reference(pruned, batches)
    for found in run_ranks(2, run_steps, pruned, plan, settings, batches, timeout=120):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        for name, weight in expected["weights"].items():
            if name in found["weights"]:
                compare(name, found["weights"][name], weight.detach(), 1e-10, at_least=SETTINGS.lr)
                assert torch.equal(found["weights"][name] == 0, weight == 0), name


def test_updates_that_fill_matrices(pruned: Path) -> None:
    """Muon's updates have no zeros; the weights have."""
    plan = Plan(parallel=Parallel(zero=3), precision=PRECISION)
    settings = SETTINGS.model_copy(update={"keep_zeros": True, "name": "muon"})
    before = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float64).state_dict()
    for found in run_ranks(2, run_steps, pruned, plan, settings, packed_batches(VOCABULARY), timeout=120):
        for name, weight in found["weights"].items():
            if weight.ndim == 2:
                assert torch.equal(weight == 0, before[name] == 0), name
                assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize(
    "tables", [{"adapter": {"kind": "lora"}}, {"plan": {"precision": {"param_dtype": "bf16", "weights": "split"}}}]
)
def test_weights_that_cannot_stay_zero_are_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="keep_zeros"):
        Job.load(write_job(tmp_path, optimizer={"keep_zeros": True}, **tables))
