"""Conversion from and to Megatron-Core's distributed checkpoints.

The folders in `megatron_core/` were saved by megatron-core 0.16.1 with `tests/lab/megatron_core.py`, which also computed the
logits: qwen3 under tp 2, pp 2; qwen2, tied, under tp 2 with a tensor for each layer; mixtral under ep 2. The vocabulary of 120
tokens is padded to 128. Their common.pt, which is not read, was removed.
"""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.test_dcp import Touch
from tests.lab import megatron_core
from tests.lab.checkpoints import tensors_of
from tests.lab.families import family
from weft.checkpoint.convert import to_checkpoint, to_huggingface, to_megatron
from weft.checkpoint.dcp import DcpFolder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import CheckpointError
from weft.job import Job, Model

SAVED = Path(__file__).parent / "megatron_core"
FAMILIES = ("qwen3", "qwen2", "mixtral")
INSTALLED = importlib.util.find_spec("megatron") is not None


def job_of(name: str, **changes: Any) -> Job:
    config = json.loads((SAVED / name / "config.json").read_text())
    return Job(model=Model(config={**config, **changes}))


def folder_of(name: str) -> Path:
    return SAVED / name / "iter_0000001"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def save_plain(folder: Path, config: dict[str, Any]) -> Any:
    """Initialize a model, with norms and biases that differ, and save it."""
    source = Model(config=config)
    model: Any = build_plain(source, read_config(source), torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return model


def same_weights(found: Any, expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.must("format: Megatron-Core folder, read", case="mixtral")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_megatron_core_are_those_of_the_converted_model(name: str, tmp_path: Path) -> None:
    found = load(to_huggingface(folder_of(name), tmp_path / "hf", job=job_of(name)))
    expected = load_file(SAVED / name / "logits.safetensors")["logits"]
    torch.testing.assert_close(found(megatron_core.IDS).logits, expected, rtol=1e-5, atol=1e-5)
    held = tensors_of(to_checkpoint(folder_of(name), tmp_path / "weft", job=job_of(name)))
    assert all(torch.equal(held[f"weights/{key}"], weight) for key, weight in found.named_parameters())


@pytest.mark.must("format: Megatron-Core folder, written", case="mixtral")
@pytest.mark.parametrize("name", FAMILIES)
def test_written_tensors_are_those_that_megatron_core_wrote(name: str, tmp_path: Path) -> None:
    plain = to_huggingface(folder_of(name), tmp_path / "hf", job=job_of(name))
    found, expected = DcpFolder(to_megatron(plain, tmp_path / "made")), DcpFolder(folder_of(name))
    for key in expected.tensors:
        full = found.read(key.replace("layers.0.", "layers.").replace("layers.1.", "layers."))
        layer = [int(part) for part in key.split(".") if part.isdigit()]
        one, other = full[layer[0]] if layer else full, expected.read(key)
        assert torch.equal(one, other[: len(one)]), key
        assert one.shape == other.shape or key.startswith(("embedding.", "output_layer."))
    if name != "qwen2":  # saved under other names than those that are written
        assert found.tensors.keys() == expected.tensors.keys()
        assert set(expected.objects) <= set(found.objects)


ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": [0], "num_hidden_layers": 3},  # layers differ: a tensor for each layer
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    config = {**family("llama" if name in ("mistral", "qwen2") else name), "model_type": name, **ROUND_TRIPS[name]}
    model, job = save_plain(tmp_path / "hf", config), Job(model=Model(config=config))
    made = to_megatron(tmp_path / "hf", tmp_path / "made")
    keys = DcpFolder(made).tensors.keys()
    assert ("decoder.layers.self_attention.linear_qkv.weight" in keys) is (name != "qwen3_moe")
    assert same_weights(load(to_huggingface(made, tmp_path / "again", job=job)).state_dict(), model.state_dict())
    checkpoint = to_checkpoint(made, tmp_path / "weft", job=job)
    twice = to_megatron(checkpoint, tmp_path / "twice")
    assert [path.name for path in sorted(twice.iterdir())] == [
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
    ]
    first, second = DcpFolder(made), DcpFolder(twice)
    assert all(torch.equal(first.read(key), second.read(key)) for key in keys | second.tensors.keys())


def test_weights_are_converted_to_the_requested_dtype(tmp_path: Path) -> None:
    model = save_plain(tmp_path / "hf", family("llama"))
    folder = DcpFolder(to_megatron(tmp_path / "hf", tmp_path / "made", dtype="bf16"))
    assert {tensor.dtype for tensor in folder.tensors.values()} == {torch.bfloat16}
    assert torch.equal(folder.read("decoder.final_layernorm.weight"), model.model.norm.weight.bfloat16())


def test_a_dcp_folder_is_converted_with_the_job(tmp_path: Path) -> None:
    model = save_plain(tmp_path / "hf", family("llama"))
    torch_dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    job = Job(model=Model(config=family("llama")))
    made = to_megatron(tmp_path / "dcp", tmp_path / "made", job=job)
    assert same_weights(load(to_huggingface(made, tmp_path / "again", job=job)).state_dict(), model.state_dict())


def test_damage_of_the_source_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    model = save_plain(tmp_path / "hf", family("llama"))
    torch_dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / "__0_0.distcp"
    content = file.read_bytes()
    raw = model.model.norm.weight.detach().numpy().tobytes()
    assert content.count(raw) == 1
    file.write_bytes(content.replace(raw, bytes(len(raw))))
    with pytest.raises(CheckpointError, match=r"model.norm.weight in __0_0.distcp is refused"):
        to_megatron(tmp_path / "dcp", tmp_path / "made", job=Job(model=Model(config=family("llama"))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf"]


def test_one_layer_is_read_from_its_chunks_alone(tmp_path: Path) -> None:
    folder, name = DcpFolder(folder_of("mixtral")), "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    full = folder.read(name)
    assert all(torch.equal(folder.read(name, (layer,)), full[layer]) for layer in range(2))
    assert torch.equal(folder.read(name, (1, 3)), full[1, 3])


def resave(tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Save the tensors of qwen3 again, with a change."""
    folder = DcpFolder(folder_of("qwen3"))
    tensors = {name: folder.read(name) for name in folder.tensors}
    change(tensors)
    torch_dcp.save(tensors, checkpoint_id=tmp_path / "changed", no_dist=True)
    shutil.copy(folder_of("qwen3") / "metadata.json", tmp_path / "changed")
    return tmp_path / "changed"


def name_norms(tensors: dict[str, Tensor]) -> None:
    """Names of norms that are not fused with the linear module after them."""
    for old, new in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
        tensors[f"decoder.layers.{new}.weight"] = tensors.pop(f"decoder.layers.{old}.layer_norm_weight")


def add_optimizer(tensors: dict[str, Tensor]) -> None:
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(16)
    tensors["chained_0.optimizer.state.exp_avg.output_layer.weight"] = torch.ones(3)


@pytest.mark.parametrize("change", [name_norms, add_optimizer])
def test_other_names_of_norms_are_known_and_optimizer_states_ignored(change: Any, tmp_path: Path) -> None:
    expected = load(to_huggingface(folder_of("qwen3"), tmp_path / "hf", job=job_of("qwen3"))).state_dict()
    found = load(to_huggingface(resave(tmp_path, change), tmp_path / "changed-hf", job=job_of("qwen3")))
    assert same_weights(found.state_dict(), expected)


def add_weight(tensors: dict[str, Tensor]) -> None:
    tensors["vision.patches.weight"] = torch.ones(3)


def drop_weight(tensors: dict[str, Tensor]) -> None:
    del tensors["decoder.layers.self_attention.linear_proj.weight"]


def drop_rows(tensors: dict[str, Tensor]) -> None:
    tensors["output_layer.weight"] = tensors["output_layer.weight"][:119]


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        (add_weight, {}, "1 tensors are not part of the model: vision.patches.weight"),
        (drop_weight, {}, "decoder.layers.self_attention.linear_proj.weight is missing"),
        (drop_rows, {}, r"output_layer.weight has the shape \(119, 16\)"),
        (None, {"num_hidden_layers": 3}, r"layer_norm_weight has the shape \(2, 16\)"),
        (None, {"num_key_value_heads": 4}, r"linear_qkv.weight has the shape \(2, 64, 16\)"),
        (None, {"tie_word_embeddings": True}, "1 tensors are not part of the model: output_layer.weight"),
        (None, family("gpt2"), "the model is a gpt2, which has no counterpart"),
    ],
)
def test_a_folder_that_is_not_the_model_is_refused(
    change: Any, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = resave(tmp_path, change) if change else folder_of("qwen3")
    job = Job(model=Model(config=changes)) if "model_type" in changes else job_of("qwen3", **changes)
    with pytest.raises(CheckpointError, match=words):
        to_huggingface(source, tmp_path / "to", job=job)
    assert not (tmp_path / "to").exists()


def test_other_formats_and_places_are_refused(tmp_path: Path) -> None:
    for convert in (to_huggingface, to_checkpoint):
        with pytest.raises(CheckpointError, match="does not name its model"):
            convert(folder_of("qwen3"), tmp_path / "to")
        with pytest.raises(CheckpointError, match="has 1 checkpoints of Megatron-Core"):
            convert(copy_run(tmp_path), tmp_path / "to")
    with pytest.raises(CheckpointError, match="is already a checkpoint of Megatron-Core"):
        to_megatron(folder_of("qwen3"), tmp_path / "to")
    copy = tmp_path / "run" / "iter_0000001"
    for text, words in (
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', "the format 'zarr'"),
        ("[", "read"),
    ):
        (copy / "metadata.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            to_huggingface(copy, tmp_path / "to", job=job_of("qwen3"))


def copy_run(tmp_path: Path) -> Path:
    """Folder of a run of Megatron-LM, with one checkpoint."""
    if not (tmp_path / "run").exists():
        shutil.copytree(folder_of("qwen3"), tmp_path / "run" / "iter_0000001")
    return tmp_path / "run"


def test_common_pt_is_never_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = copy_run(tmp_path) / "iter_0000001"
    (folder / "common.pt").write_bytes(pickle.dumps(Touch(canary)))
    to_huggingface(folder, tmp_path / "hf", job=job_of("qwen3"))
    assert not canary.exists()


@pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed")
@pytest.mark.slow("starts processes of megatron-core")
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mixtral"])
def test_megatron_core_loads_what_is_written_and_its_logits_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.checkpoint.sources.FILE_BYTES", 2**13)
    world = {"qwen3": [2, 1, 1], "qwen2": [1, 2, 1], "mixtral": [1, 1, 2]}[name]
    config = json.loads((SAVED / name / "config.json").read_text())
    model = save_plain(tmp_path / "hf", config)
    made = to_megatron(tmp_path / "hf", tmp_path / "made")
    assert len(list(made.glob("*.distcp"))) > 1  # as of a large model
    tasks = [
        {"world": world, "load": str(made), "save": str(tmp_path / "resaved")},
        {"world": [1, 1, 1], "load": str(tmp_path / "resaved"), "logits": str(tmp_path / "logits")},
    ]
    command = [sys.executable, megatron_core.__file__, str(SAVED / name / "config.json"), *map(json.dumps, tasks)]
    subprocess.run(command, check=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = load_file(tmp_path / "logits")["logits"]
    torch.testing.assert_close(found, model.eval()(megatron_core.IDS).logits, rtol=1e-5, atol=1e-5)
    again = load(to_huggingface(tmp_path / "resaved", tmp_path / "again", job=job_of(name)))
    assert same_weights(again.state_dict(), model.state_dict())
