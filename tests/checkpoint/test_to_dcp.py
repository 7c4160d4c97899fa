"""Conversion to DCP folders, which torch loads without Weft: the run goes on, on any number of ranks, and back again."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoint.test_convert import save_plain
from tests.lab import plain_dcp
from tests.lab.checkpoints import CPU, tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.convert import to_checkpoint, to_dcp, to_huggingface
from weft.checkpoint.dcp import DcpFolder
from weft.checkpoint.dcp_writer import write_dcp
from weft.checkpoint.folders import folder_of
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position, read_manifest, write_manifest
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.checkpoint.snapshot import Snapshots, Target
from weft.checkpoint.sources import TensorSource
from weft.device.detect import detect
from weft.errors import CheckpointError
from weft.job import Adapter, Checkpoint, Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SETTINGS = Optimizer(lr=1e-2, eps=1e-3, weight_decay=0.2)
SAVED, LAST = 2, 5
TIED = {**family("llama"), "tie_word_embeddings": True}


def batches(config: dict[str, Any]) -> list[Any]:
    """Batches of all steps: rows of one document, of which a plain model needs no positions."""
    found = packed_batches(config["vocab_size"], packed=False)
    return (found + found)[:LAST]


def train_on(
    rank: int, world_size: int, config: dict[str, Any], plan: Plan, run: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, with a checkpoint on the way; returns the losses after it, and the last weights."""
    source, plan, device = Model(config=config), resolved(plan, world_size), detect()
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_on_meta(read_config(source), DTYPES[plan.precision.update]), plan, mesh)
    materialize(model, source, CPU)
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, device)
    job = Job(model=source, plan=plan, optimizer=SETTINGS, checkpoint=Checkpoint(every=1))
    snapshots, losses = Snapshots(job, model, optimizer, device, CPU), []
    for step, batch in enumerate(batches(config), 1):
        result = train_step(model, optimizer, share(batch, data_rank(mesh), plan.parallel.data_ranks, 4), 0.0)
        losses.append(result.loss)
        if step == SAVED:
            position = Position(step=step, next_batch=step, loss_scale=LossScale())
            snapshots.take(position, Target(run, rank == 0, keep=0, keep_hours=0))
            snapshots.finish()
    dist.barrier()
    return losses[SAVED:], gather_weights(model)


# configuration, ranks, dtype, degrees of the plan, form of the settings, relative difference of losses, difference of weights
RUNS: dict[str, tuple[dict[str, Any], int, str, dict[str, int], bool, float, float]] = {
    "tied, zero 3": (TIED, 2, "fp32", {"zero": 3}, False, 1e-6, 1e-6),
    "packed, tp": (family("phi3"), 2, "fp32", {"tp": 2}, False, 1e-6, 1e-6),
    "experts, ep": (family("mixtral"), 2, "fp32", {"ep": 2}, True, 1e-6, 1e-6),
    "bf16, pp": (TIED, 2, "bf16", {"pp": 2}, True, 1e-4, 2**-7),  # a step of bf16 next to 1
}


