"""Muon, Adafactor, Lion and a class of PyTorch under every plan, against the untouched model in one process."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pytorch_optimizer import Lion
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.checkpoints import tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, MakeOptimizer, assert_parity, plan_for
from tests.lab.pool import run_ranks
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest
from weft.errors import JobError
from weft.job import Job, Model, Optimizer
from weft.memory.chunked_step import chunked_step
from weft.optimizers import muon
from weft.optimizers.adafactor import Adafactor
from weft.optimizers.muon import Muon, newton_schulz
from weft.plan import Plan
from weft.training.metrics import read_metrics
from weft.training.optimizer import build_optimizer

LR, DECAY = SETTINGS.lr, SETTINGS.weight_decay


def orthogonal(matrix: Tensor) -> Tensor:
    """Five iterations of the paper, in the dtype of the matrix."""
    x = matrix / matrix.norm()
    if len(x) > x.shape[1]:
        return orthogonal(matrix.T).T
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


class PlainMuon:
    """Muon of the paper for each matrix of the blocks, and AdamW of PyTorch for all other parameters."""

    def __init__(self, groups: list[dict[str, Any]], model: Any):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        hidden = [p for group in groups for p in group["params"] if p.ndim >= 2 and ".layers." in names[id(p)]]
        chosen = set(map(id, hidden))
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
        self.momenta = {parameter: torch.zeros_like(parameter) for parameter in hidden}
        self.adamw = torch.optim.AdamW(rest, lr=LR, betas=SETTINGS.betas, eps=SETTINGS.eps, foreach=False)
        self.param_groups = self.adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        rate = self.param_groups[0]["lr"]
        for parameter, momentum in self.momenta.items():
            gradient = parameter.grad
            assert gradient is not None
            momentum.copy_(0.95 * momentum + 0.05 * gradient)
            direction = 0.05 * gradient + 0.95 * momentum
            size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            rows, columns = parameter.shape[-2:]
            update = torch.stack([orthogonal(matrix) for matrix in direction.view(-1, rows, columns)])
            parameter -= rate * (DECAY * parameter + size * update.view_as(parameter))
        self.adamw.step()

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for parameter in self.momenta:
            parameter.grad = None


def adafactor(groups: list[dict[str, Any]], model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=LR)


def lion(groups: list[dict[str, Any]], model: Any) -> torch.optim.Optimizer:
    return Lion(groups, lr=LR, betas=SETTINGS.betas)


def adagrad(groups: list[dict[str, Any]], model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=LR, eps=SETTINGS.eps, lr_decay=0.1)


OPTIMIZERS: dict[str, tuple[Optimizer, MakeOptimizer]] = {
    "muon": (SETTINGS.model_copy(update={"name": "muon"}), PlainMuon),
    "adafactor": (SETTINGS.model_copy(update={"name": "adafactor"}), adafactor),
    "lion": (SETTINGS.model_copy(update={"name": "lion"}), lion),
    "torch.optim:Adagrad": (
        SETTINGS.model_copy(update={"name": "torch.optim:Adagrad", "options": {"lr_decay": 0.1}}),
        adagrad,
    ),
}
PLANS: dict[str, tuple[str, int, dict[str, int]]] = {
    "replicas": ("llama", 2, {"zero": 0}),
    "uneven shards": ("llama", 4, {"zero": 3}),
    "shards of replicas": ("llama", 4, {"zero": 2, "dp_replicate": 2}),
    "tp and zero 3": ("llama", 4, {"zero": 3, "tp": 2}),
    "packed matrices, tp and zero 1": ("phi3", 4, {"zero": 1, "tp": 2}),
    "experts": ("mixtral", 4, {"zero": 3, "ep": 2}),
    "experts, tp": ("mixtral", 2, {"zero": 3, "tp": 2, "ep": 2}),
    "pipeline, cp": ("llama", 4, {"zero": 1, "pp": 2, "cp": 2}),
}


@pytest.mark.must("parity: Muon", case="muon-replicas")
@pytest.mark.must("parity: Adafactor", case="adafactor-uneven shards")
@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parity_with_one_process(name: str, layout: str) -> None:
    """Loss, gradients and weights of three steps, in float64."""
    (settings, make), (model, ranks, parallel) = OPTIMIZERS[name], PLANS[layout]
    uneven = {"intermediate_size": 50} if layout == "uneven shards" else {}
    source = Model(config={**family(model), **uneven})
    assert_parity(source, plan_for("fp64", **parallel), ranks, 1, 1, settings=settings, make=make)


@pytest.mark.parametrize("name", ["muon", "lion", "adafactor"])
def test_states_resume_under_another_plan(name: str, tmp_path: Path) -> None:
    """Checkpoint after each step, each under another plan, with the tensors of an uninterrupted run."""
    settings, source = OPTIMIZERS[name][0], Model(config=family("phi3"))
    plans: list[tuple[int, Plan]] = [
        (2, plan_for("fp64", zero=3)),
        (4, plan_for("fp64", zero=1, tp=2)),
        (2, plan_for("fp64", pp=2)),
    ]
    run_ranks(1, train_and_save, source, plan_for("fp64", zero=0), tmp_path / "whole", (0, 3), None, settings)
    begin = None
    for step, (ranks, plan) in enumerate(plans):
        run_ranks(ranks, train_and_save, source, plan, tmp_path / "parts", (step, step + 1), begin, settings)
        begin = folder_of(tmp_path / "parts", step + 1)
    expected = tensors_of(folder_of(tmp_path / "whole", 3))
    found = tensors_of(folder_of(tmp_path / "parts", 3))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(
            found[key], tensor, rtol=1e-8, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_the_iteration_equals_that_of_pytorch() -> None:
    """bfloat16, as torch.optim.Muon computes it; a learning rate of 1 makes the update visible."""
    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24), (1, 8)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        gradient = torch.randn(shape)
        weight.grad = gradient.clone()
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
        found = -0.2 * math.sqrt(max(shape)) * newton_schulz(gradient.bfloat16()).float()
        torch.testing.assert_close(found, weight.detach(), rtol=0.02, atol=0.02)


def step_in_chunks(rank: int, world_size: int, name: str) -> None:
    """Update matrices of uneven shards at once and in chunks of one matrix, with a chunk for each on every rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 6), (5, 9), (7, 6)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def sharded(tensor: Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(distribute_tensor(tensor.clone(), mesh, [Shard(0)]))

    copies = [[sharded(value) for value in values] for _ in range(2)]
    groups = [[{"params": copy, "weight_decay": 0.1, "orthogonalize": True}] for copy in copies]
    whole, parts = ({"muon": Muon, "adafactor": Adafactor, "lion": Lion}[name](group, lr=0.1) for group in groups)
    for _ in range(3):
        for copy in copies:
            for parameter, value in zip(copy, values, strict=True):
                parameter.grad = distribute_tensor(value.sin(), mesh, [Shard(0)])
        whole.step()
        with mock.patch.object(muon, "LARGEST_BATCH", 1):  # a matrix for each rank at a time
            chunked_step(parts, chunk_bytes=1, at_least=1 + 2 * (name == "muon"))
    for first, second in zip(*copies, strict=True):
        assert torch.equal(first.full_tensor(), second.full_tensor())
    assert [group.get("step") for group in whole.param_groups] == [group.get("step") for group in parts.param_groups]


@pytest.mark.parametrize("name", ["muon", "adafactor", "lion"])
def test_chunks_give_the_same_update(name: str) -> None:
    run_ranks(2, step_in_chunks, name)


@pytest.mark.parametrize("name", ["muon", "adafactor", "lion"])
def test_split_weights_and_states_on_disk_give_the_same_bits(name: str, tmp_path: Path) -> None:
    losses = []
    for out, precision, memory in (
        ("plain", {}, {}),
        ("split", {"weights": "split_even"}, {"optimizer_device": "disk", "offload_dir": str(tmp_path)}),
    ):
        plan = {"parallel": {"zero": 3}, "precision": {"param_dtype": "bf16", **precision}, "memory": memory}
        train = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2}
        tables = {"optimizer": {"name": name, "lr": 0.01}, "train": train, "plan": plan}
        folder, _ = train_in_the_pool(Job.load(write_job(tmp_path, **tables), [f"out={tmp_path / out}"]), 2)
        losses.append([row.loss for row in read_metrics(folder / "metrics.jsonl")])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_eight_bit_states(tmp_path: Path) -> None:
    """Losses with quantized momenta, near those with float32 momenta."""
    losses = {}
    for state_dtype in ("update", "int8"):
        plan = {"parallel": {"zero": 0}, "precision": {"param_dtype": "fp32", "optimizer_state_dtype": state_dtype}}
        tables = {
            "optimizer": {"name": "muon", "lr": 0.01},
            "train": {"steps": 4, "global_batch_size": 4},
            "plan": plan,
        }
        job = Job.load(write_job(tmp_path, **tables), [f"out={tmp_path / state_dtype}"])
        folder, _ = train_in_the_pool(job, 1)
        losses[state_dtype] = [row.loss for row in read_metrics(folder / "metrics.jsonl")]
    assert losses["int8"] != losses["update"]
    assert losses["int8"] == pytest.approx(losses["update"], rel=0.01)


