"""Conversion between checkpoints and Hugging Face folders: bitwise equal, and without partial output."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.lab.checkpoints import tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint.convert import to_checkpoint, to_huggingface
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest, verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.checkpoint.source_folder import detect_format
from weft.errors import CheckpointError, WeftError
from weft.job import Job, Model
from weft.plan import Plan, Precision
from weft.planner.train import train
from weft.training.metrics import read_metrics

TIED = {"num_hidden_layers": 4, "tie_word_embeddings": True}
# family: (configuration changes, ranks, parallel degrees of the plan that writes the checkpoint)
WRITTEN: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "llama": (TIED, 4, {"pp": 2, "zero": 3}),
    "phi3": ({}, 2, {"tp": 2}),  # packed projections
    "gpt2": ({}, 2, {"tp": 2}),  # tied, packed, with biases
    "qwen3_moe": ({}, 2, {"ep": 2}),  # experts are stacked in memory and separate in files
    "deepseek_v3": ({}, 1, {}),  # has a persistent buffer
}


def save_plain(folder: Path, name: str, changes: dict[str, Any] = {}, **options: Any) -> Model:  # noqa: B006
    source = Model(config={**family(name), **changes}, init_seed=5)
    build_plain(source, read_config(source), torch.float32).save_pretrained(folder, **options)
    return Model(path=str(folder))


def names_in(folder: Path) -> list[str]:
    """Keys of all safetensors files of a folder."""
    found: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found += opened.keys()
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_checkpoint_to_huggingface_keeps_weights_and_logits(name: str, tmp_path: Path) -> None:
    changes, ranks, degrees = WRITTEN[name]
    source = Model(config={**family(name), **changes})
    weights = run_ranks(ranks, train_and_save, source, plan_for("fp32", **degrees), tmp_path / "run", (0, 1), None)[0]
    found: Any = AutoModelForCausalLM.from_pretrained(
        to_huggingface(folder_of(tmp_path / "run", 1), tmp_path / "hf"), dtype="auto"
    )
    expected: Any = build_plain(source, read_config(source), torch.float32)
    before = expected.state_dict()["model.embed_tokens.weight" if name != "gpt2" else "transformer.wte.weight"].clone()
    expected.load_state_dict(weights)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key
    assert not torch.equal(before, found.get_input_embeddings().weight)  # training changed the weights
    ids = torch.arange(32).view(2, 16)
    assert torch.equal(found.eval()(ids).logits, expected.eval()(ids).logits)
    assert ("lm_head.weight" in names_in(tmp_path / "hf")) is (name not in ("llama", "gpt2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize("name", WRITTEN)
def test_huggingface_to_checkpoint_equals_the_checkpoint_of_step_0(name: str, tmp_path: Path) -> None:
    changes, ranks, degrees = WRITTEN[name]
    source = save_plain(tmp_path / "hf", name, changes)
    run_ranks(ranks, train_and_save, source, plan_for("fp32", **degrees), tmp_path / "run", (0, 0), None)
    taken = folder_of(tmp_path / "run", 0)
    found = to_checkpoint(tmp_path / "hf", tmp_path / "made")
    expected, tensors = tensors_of(taken), tensors_of(found)
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].dtype == tensor.dtype, key
        assert torch.equal(tensors[key], tensor), key
    position = read_manifest(taken).position
    assert position.parameter_groups  # weights have no optimizer, and so no settings
    assert read_manifest(found).position == position.model_copy(update={"parameter_groups": ()})


def test_sharded_files_are_converted_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models have several weight files with an index, and several checkpoint files."""
    monkeypatch.setattr("weft.checkpoint.sources.FILE_BYTES", 2**13)
    save_plain(tmp_path / "hf", "qwen3_moe", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    folder = to_checkpoint(tmp_path / "hf", tmp_path / "made")
    manifest = verify_folder(folder)
    assert len(manifest.files) > 10
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    found = tensors_of(folder)
    for key, weight in plain.named_parameters():
        assert torch.equal(found[f"weights/{key}"], weight), key
    again = AutoModelForCausalLM.from_pretrained(to_huggingface(folder, tmp_path / "again"))
    assert all(torch.equal(again.state_dict()[key], value) for key, value in plain.state_dict().items())


def test_weights_are_converted_to_the_requested_dtype(tmp_path: Path) -> None:
    save_plain(tmp_path / "hf", "llama")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    job = Job(plan=Plan(precision=Precision(update="bf16")))
    half = tensors_of(to_checkpoint(tmp_path / "hf", tmp_path / "bf16", job=job))
    assert all(torch.equal(half[f"weights/{key}"], value.bfloat16()) for key, value in plain.items())
    full = to_checkpoint(tmp_path / "hf", tmp_path / "fp32")
    for dtype in ("fp16", "bf16"):
        folder = to_huggingface(full, tmp_path / f"to-{dtype}", dtype=dtype)
        format = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        assert all(torch.equal(found[key], value.to(format)) for key, value in plain.items())
    same = AutoModelForCausalLM.from_pretrained(to_huggingface(tmp_path / "bf16", tmp_path / "same"), dtype="auto")
    assert same.dtype == torch.bfloat16


def test_training_from_a_converted_checkpoint_equals_training_from_the_folder(tmp_path: Path) -> None:
    """A run from the converted checkpoint is bitwise equal to a run from the Hugging Face folder."""
    table = {**family("llama"), "vocab_size": 300}
    save_plain(tmp_path / "hf", "llama", {"vocab_size": 300})
    path = write_job(tmp_path, model={"config": table})
    begun = Job.load(path, [f"out={tmp_path / 'begun'}"]).model_copy(update={"model": Model(path=str(tmp_path / "hf"))})
    made = to_checkpoint(tmp_path / "hf", tmp_path / "made", job=begun)
    resumed = Job.load(path, [f"out={tmp_path / 'resumed'}"])  # the job alone would initialize a new model
    train(begun, ranks=1, log=lambda text: None)
    train(resumed, ranks=1, resume=str(made), log=lambda text: None)
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("begun", "resumed"))
    assert [row.step for row in second] == [1, 2]
    assert [(row.loss, row.grad_norm) for row in first] == [(row.loss, row.grad_norm) for row in second]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Minimal run folder: a checkpoint at step 0, and prepared.json."""
    save_plain(tmp_path / "hf", "llama")
    (tmp_path / "run").mkdir()
    to_checkpoint(tmp_path / "hf", folder_of(tmp_path / "run", 0))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    note = {"tokenizer": str(tmp_path / "tokenizer"), "end_of_text": 7}
    (tmp_path / "run" / "prepared.json").write_text(json.dumps(note))
    return tmp_path / "run"


def test_the_tokenizer_of_the_run_or_a_named_one_is_copied(run: Path, tmp_path: Path) -> None:
    source, another = folder_of(run, 0), tmp_path / "another"
    assert (to_huggingface(source, tmp_path / "a") / "tokenizer.json").read_text() == "{}"
    another.mkdir()
    (another / "tokenizer.json").write_text("[]")
    assert (to_huggingface(source, tmp_path / "b", tokenizer=another) / "tokenizer.json").read_text() == "[]"
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    assert to_huggingface(source, tmp_path / "c", tokenizer=another)
    with pytest.raises(CheckpointError, match="tokenizer of the run is no longer in"):
        to_huggingface(source, tmp_path / "d")
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        to_huggingface(source, tmp_path / "d", tokenizer=tmp_path / "run")
    (run / "prepared.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        to_huggingface(source, tmp_path / "d")
    alone = source.rename(tmp_path / "alone")
    assert not list(to_huggingface(alone, tmp_path / "e").glob("tokenizer*"))


def test_a_newly_initialized_model_gets_the_eos_id_of_the_run_tokenizer(run: Path, tmp_path: Path) -> None:
    job = Job(model=Model(config=family("llama")))
    assert read_config(Model(path=str(to_huggingface(folder_of(run, 0), tmp_path / "a", job=job)))).eos_token_id == 7
    assert read_config(Model(path=str(to_huggingface(folder_of(run, 0), tmp_path / "b")))).eos_token_id == 2


def test_folder_formats_are_detected(run: Path, tmp_path: Path) -> None:
    assert detect_format(folder_of(run, 0)) == "checkpoint"
    assert detect_format(tmp_path / "hf") == "huggingface"
    (tmp_path / "file").touch()
    for source, words in (
        (run, "is a run with 1 checkpoints"),
        (tmp_path / "tokenizer", "nothing to convert"),
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path / "file", "is a file"),
    ):
        for convert in (to_huggingface, to_checkpoint):
            with pytest.raises(CheckpointError, match=words) as caught:
                convert(source, tmp_path / "to")
            assert "manifest.json" in str(caught.value.rule)


def damage_file(run: Path) -> None:
    file = folder_of(run, 0) / "shard-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def damage_folder(run: Path) -> None:
    file = run.parent / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def replace_by_pickle(run: Path) -> None:
    folder = run.parent / "hf"
    torch.save({"x": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def take_target(run: Path) -> None:
    (run.parent / "to").mkdir()


def link_target(run: Path) -> None:
    (run.parent / "to").symlink_to("nowhere")


def nothing(run: Path) -> None:
    """Leave the source undamaged."""


ANOTHER = Job(model=Model(config={**family("llama"), "num_hidden_layers": 1}))
WIDER = Job(model=Model(config={**family("llama"), "intermediate_size": 64}))


@pytest.mark.parametrize(
    ("to", "damage", "options", "words"),
    [
        ("hf", damage_file, {}, "has the digest"),
        ("hf", take_target, {}, "to exists"),
        ("hf", link_target, {}, "to exists"),
        ("hf", nothing, {"job": ANOTHER}, "the model has no such weight"),
        ("hf", nothing, {"job": WIDER}, "weights/model.layers.0.mlp.down_proj.weight has the shape"),
        ("weft", damage_folder, {}, "the weights cannot be read"),
        ("weft", replace_by_pickle, {}, "the weights are in pytorch_model.bin"),
        ("weft", take_target, {}, "to exists"),
    ],
)
def test_a_failed_conversion_leaves_no_files(
    to: str, damage: Any, options: dict[str, Any], words: str, run: Path, tmp_path: Path
) -> None:
    damage(run)
    before = sorted(tmp_path.rglob("*"))
    convert, source = (to_huggingface, folder_of(run, 0)) if to == "hf" else (to_checkpoint, tmp_path / "hf")
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "to", **options)
    assert words in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_conversion_to_the_same_format_or_into_the_source_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already a Hugging Face folder"):
        to_huggingface(tmp_path / "hf", tmp_path / "to")
    with pytest.raises(CheckpointError, match="already a checkpoint"):
        to_checkpoint(folder_of(run, 0), tmp_path / "to")
    with pytest.raises(CheckpointError, match="is inside"):
        to_huggingface(folder_of(run, 0), folder_of(run, 0) / "hf")
    verify_folder(folder_of(run, 0))


def test_a_moved_model_folder_needs_a_job(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").rename(tmp_path / "moved")
    with pytest.raises(WeftError, match="there is no file"):
        to_huggingface(folder_of(run, 0), tmp_path / "to")
    job = Job(model=Model(path=str(tmp_path / "moved")))
    assert to_huggingface(folder_of(run, 0), tmp_path / "to", job=job).is_dir()


def test_a_missing_weights_file_is_refused(tmp_path: Path) -> None:
    save_plain(tmp_path / "hf", "llama", max_shard_size="20KB")
    sorted((tmp_path / "hf").glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError):
        to_checkpoint(tmp_path / "hf", tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("share", [0.3, 1.5])
def test_a_full_disk_leaves_no_files(share: float, run: Path, tmp_path: Path) -> None:
    """The disk is too small for the weights, or for the second copy that --to hf needs temporarily."""
    small, size = tmp_path / "small", (tmp_path / "hf" / "model.safetensors").stat().st_size
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(size * share)}", "tmpfs", str(small)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            to_huggingface(folder_of(run, 0), small / "to")
        assert list(small.iterdir()) == []
        if share < 1:
            with pytest.raises(CheckpointError, match="MiB are free"):
                to_checkpoint(tmp_path / "hf", small / "to")
            assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)  # the exception still holds mapped files