@pytest.mark.must("format: DCP folder, written", case="tied, zero 3")
@pytest.mark.parametrize("name", RUNS)
def test_a_process_without_weft_continues_the_run(name: str, tmp_path: Path) -> None:
    config, ranks, dtype, degrees, flat, of_losses, of_weights = RUNS[name]
    losses, weights = run_ranks(ranks, train_on, config, plan_for(dtype, **degrees), tmp_path / "run")[0]
    folder = to_dcp(folder_of(tmp_path / "run", SAVED), tmp_path / "dcp")
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "run"]
    task = {
        "config": config,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "settings": {"lr": 1.0, "weight_decay": 0.5},  # those of the folder are used
        "flat": flat,
        "step": SAVED,
        "batches": [(batch.input_ids.tolist(), batch.targets.tolist()) for batch in batches(config)[SAVED:]],
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    command = [sys.executable, plain_dcp.__file__, folder, tmp_path / "task.json", tmp_path / "out"]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = load_file(tmp_path / "out")
    torch.testing.assert_close(found.pop("losses").tolist(), losses, rtol=of_losses, atol=0)
    for key, weight in found.items():
        torch.testing.assert_close(weight, weights[key], rtol=0, atol=of_weights)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Checkpoint of a tied model, written by two ranks."""
    run_ranks(2, train_and_save, Model(config=TIED), plan_for("fp32", zero=3), tmp_path / "run", (0, 2), None)
    return folder_of(tmp_path / "run", 2)


def load_sharded(rank: int, world_size: int, folder: Path, expected: dict[str, torch.Tensor], flat: bool) -> None:
    """Load the folder into plain Transformers under FSDP2, and compare the shards of this rank."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TIED))
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = plain_dcp.make_optimizer(model, lr=1.0, weight_decay=0.5)
    assert plain_dcp.load(folder, model, optimizer, flat=flat) == 2
    found: dict[str, Any] = {f"weights/{name}": weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        found |= {f"{kind}/{name}": value for kind, value in optimizer.state[weight].items()}
    assert found.keys() == {name for name in expected if not name.startswith("buffers/")}
    for name, value in found.items():
        full = expected[name]
        if isinstance(value, DTensor):
            value, full = (
                value.to_local(),
                distribute_tensor(full, mesh, value.placements, src_data_rank=None).to_local(),
            )
        assert torch.equal(value, full), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [Optimizer().weight_decay, 0.0]


@pytest.mark.parametrize("flat", [False, True])
def test_fsdp2_loads_the_same_shards(flat: bool, checkpoint: Path, tmp_path: Path) -> None:
    run_ranks(2, load_sharded, to_dcp(checkpoint, tmp_path / "dcp"), tensors_of(checkpoint), flat)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "fp32"), ("mixtral", "bf16"), ("deepseek_v3", "fp32")])
