"""`precision.quantize`: parity with the untouched model under torch's parametrizations, and the export of what was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, compare, full_tensor, packed_batches, share
from tests.lab.plans import resolved, resolved_job
from tests.lab.pool import run_ranks
from tests.lab.runs import plain_held_out_loss, train_in_the_pool
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.compress.recipe import read_recipe
from weft.compress.run import compress
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.errors import JobError, ModelError, PlanError
from weft.job import Job, Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import reorder_packed
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward
from weft.training.job_checks import check_model
from weft.training.metrics import read_evaluations, read_metrics
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import train_step

CONFIG = {**family("llama"), "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0}}),
    "zero 3, recompute": (2, {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}}),
    "tp2": (2, {"parallel": {"tp": 2}, "comm": {"overlap_chunks": 1}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "pp2 zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
}


MOE = {
    **family("qwen3_moe"),
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}
MOE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0}}),
    "zero 3, recompute": (2, {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}}),
    "ep2": (2, {"parallel": {"ep": 2}}),
    "ep2, replicas": (2, {"parallel": {"ep": 2, "expert_balance": "replicate", "expert_slots": 2}}),
    "ep2, joint": (2, {"parallel": {"ep": 2}, "comm": {"expert_overlap": "joint"}}),
    "ep2 x etp2": (4, {"parallel": {"ep": 2, "etp": 2}}),
    "tp2": (2, {"parallel": {"tp": 2}, "comm": {"overlap_chunks": 1}}),
    "pp2 zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
}


class Rounded(nn.Module):
    """Rounds a weight to signed integers of some bits, times the scale of each group of columns."""

    def __init__(self, bits: int, group: int):
        super().__init__()
        self.most, self.group = 2 ** (bits - 1), group

    def forward(self, weight: Tensor) -> Tensor:
        groups = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))
        scale = torch.maximum(-groups.amin(-1, True) / self.most, groups.amax(-1, True) / (self.most - 1))
        rounded = ((groups / scale).round().clamp(-self.most, self.most - 1) * scale).view_as(weight)
        return weight + (rounded - weight).detach()


def round_inputs(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    """Each token to 8 bits, with its own scale."""
    scale = args[0].abs().amax(-1, True) / 127.5
    rounded = (args[0] / scale).round().clamp(-128, 127) * scale
    return args[0] + (rounded - args[0]).detach()


def reference(
    kind: str, inputs: str, config: dict[str, Any], batches: list[MicroBatch]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the gradients of the first step, in one process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    names = {id(p): name for name, p in model.named_parameters()}
    rounded = Rounded(8, 0) if kind == "int8" else Rounded(4, 32)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parametrize.register_parametrization(layer, "weight", rounded)
            if inputs != "none":
                layer.register_forward_pre_hook(round_inputs)
    for layer in list(model.modules()):
        for name, weight in list(layer.named_parameters(recurse=False)):
            if weight.ndim == 3:  # of all experts
                parametrize.register_parametrization(layer, name, rounded)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    losses, gradients = [], {}
    for step, batch in enumerate(batches, 1):
        logits = model(input_ids=batch.input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        if step == 1:
            gradients = {names[id(p)]: p.grad.clone() for p in parameters if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(parameters, SETTINGS.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), SETTINGS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def run_plan(
    rank: int, world_size: int, config: dict[str, Any], plan: Plan, batches: list[MicroBatch]
) -> tuple[list[float], dict[str, Tensor]]:
    source, device, plan = Model(config=config), detect(), resolved(plan, world_size)
    mesh = build_mesh(plan, device.type, world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, device.torch_device(0))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, device)
    shares = [share(batch, data_rank(mesh), plan.parallel.data_ranks, 1) for batch in batches]
    tokens = int((batches[0].targets != -100).sum())
    forward_backward(model, shares[0], plan.parallel.gradient_ranks / tokens)
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients = reorder_packed(model, gradients, by_rank=False)
    optimizer.zero_grad()
    losses = []
    for step, own in enumerate(shares, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, len(shares), SETTINGS)
        losses.append(train_step(model, optimizer, own, SETTINGS.clip_norm).loss)
    return losses, gradients


def assert_parity(ranks: int, plan: Plan, config: dict[str, Any]) -> None:
    """The ranks of a plan have the losses and gradients of one process."""
    batches = packed_batches(config["vocab_size"], packed=False)
    losses, gradients = reference(plan.precision.quantize, plan.precision.quantize_inputs, config, batches)
    results = run_ranks(ranks, run_plan, config, plan, batches, timeout=120)
    assert {name for _, found in results for name in found} >= set(gradients)
    for found_losses, found in results:
        assert found_losses == pytest.approx(losses, rel=1e-4)
        for name, gradient in found.items():
            compare(name, gradient, gradients[name], 1e-5, at_least=1e-4)


@pytest.mark.must("parity: quantization-aware training", case="tp2-int8-none")
@pytest.mark.parametrize(("kind", "inputs"), [("int8", "none"), ("int4", "none"), ("int8", "int8")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one_process(layout: str, kind: str, inputs: str) -> None:
    """Rows of weights and tokens that tp divides have the scale of the whole row or token."""
    ranks, tables = LAYOUTS[layout]
    config = {**CONFIG, "num_hidden_layers": 4} if "zbv" in layout else CONFIG
    plan = Plan.model_validate(
        {"precision": {"param_dtype": "fp32", "quantize": kind, "quantize_inputs": inputs}, **tables}
    )
    assert_parity(ranks, plan, config)


@pytest.mark.must("composition: quantization-aware training", case="ep2, joint-int8")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_ranks_train_experts_as_one_process(layout: str, kind: str) -> None:
    """Each rank rounds its own experts; rows that etp divides have the scale of the whole row."""
    ranks, tables = MOE_LAYOUTS[layout]
    config = {**MOE, "num_hidden_layers": 4} if "zbv" in layout else MOE
    plan = Plan.model_validate({"precision": {"param_dtype": "fp32", "quantize": kind}, **tables})
    assert_parity(ranks, plan, config)


@pytest.mark.parametrize(
    ("kind", "inputs", "dtype", "parallel"),
    [
        ("int8", "none", "fp32", {"tp": 2}),
        ("int4", "none", "fp32", {"zero": 3}),
        ("fp8", "none", "fp32", {"pp": 2}),
        ("int4", "none", "bf16", {"zero": 3}),
        ("int8", "int8", "fp32", {"zero": 3}),
        ("int4", "int8", "fp32", {"pp": 2}),
        ("fp8", "fp8", "fp32", {"zero": 2}),
    ],
)
def test_the_export_is_what_was_trained(
    kind: str, inputs: str, dtype: str, parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Plain Transformers has the held-out loss that the run has measured with its rounded weights."""
    path = write_job(
        tmp_path,
        model={"config": {**CONFIG, "vocab_size": 300}},
        train={"steps": 6, "global_batch_size": 4},
        optimizer={"lr": 0.01},
        plan={
            "parallel": parallel,
            "precision": {"param_dtype": dtype, "quantize": kind, "quantize_inputs": inputs},
            "comm": {"overlap_chunks": 1},
        },
    )
    run, _ = train_in_the_pool(Job.load(path), 2)
    losses = [step.loss for step in read_metrics(run / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    compress(run / "export", tmp_path / "small", read_recipe("trained", run), None, lambda line: None)
    (evaluation,) = read_evaluations(run / "evaluations.jsonl")
    tolerance = 1e-5 if dtype == "fp32" else 3e-3
    found = plain_held_out_loss(run, tmp_path / "small")
    assert found == pytest.approx(evaluation.held_out_loss, rel=tolerance)
    if inputs != "none":  # the weights alone have another loss
        alone = read_recipe("trained", run).model_copy(update={"inputs": "none"})
        compress(run / "export", tmp_path / "alone", alone, None, lambda line: None)
        other = plain_held_out_loss(run, tmp_path / "alone")
        assert abs(other - evaluation.held_out_loss) > 10 * abs(found - evaluation.held_out_loss)
        assert other != pytest.approx(evaluation.held_out_loss, rel=1e-6)  # float32 rounds at 1e-7
    elif kind == "int4" and dtype == "fp32":  # other weights of four bits have another loss
        compress(run / "export", tmp_path / "nearest", read_recipe("int8"), None, lambda line: None)
        assert plain_held_out_loss(run, tmp_path / "nearest") != pytest.approx(evaluation.held_out_loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_the_export_of_experts_is_what_was_trained(kind: str, tmp_path: Path) -> None:
    path = write_job(
        tmp_path,
        model={"config": {**MOE, "vocab_size": 300}},
        train={"steps": 6, "global_batch_size": 4},
        optimizer={"lr": 0.01},
        plan={"parallel": {"ep": 2}, "precision": {"param_dtype": "fp32", "quantize": kind}},
    )
    run, _ = train_in_the_pool(Job.load(path), 2)
    compress(run / "export", tmp_path / "small", read_recipe("trained", run), None, lambda line: None)
    (evaluation,) = read_evaluations(run / "evaluations.jsonl")
    assert plain_held_out_loss(run, tmp_path / "small") == pytest.approx(evaluation.held_out_loss, rel=1e-5)
    if kind == "int4":  # the exact weights have another loss
        assert plain_held_out_loss(run, run / "export") != pytest.approx(evaluation.held_out_loss, rel=1e-4)


@pytest.mark.must("refusal: quantization-aware training")
@pytest.mark.parametrize(
    ("config", "plan", "error", "words"),
    [
        ({**CONFIG, "hidden_size": 48}, {}, ModelError, "48 input channels"),
        (MOE, {"precision": {"quantize": "int8", "quantize_inputs": "int8"}}, ModelError, "which has experts"),
        (family("gpt_oss"), {}, ModelError, "stored as one tensor of all experts"),
        ({**MOE, "moe_intermediate_size": 48}, {}, ModelError, "down_proj has 48 input channels"),
        (family("gpt2"), {}, ModelError, "has no nn.Linear"),
        (
            CONFIG,
            {"precision": {"matmul": "fp8", "emulate_fp8": True, "param_dtype": "bf16"}},
            PlanError,
            "quantize with matmul",
        ),
        (CONFIG, {"precision": {"quantize_inputs": "fp8"}}, PlanError, "as the other kind of number"),
        (
            CONFIG,
            {"precision": {"param_dtype": "fp64", "update": "fp64"}},
            PlanError,
            "quantize with param_dtype = fp64",
        ),
    ],
)
def test_models_and_plans_that_cannot_be_quantized(
    config: dict[str, Any], plan: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    plan = {**plan, "precision": {"quantize": "int4", **plan.get("precision", {})}}
    job = Job.load(write_job(tmp_path, data={"seq_len": 8}, plan=plan))
    job = job.model_copy(update={"model": Model(config=config)})
    with pytest.raises(error, match=words):
        check_model(resolved_job(job, 1))


def test_bad_recipes(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"is no run with plan\.precision\.quantize"):
        read_recipe("trained", tmp_path)
    with pytest.raises(JobError, match="adapter"):
        Job.load(write_job(tmp_path, adapter={"kind": "lora"}, plan={"precision": {"quantize": "int8"}}))