@pytest.mark.must("refusal: Muon")
@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"name": "adamw", "options": {"momentum": 0.9}}, "AdamW has no option momentum"),
        ({"name": "adamw", "options": {"lr": 0.9}}, r"AdamW has no option lr[\s\S]*keys of \[optimizer\]"),
        ({"name": "onebit-adam", "options": {"momentum": 0.9}}, "OneBitAdam has no option momentum"),
        ({"name": "adafactor", "options": {"dtype": "bf16"}}, "Adafactor has no option dtype"),
        ({"name": "torch.optim:SGD", "options": {"momentum": -1.0}}, "Invalid momentum value: -1.0"),
        ({"name": "torch.optim:SDG"}, "did you mean torch.optim:SGD"),
    ],
)
def test_options_that_an_optimizer_does_not_have_are_refused(tables: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        build_optimizer(torch.nn.Linear(2, 2), Optimizer(**tables))


def test_settings_of_another_form_are_left_at_their_defaults() -> None:
    found = build_optimizer(torch.nn.Linear(2, 2), Optimizer(name="torch.optim:Adafactor", lr=0.5))
    assert (found.defaults["eps"], found.defaults["lr"]) == ((None, 1e-3), 0.5)


def test_biases_of_experts_do_not_decay() -> None:
    config = AutoConfig.for_model(**family("gpt_oss"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    groups = build_optimizer(model, Optimizer()).param_groups
    decays = {id(p): group["weight_decay"] > 0 for group in groups for p in group["params"]}
    names = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert not names["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert names["model.layers.0.mlp.experts.gate_up_proj"]
    assert {name for name, own in names.items() if own} == {
        name for name, p in model.named_parameters() if p.ndim >= 2 and "bias" not in name
    }


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_checkpoint_from_before_the_first_update_is_loaded(name: str, tmp_path: Path) -> None:
    settings, source, plan = OPTIMIZERS[name][0], Model(config=family("llama")), plan_for("fp64", zero=3)
    run_ranks(2, train_and_save, source, plan, tmp_path / "whole", (0, 1), None, settings)
    run_ranks(2, train_and_save, source, plan, tmp_path / "parts", (0, 0), None, settings)
    begin = folder_of(tmp_path / "parts", 0)
    run_ranks(2, train_and_save, source, plan, tmp_path / "parts", (0, 1), begin, settings)
    expected, found = (tensors_of(folder_of(tmp_path / part, 1)) for part in ("whole", "parts"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_class_gets_the_settings_that_it_has() -> None:
    model = torch.nn.Linear(2, 2)
    found = build_optimizer(
        model, Optimizer(name="torch.optim:NAdam", lr=0.5, betas=(0.8, 0.9), options={"momentum_decay": 0.1})
    )
    assert isinstance(found, torch.optim.NAdam)
    assert {key: found.defaults[key] for key in ("lr", "betas", "eps", "momentum_decay")} == {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-8,
        "momentum_decay": 0.1,
    }
    assert sorted(group["weight_decay"] for group in found.param_groups) == [0.0, 0.1]


def test_an_update_count_in_a_group_resumes(tmp_path: Path) -> None:
    """Lion of pytorch_optimizer counts its updates in its parameter groups."""
    tables = {
        "optimizer": {"name": "lion", "lr": 1e-3},
        "train": {"steps": 2, "global_batch_size": 4},
        "checkpoint": {"every": 2},
        "plan": {"precision": {"param_dtype": "fp32"}},
    }
    for steps, resume in ((2, None), (4, "auto")):
        job = Job.load(write_job(tmp_path, **tables), [f"out={tmp_path / 'run'}", f"train.steps={steps}"])
        folder, _ = train_in_the_pool(job, 2, resume=resume, accept_changes=bool(resume))
        groups = read_manifest(folder_of(folder, steps)).position.parameter_groups
        assert {group["step"] for group in groups} == {steps}