def test_round_trip_is_bitwise_equal(name: str, dtype: str, tmp_path: Path) -> None:
    source = Model(config=family(name))
    run_ranks(1, train_and_save, source, plan_for(dtype), tmp_path / "run", (0, 2), None)
    first = folder_of(tmp_path / "run", 2)
    job = Job(model=source, plan=Plan(precision=Precision(update=dtype)))  # type: ignore[arg-type]
    back = to_checkpoint(to_dcp(first, tmp_path / "dcp"), tmp_path / "back", job=job)
    found, expected = tensors_of(back), tensors_of(first)
    assert found.keys() == expected.keys()
    assert any(key.startswith("exp_avg_sq/") for key in found)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    assert read_manifest(back).position.step == 2
    twice = to_dcp(back, tmp_path / "twice")  # a converted checkpoint has no settings of the optimizer
    assert not any("param_groups" in key for key in DcpFolder(twice).objects)
    again = tensors_of(to_checkpoint(twice, tmp_path / "again", job=job))
    assert all(torch.equal(again[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_huggingface_folder_gives_the_weights_alone(name: str, tmp_path: Path) -> None:
    save_plain(tmp_path / "hf", name)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    folder = to_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert DcpFolder(folder).tensors.keys() == expected.keys()
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    torch_dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    job = Job(model=Model(config=family(name)))
    at_step_0 = to_dcp(to_checkpoint(tmp_path / "hf", tmp_path / "made"), tmp_path / "dcp-0")
    assert DcpFolder(at_step_0).tensors.keys() == expected.keys()
    assert not DcpFolder(at_step_0).objects
    again = AutoModelForCausalLM.from_pretrained(to_huggingface(folder, tmp_path / "again", job=job))
    assert all(torch.equal(again.state_dict()[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("settings", "kind", "states"),
    [
        (Optimizer(name="adafactor"), torch.optim.Adafactor, {"step", "row_var", "col_var"}),
        (Optimizer(name="torch.optim:SGD", options={"momentum": 0.9}), torch.optim.SGD, {"momentum_buffer"}),
    ],
)
def test_states_of_other_optimizers_of_torch_are_loaded(
    settings: Optimizer, kind: Any, states: set[str], tmp_path: Path
) -> None:
    source = Model(config=TIED)
    run_ranks(1, train_and_save, source, plan_for("fp32"), tmp_path / "run", (0, 2), None, settings)
    checkpoint = folder_of(tmp_path / "run", 2)
    expected, folder = tensors_of(checkpoint), to_dcp(checkpoint, tmp_path / "dcp")
    model: Any = build_plain(source, read_config(source), torch.float32)
    decay = [weight for weight in model.parameters() if weight.ndim >= 2]
    other = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = kind([{"params": other}, {"params": decay, "weight_decay": 0.7}], lr=1.0)
    if kind is torch.optim.SGD:  # it has its state from the first step on if it has a momentum
        for group in optimizer.param_groups:
            group["momentum"] = 0.1
    plain_dcp.load(folder, model, optimizer, flat=True)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, settings.weight_decay]
    assert optimizer.state[model.model.embed_tokens.weight].keys() == states
    for name, weight in model.named_parameters():
        for key, value in optimizer.state[weight].items():
            assert torch.equal(value, expected[f"{key}/{name}"]), (key, name)


def test_tensors_of_one_file_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.checkpoint.sources.FILE_BYTES", 4 * 15 * 4 + 1)
    names = {f"w{index}": f"weights/w{index}" for index in range(20)}
    alive: list[weakref.ref[Any]] = []
    counts = []

    def read(name: str) -> torch.Tensor:
        counts.append(sum(held() is not None for held in alive))
        memory = np.full((3, 5), len(counts), np.float32)
        alive.append(weakref.ref(memory))  # alive as long as a tensor that shares it
        return torch.from_numpy(memory)

    specs = dict.fromkeys(names.values(), (torch.float32, (3, 5)))
    write_dcp(TensorSource(tmp_path, specs, read), names, None, tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 5
    assert len(counts) == 20
    assert max(counts) == 3
    found = {name: torch.zeros(3, 5) for name in names}
    torch_dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    folder = DcpFolder(tmp_path / "dcp")
    for index, (name, tensor) in enumerate(found.items(), 1):
        assert torch.equal(tensor, torch.full((3, 5), float(index)))
        assert torch.equal(folder.read(name), tensor)


def damage(checkpoint: Path) -> None:
    file = checkpoint / "shard-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def take_target(checkpoint: Path) -> None:
    (checkpoint.parents[1] / "to").mkdir()


def add_adapters(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    adapter = Adapter(kind="lora").model_dump(mode="json")
    write_manifest(manifest.model_copy(update={"job": {**manifest.job, "adapter": adapter}}), checkpoint)


def leave(checkpoint: Path) -> None:
    """Leave the checkpoint as it is."""


ANOTHER = Job(model=Model(config={**TIED, "num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("change", "job", "words"),
    [
        (damage, None, "has the digest"),
        (take_target, None, "to exists"),
        (add_adapters, None, "the checkpoint has adapters, and no weights of their base"),
        (leave, ANOTHER, "the model has no such weight"),
    ],
)
def test_a_refused_conversion_leaves_no_files(
    change: Any, job: Job | None, words: str, checkpoint: Path, tmp_path: Path
) -> None:
    change(checkpoint)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        to_dcp(checkpoint, tmp_path / "to", job=job)
    assert words in str(caught.value)
    assert caught.value.rule
    assert caught.value.fix
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dcp_folder_and_a_target_in_the_source_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = to_dcp(checkpoint, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="is already a DCP folder"):
        to_dcp(folder, tmp_path / "to")
    with pytest.raises(CheckpointError, match="is inside"):
        to_dcp(checkpoint, checkpoint / "to")
