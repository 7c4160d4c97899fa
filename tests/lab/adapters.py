"""Parity of adapters: stock PEFT and a plain loop in one process, and a job with adapters on several ranks."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.parity import SETTINGS, STEPS, full_tensor, logits_of, packed_batches, share
from tests.lab.plans import resolved
from weft.adapters.folder import start_adapters
from weft.adapters.model import build_model
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Adapter, Job, Model
from weft.memory.nf4 import CODE
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import reorder_packed, set_dropout_seed
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import train_step

PREFIX = "base_model.model."
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of a model whose weights have blocks of 64 on each rank of tp 2."""


@dataclass
class AdapterRecord:
    """Results that both sides must agree on; names are those of the model inside of PEFT's."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def start_folder(folder: Path, config: dict[str, Any], kind: str, targets: Any = "all-linear", r: int = 4) -> Path:
    """Write an adapter with random matrices by stock PEFT: B is not zero, so that A has gradients from the first step."""
    experts = [target for target in targets if "experts." in target] if targets != "all-linear" else []
    settings = peft.LoraConfig(
        r=r,
        target_modules=[target for target in targets if target not in experts] if experts else targets,
        target_parameters=experts or None,
        use_dora=kind == "dora",
        lora_alpha=8,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    torch.manual_seed(5)
    adapted: Any = peft.get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    adapted.save_pretrained(folder)
    return folder


def reference(config: dict[str, Any], folder: Path, batches: list[MicroBatch], change: Any = None) -> AdapterRecord:
    """Train an adapter with stock PEFT and a plain loop.

    Args:
        config: configuration of the base model, which is initialized after torch.manual_seed(0).
        folder: folder of the adapter.
        batches: global batch of each step.
        change: called with the base model, for example to quantize it.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    if change:
        change(model)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, torch_device="cpu")
    adapted.train()
    trained = {n.removeprefix(PREFIX): p for n, p in adapted.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, foreach=False)
    losses, gradients = [], {}
    for step, batch in enumerate(batches, 1):
        logits, tokens = logits_of(adapted, batch), int((batch.targets != -100).sum())
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / tokens
        loss.backward()
        if step == 1:
            gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        torch.nn.utils.clip_grad_norm_(list(trained.values()), SETTINGS.clip_norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return AdapterRecord(losses, gradients, {name: p.detach().clone() for name, p in trained.items()})


def job_for(config: dict[str, Any], plan: Plan, adapter: Adapter) -> Job:
    return Job(model=Model(config=config), plan=plan, adapter=adapter, optimizer=SETTINGS)


def run_job(rank: int, world_size: int, job: Job, batches: list[MicroBatch], micro_batch: int) -> AdapterRecord:
    """Train the adapters of a job by Weft, on one rank of several."""
    plan = resolved(job.plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_model(job, DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, job.model, torch.device("cpu"), partial(start_adapters, adapter=job.adapter, seed=0))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    shares = [share(batch, data_rank(mesh), plan.parallel.data_ranks, micro_batch) for batch in batches]
    set_dropout_seed(model, 0, 0)
    forward_backward(model, shares[0], plan.parallel.gradient_ranks / int((batches[0].targets != -100).sum()))
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients = reorder_packed(model, gradients, by_rank=False)
    optimizer.zero_grad()
    losses = []
    for step, micro_batches in enumerate(shares, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, STEPS, SETTINGS)
        losses.append(train_step(model, optimizer, micro_batches, SETTINGS.clip_norm).loss)
    return AdapterRecord(losses, gradients, gather_weights(model, trained_only=True))


def assert_adapter_parity(
    found: list[AdapterRecord], expected: AdapterRecord, tolerance: float = 1e-5, pipeline: bool = False
) -> None:
    """Compare losses, gradients and weights; the error names the first tensor that differs."""
    for rank, record in enumerate(found):
        for step, (loss, other) in enumerate(zip(record.losses, expected.losses, strict=True), 1):
            assert math.isclose(loss, other, rel_tol=tolerance), f"rank {rank}: loss {loss} of step {step}, not {other}"
        assert pipeline or record.gradients.keys() == expected.gradients.keys()
        for name, gradient in record.gradients.items():
            _compare(f"rank {rank}: gradient of {name}", gradient, expected.gradients[name], tolerance)
    assert set().union(*(record.gradients for record in found)) == expected.gradients.keys()
    assert found[0].weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        _compare(f"weight {name}", found[0].weights[name], weight, tolerance, at_least=STEPS * SETTINGS.lr)


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, at_least: float = 0.0) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    largest, error = max(expected.abs().max().item(), at_least), (found - expected).abs().max().item()
    assert error <= tolerance * max(largest, 1e-12), f"{what}: off by {error:.3g}, largest value {largest:.3g}"


def batches_for(config: dict[str, Any]) -> list[MicroBatch]:
    return packed_batches(config["vocab_size"])


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
