"""Weights of Hugging Face folders: pickles are never loaded, and an export copies only listed files."""

import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.lab.commands import weft
from tests.lab.families import family
from weft.checkpoint.convert import to_checkpoint
from weft.checkpoint.export_files import EXPORTED
from weft.checkpoint.huggingface import convert_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import CheckpointError
from weft.job import Model


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Folder with a valid configuration, and a pickle that would create the file `sprung` next to the folder."""
    folder = tmp_path / "hostile"
    source = Model(config={**family("llama"), "vocab_size": 512})
    build_plain(source, read_config(source), torch.float32).save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "good.safetensors")
    torch.save({"weight": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    torch.save({"weight": Trap(tmp_path / "sprung")}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(folder / "pytorch_model.bin")
    return folder


NAMES = [
    "pytorch_model.bin",
    "../outside.safetensors",
    "{}/outside.safetensors",
    "link.safetensors",
    "absent.safetensors",
]
NAMES += ["..\\outside.safetensors", "", ".", "a\0.safetensors", "x" * 5000 + ".safetensors"]


@pytest.mark.must(
    "fault: The model's folder has a pickle, a link, a file outside the folder, an adapter or quantized weights"
)
@pytest.mark.parametrize("name", NAMES)
def test_an_index_that_names_anything_but_safetensors_of_its_folder_is_refused(
    hostile: Path, tmp_path: Path, name: str
) -> None:
    table = {"a": "good.safetensors", "b": name.format(tmp_path)}
    (hostile / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    with pytest.raises(CheckpointError, match="the index of the weights is refused: it names"):
        to_checkpoint(hostile, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="the index of the weights is refused: it names"):
        convert_folder(hostile, tmp_path / "exported", "fp32")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "9" * 5000]
)
def test_a_damaged_index_is_refused(hostile: Path, tmp_path: Path, text: str) -> None:
    (hostile / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="the index of the weights is refused"):
        to_checkpoint(hostile, tmp_path / "converted")


def test_an_index_that_is_a_fifo_is_refused(hostile: Path, tmp_path: Path) -> None:
    os.mkfifo(hostile / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        to_checkpoint(hostile, tmp_path / "converted")


@pytest.mark.must(
    "fault: The model's folder has a pickle, a link, a file outside the folder, an adapter or quantized weights"
)
def test_a_folder_with_only_a_pickle_is_refused(hostile: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights are in pytorch_model.bin(.|\n)*save_pretrained"):
        to_checkpoint(hostile, tmp_path / "converted")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.must(
    "fault: The model's folder has a pickle, a link, a file outside the folder, an adapter or quantized weights"
)
def test_weft_train_never_unpickles(hostile: Path, tmp_path: Path) -> None:
    table = {"metadata": {}, "weight_map": {"a": "pytorch_model.bin"}}
    (hostile / "model.safetensors.index.json").write_text(json.dumps(table))
    (tmp_path / "text.txt").write_text("some words to train on, over and over. " * 200)
    (tmp_path / "job.toml").write_text(
        f'out = "{tmp_path}/run"\n[model]\npath = "{hostile}"\n[data]\nsource = "text"\npath = "{tmp_path}/text.txt"\n'
        f'cache = "{tmp_path}/cache"\n'
        "seq_len = 64\nheld_out = 0\n[train]\nsteps = 1\n"
    )
    ended = weft("train", tmp_path / "job.toml")
    assert ended.returncode != 0
    assert "pytorch_model.bin" in ended.stderr + ended.stdout, ended.stderr + ended.stdout
    assert not (tmp_path / "sprung").exists()


def test_an_export_lists_the_files_of_every_tokenizer_of_transformers() -> None:
    named = set()
    for file in Path(transformers.__file__).parent.rglob("tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES\s*(?::[^=]*)?=\s*\{(.*?)\}", file.read_text(), re.DOTALL):
            named |= set(re.findall(r':\s*"([^"]+)"', table))
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(fnmatchcase(name, pattern) for pattern in EXPORTED)] == []


def test_an_export_copies_listed_files_only(hostile: Path, tmp_path: Path) -> None:
    (hostile / "good.safetensors").rename(hostile / "model.safetensors")
    (tmp_path / "secret").write_text("secret")
    for name in (
        ".env",
        "modeling_x.py",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "notes",
    ):
        (hostile / name).write_text("{}")
    (hostile / "vocab.txt").symlink_to(tmp_path / "secret")
    convert_folder(hostile, tmp_path / "exported", "fp32")
    found = {path.name for path in (tmp_path / "exported").iterdir()}
    allowed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert found == allowed
