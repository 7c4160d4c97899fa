"""Model configurations: keys without effect, downloads, and weights outside the model folder are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.families import family
from weft.checkpoint.convert import to_checkpoint
from weft.checkpoint.huggingface import convert_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import CheckpointError, ModelError
from weft.job import Model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model in two shards."""
    folder = tmp_path / "model"
    source = Model(config={**family("llama"), "vocab_size": 512})
    build_plain(source, read_config(source), torch.float32).save_pretrained(folder, max_shard_size="40KB")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.must(
    'fault: A configuration names a kernel on a hub (`attn_implementation = "x/y"`), or a key that the family never reads'
)
@pytest.mark.parametrize(
    ("table", "what", "fix"),
    [
        ({**family("llama"), "hiden_size": 48}, "hiden_size is no key of llama", "write 'hidden_size'"),
        ({**family("qwen3_moe"), "num_expert": 8}, "num_expert is no key of qwen3_moe", "write 'num_experts'"),
        ({**family("llama"), "colour": "blue"}, "colour is no key of llama", "remove the key"),
        (
            {"model_type": "gemma3", "text_config": {"hidden_sizes": 48}},
            "text_config.hidden_sizes is no key of gemma3_text",
            "write 'hidden_size'",
        ),
    ],
)
def test_a_key_that_the_family_never_reads_is_refused(table: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(Model(config=table))
    assert caught.value.what == what
    assert caught.value.fix == fix


def test_keys_written_by_save_pretrained_are_accepted(folder: Path) -> None:
    """Aliases, parts and what save_pretrained adds, as a table as well."""
    table = json.loads((folder / "config.json").read_text())
    assert read_config(Model(config=table)).to_dict() == read_config(Model(path=str(folder))).to_dict()
    assert read_config(Model(config={**family("gpt2"), "hidden_size": 64})).n_embd == 64


@pytest.mark.must(
    'fault: A configuration names a kernel on a hub (`attn_implementation = "x/y"`), or a key that the family never reads'
)
@pytest.mark.parametrize("chosen", ["kernels-community/flash-attn", {"": "x/y"}])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_kernel_on_a_hub_is_refused(folder: Path, key: str, chosen: Any) -> None:
    change_config(folder, **{key: chosen})
    for source in (Model(path=str(folder)), Model(config={**family("llama"), key: chosen})):
        with pytest.raises(ModelError, match="names a kernel on a hub"):
            read_config(source)


@pytest.mark.must(
    "fault: The model's folder has a pickle, a link, a file outside the folder, an adapter or quantized weights"
)
def test_quantized_weights_are_refused_and_initialized_weights_are_not_quantized(folder: Path, tmp_path: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"the weights are quantized \(fp8\)"):
        to_checkpoint(folder, tmp_path / "converted")
    with pytest.raises(ModelError, match=r"the weights are quantized \(fp8\)"):
        convert_folder(folder, tmp_path / "exported", "fp32")
    fresh = read_config(Model(config=str(folder / "config.json")))
    assert "quantization_config" not in fresh.to_dict()


@pytest.mark.must(
    "fault: The model's folder has a pickle, a link, a file outside the folder, an adapter or quantized weights"
)
def test_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(CheckpointError, match=r"it is an adapter, or a model with an adapter(.|\n)*merge_and_unload"):
        to_checkpoint(folder, tmp_path / "converted")


@pytest.mark.parametrize("name", ["weights.bin", "../weights.safetensors", "/weights.safetensors", 7])
def test_a_configuration_that_names_weights_outside_its_folder_is_refused(
    folder: Path, tmp_path: Path, name: Any
) -> None:
    change_config(folder, transformers_weights=name)
    with pytest.raises(ModelError, match="transformers_weights"):
        to_checkpoint(folder, tmp_path / "converted")


def test_a_weights_file_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    (folder / "weights.safetensors").symlink_to(tmp_path / "weights.safetensors")
    change_config(folder, transformers_weights="weights.safetensors")
    with pytest.raises(CheckpointError, match="which is a link"):
        to_checkpoint(folder, tmp_path / "converted")


def test_a_hugging_face_cache_folder_is_read(folder: Path, tmp_path: Path) -> None:
    """In the cache, all files are links to ../../blobs; links to any other target are refused."""
    cached = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    cached.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "models--a--b" / "blobs" / str(number))
        (cached / file.name).symlink_to(Path("../../blobs") / str(number))
    to_checkpoint(cached, tmp_path / "converted")
    shard = next(cached.glob("model-*.safetensors"))
    outside = tmp_path / "outside"
    shard.resolve().rename(outside)
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match="which is a link"):
        to_checkpoint(cached, tmp_path / "again")
