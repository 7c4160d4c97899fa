"""Exports: the files around the weights, the configuration, and tied weights, in every door that writes a model folder."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, GenerationConfig

import weft
from tests.checkpoint import own_classes
from tests.checkpoint.own_classes import OwnConfig
from tests.integrations.scripts_in_pool import under
from tests.lab.exports import GENERATION, PUBLISHED, differences, publish
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from tests.lab.runs import ObservedRun, observe, plain_held_out_loss
from weft.adapters.folder import export_adapters
from weft.checkpoint.convert import to_huggingface
from weft.checkpoint.export_files import source_of
from weft.checkpoint.folders import folder_of
from weft.checkpoint.huggingface import convert_folder, save_model
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.compress.recipe import read_recipe
from weft.compress.run import compress
from weft.data.tokenizer import train_tokenizer
from weft.errors import CheckpointError, ModelError
from weft.evaluation.source import load_tokenizer, model_folder
from weft.job import Job, Model
from weft.plan import Plan
from weft.posttraining.export import keep_files

TABLE = {**family("llama"), "vocab_size": 300}


def published(folder: Path, **changes: Any) -> Path:
    """A bf16 model with a tokenizer and files around it, whose config.json an older version has written."""
    table = {**TABLE, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    train_tokenizer(["The quick brown fox jumps. "] * 20, vocab_size=300, folder=folder)
    publish(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("published") / "model")


def run_of(folder: Path, source: Path, **tables: Any) -> ObservedRun:
    """Run of one step that changes no weight by more than a rounding."""
    folder.mkdir(exist_ok=True)
    tables = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "train": {"steps": 1, "global_batch_size": 4}, **tables}
    path = write_job(folder, checkpoint={"every": 1}, **tables)
    job = Job.parse({**Job.load(path).model_dump(exclude_none=True), "model": {"path": str(source)}})
    return observe(job, 2)


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("run"), source).folder


def own_loop(rank: int, ranks: int, model: Callable[[], Any], export: Path, change: Callable[[Any], None]) -> None:
    run = weft.prepare(model(), optimizer=partial(torch.optim.SGD, lr=1e-30), plan=plan_for("fp32"))
    change(run.model)
    before = run.model.config.to_dict() if hasattr(run.model, "config") else None
    run.export(export)
    assert before is None or before == run.model.config.to_dict()


def unchanged(model: Any) -> None:
    pass


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


# Files around the weights


def test_an_export_of_a_run_differs_from_its_source_in_what_training_changed(run: Path, source: Path) -> None:
    assert differences(source, run / "export") == ({"config.json", "model.safetensors"}, {"torch_dtype"})
    assert json.loads((run / "export" / "config.json").read_text())["torch_dtype"] == "float32"
    assert all(weight.dtype == torch.float32 for weight in load_file(run / "export" / "model.safetensors").values())
    assert load(run / "export").config.use_cache


def test_exports_of_runs_and_checkpoints_differ_from_the_source_in_what_training_changed(
    run: Path, source: Path, tmp_path: Path
) -> None:
    convert_folder(run / "export", tmp_path / "end", "bf16")
    to_huggingface(folder_of(run, 1), tmp_path / "step", dtype="bf16", run=run)
    assert differences(source, tmp_path / "step") == (set(), set())  # the same bf16 weights
    assert differences(source, tmp_path / "end") == ({"config.json"}, set())  # of the export: indented


def test_merged_adapters_differ_from_their_base_in_the_weights(source: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, source, adapter={"kind": "lora", "r": 4}).folder
    export_adapters(run, tmp_path / "merged", merge=True, dtype="fp32")
    assert differences(source, tmp_path / "merged") == ({"config.json", "model.safetensors"}, {"torch_dtype"})
    around = {path.name for path in (run / "export").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "adapter_config.json"} <= around
    assert not around & {"generation_config.json", "config.json"}  # those of the base


def test_compressed_models_differ_in_weights_and_in_what_describes_them(source: Path, tmp_path: Path) -> None:
    for recipe, keys in {
        "int8": {"quantization_config"},
        "prune=0.5": {"intermediate_size", "num_attention_heads"},
    }.items():
        rows = torch.randint(0, 300, (8, 32)) if recipe != "int8" else None
        compress(source, tmp_path / recipe, read_recipe(recipe), rows, lambda line: None)
        files, found = differences(source, tmp_path / recipe)
        assert files == {"config.json", "model.safetensors"}, recipe
        assert keys <= found <= keys | {"num_key_value_heads"}, recipe


def test_an_export_of_a_loop_keeps_the_files_of_the_folder_that_it_has_loaded(source: Path, tmp_path: Path) -> None:
    run_ranks(2, own_loop, partial(AutoModelForCausalLM.from_pretrained, source), tmp_path / "export", unchanged)
    files, keys = differences(source, tmp_path / "export")
    assert (files, keys) == ({"config.json", "model.safetensors", ".weft-export"}, {"torch_dtype"})


def change_generation(model: Any) -> None:
    model.generation_config.temperature = 0.5


def test_settings_of_generation_that_a_loop_has_changed_are_written(source: Path, tmp_path: Path) -> None:
    make = partial(AutoModelForCausalLM.from_pretrained, source)
    run_ranks(1, own_loop, make, tmp_path / "export", change_generation)
    found = GenerationConfig.from_pretrained(tmp_path / "export")
    assert {key: getattr(found, key) for key in GENERATION} == {**GENERATION, "temperature": 0.5}


def test_a_run_ends_well_where_the_settings_of_its_model_do_not_generate(tmp_path: Path) -> None:
    """Strings that end a text need a tokenizer, which the sample of a run does not pass."""
    source = published(tmp_path / "model")
    (source / "generation_config.json").write_text('{"stop_strings": ["fox"]}')
    run = run_of(tmp_path, source)
    assert any(line.startswith("sample      none: ValueError") for line in run.screen)
    assert differences(source, run.folder / "export") == ({"config.json", "model.safetensors"}, {"torch_dtype"})
    assert json.loads((run.folder / "run.json").read_text())["baselines"]


SCRIPT = """
import sys, torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from tests.checkpoint.own_classes import OwnConfig, OwnModel

accelerator, (source, out) = Accelerator(cpu=True), sys.argv[1:]
if source == "own":
    OwnModel.register_for_auto_class("AutoModelForCausalLM")
    model = OwnModel(OwnConfig())
else:
    model = AutoModelForCausalLM.from_pretrained(source)
    model.generation_config.pad_token_id = 4
model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.unwrap_model(model).save_pretrained(out)
OwnModel._auto_class = None
"""


def test_a_script_saves_settings_of_generation_that_are_published_and_code_of_its_class(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for model in (str(source), "own"):
        under(Plan(), 2, str(tmp_path / "script.py"), model, tmp_path / Path(model).name)
    found = GenerationConfig.from_pretrained(tmp_path / "model")
    assert {key: getattr(found, key) for key in GENERATION} == {**GENERATION, "pad_token_id": 4}
    assert (tmp_path / "own" / "own_classes.py").read_bytes() == Path(own_classes.__file__).read_bytes()


@pytest.mark.parametrize("cached", [False, True])
def test_the_cache_of_keys_and_values_is_used_as_the_source_says(cached: bool, tmp_path: Path) -> None:
    source = published(tmp_path / "model", use_cache=cached)
    export = run_of(tmp_path, source).folder / "export"
    assert differences(source, export)[1] == {"torch_dtype"}
    model = load(export)
    found = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    assert model.config.use_cache == cached
    assert (found.past_key_values is not None) == (GenerationConfig.from_pretrained(source).use_cache is not False)


def test_a_new_model_generates_with_a_cache_and_ends_with_its_end_of_text(tmp_path: Path) -> None:
    export = observe(Job.load(write_job(tmp_path)), 2).folder / "export"
    model, end = load(export), AutoTokenizer.from_pretrained(export).eos_token_id
    assert model.config.use_cache
    assert model.generation_config.use_cache is not False
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    written = json.loads((export / "config.json").read_text())
    assert {key: written[key] for key in TABLE if key not in ("bos_token_id", "eos_token_id")}.items() <= TABLE.items()


def test_a_new_model_of_a_class_without_a_cache_is_exported(tmp_path: Path) -> None:
    """Its configuration has no key use_cache, and gets none."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(3, 300, (20, 33), dtype=np.int32))
    data = {"source": "tokens", "path": str(tmp_path / "rows.npy"), "packing": False}
    job = Job.load(write_job(tmp_path, data=data, train={"steps": 1}))
    table = {"model_type": OwnConfig.model_type, "vocab_size": 300}
    run = observe(Job.parse({**job.model_dump(exclude_none=True), "model": {"config": table}}), 2)
    assert "use_cache" not in json.loads((run.folder / "export" / "config.json").read_text())


def test_keys_that_contradict_the_new_values_are_left_out(source: Path, tmp_path: Path) -> None:
    """An older folder has num_labels beside id2label; a classifier of more classes has another number of them."""
    config = read_config(Model(path=str(source)), "classification", classes=5)
    file = source / "config.json"
    model = build_plain(Model(path=str(source)), config, torch.float32, "classification")
    table = json.loads(file.read_text())
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_text(json.dumps({**table, "num_labels": 3}))
    save_model(model, dict(model.state_dict()), tmp_path / "export", torch.float32, older)
    again = AutoConfig.from_pretrained(tmp_path / "export")
    assert again.num_labels == 5
    assert again.architectures == ["LlamaForSequenceClassification"]


def test_links_of_a_cache_are_followed_and_others_are_not(source: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(path.relative_to(source) for path in source.rglob("*") if path.is_file()):
        (blobs / str(number)).write_bytes((source / name).read_bytes())
        (snapshot / name).symlink_to(blobs / str(number))
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    with pytest.warns(UserWarning, match=r"vocab\.txt is a link out of its folder"):
        convert_folder(snapshot, tmp_path / "export", "bf16")
    assert differences(source, tmp_path / "export") == (set(), set())
    assert not any(path.is_symlink() for path in (tmp_path / "export").rglob("*"))


def snapshot_of(source: Path, cache: Path) -> Path:
    """The folder as a snapshot of a Hugging Face cache: relative links into blobs."""
    snapshot, blobs = cache / "models--a--b" / "snapshots" / "c0ffee", cache / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (cache / "models--a--b" / "refs").mkdir()
    (cache / "models--a--b" / "refs" / "main").write_text("c0ffee")
    for number, file in enumerate(path for path in source.rglob("*") if path.is_file()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


AROUND = {*PUBLISHED, "tokenizer.json", "tokenizer_config.json"}


def files_of(folder: Path) -> set[str]:
    """Names of the plain files of a folder."""
    return {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("place", ["snapshot", "link to a snapshot", "folder in a snapshot"])
def test_each_door_keeps_the_files_of_a_snapshot(place: str, source: Path, tmp_path: Path) -> None:
    """Training, its export, adapters, merged adapters, a loop, a trainer of TRL, compression and evaluation."""
    if place == "folder in a snapshot":
        (tmp_path / "pipeline").mkdir()
        shutil.copytree(source, tmp_path / "pipeline" / "part")
        model = snapshot_of(tmp_path / "pipeline", tmp_path / "hub") / "part"
    else:
        model = snapshot_of(source, tmp_path / "hub")
    if place == "link to a snapshot":
        (tmp_path / "model").symlink_to(model)
        model = tmp_path / "model"
    compress(model, tmp_path / "small", read_recipe("int8"), None, lambda line: None)
    run_ranks(1, own_loop, partial(AutoModelForCausalLM.from_pretrained, model), tmp_path / "loop", unchanged)
    run = run_of(tmp_path / "full", model).folder
    convert_folder(run / "export", tmp_path / "copy", "bf16")
    with model_folder(model, None) as (folder, _):
        load_tokenizer(folder).save_pretrained(tmp_path / "trained")
    load(model).save_pretrained(tmp_path / "trained")  # as a trainer of TRL
    keep_files(tmp_path / "trained", model)
    for export in (tmp_path / "trained", tmp_path / "small", tmp_path / "loop", run / "export", tmp_path / "copy"):
        assert files_of(export) >= AROUND, export
    adapted = run_of(tmp_path / "lora", model, adapter={"kind": "lora", "r": 4}).folder
    export_adapters(adapted, tmp_path / "merged", merge=True, dtype="fp32")
    assert files_of(tmp_path / "merged") >= AROUND
    assert files_of(adapted / "export") >= {
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    }


def test_a_loop_keeps_the_files_of_a_model_that_it_loads_by_its_id(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = snapshot_of(source, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = AutoModelForCausalLM.from_pretrained("a/b", cache_dir=tmp_path / "hub", local_files_only=True)
    assert model.config.name_or_path == "a/b"
    assert source_of(model) == snapshot


# Models that their configuration does not make


def without_pooler() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=96, **sizes), add_pooling_layer=False)


def test_a_model_made_with_arguments_is_exported(tmp_path: Path) -> None:
    run_ranks(2, own_loop, without_pooler, tmp_path / "export", unchanged)
    model, report = BertModel.from_pretrained(tmp_path / "export", add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, weight in without_pooler().state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.config.architectures == ["BertModel"]


# Tied weights


def tied_folder(folder: Path, head: str) -> Path:
    """Folder of a tied model, with a file that has the weight of the head, too: equal or other values."""
    published(folder, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone() if head == "equal" else embedding.roll(1, 0).clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_same_model(export: Path, source: Path) -> None:
    """The library loads both with the same weights, and saves them alike."""
    found, expected = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (export, source))
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=0, atol=1e-20)
    tied = [model.lm_head.weight is model.model.embed_tokens.weight for model in (found, expected)]
    assert tied[0] == tied[1] == found.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("head", "parallel"),
    [("other", {"zero": 3}), ("other", {"pp": 2}), ("other", {"zero": 0}), ("equal", {"pp": 2})],
    ids=str,
)
def test_a_run_trains_tied_weights_as_the_library_loads_them(
    head: str, parallel: dict[str, int], tmp_path: Path
) -> None:
    source = tied_folder(tmp_path / "model", head)
    plan = {"parallel": parallel, "precision": {"param_dtype": "fp32"}}
    run = run_of(tmp_path, source, plan=plan)
    first = json.loads((run.folder / "evaluations.jsonl").read_text().splitlines()[0])["held_out_loss"]
    assert_same_model(run.folder / "export", source)
    assert first == pytest.approx(plain_held_out_loss(run.folder, run.folder / "export"), rel=1e-5)
    assert any("tied weights differ" in line for line in run.screen) == (head == "other")
    assert differences(source, run.folder / "export")[1] == {"torch_dtype"} | (
        {"tie_word_embeddings"} if head == "other" else set()
    )


@pytest.mark.parametrize("head", ["equal", "other"])
def test_every_other_door_writes_tied_weights_as_the_library_loads_them(head: str, tmp_path: Path) -> None:
    source = tied_folder(tmp_path / "model", head)
    convert_folder(source, tmp_path / "converted", "fp32")
    run_ranks(2, own_loop, partial(AutoModelForCausalLM.from_pretrained, source), tmp_path / "loop", unchanged)
    for name in ("converted", "loop"):
        assert_same_model(tmp_path / name, source)


def tie_by_hand(tied: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TABLE, tie_word_embeddings=not tied))
    head = model.model.embed_tokens.weight
    model.lm_head.weight = head if tied else torch.nn.Parameter(head.detach().clone() * 2)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_a_loop_has_tied_or_untied_are_exported_as_they_are(tied: bool, tmp_path: Path) -> None:
    run_ranks(2, own_loop, partial(tie_by_hand, tied), tmp_path / "export", unchanged)
    found = load(tmp_path / "export")
    for name, weight in tie_by_hand(tied).state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


def load_on_meta(rank: int, ranks: int, source: Path) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    with pytest.raises(CheckpointError) as caught:
        weft.prepare(model, optimizer=torch.optim.AdamW, plan=plan_for("fp32"), weights=source)
    return str(caught.value)


def test_a_tied_model_of_a_loop_does_not_load_weights_that_differ(tmp_path: Path) -> None:
    source = tied_folder(tmp_path / "model", "other")
    for message in run_ranks(2, load_on_meta, source):
        assert "lm_head.weight and model.embed_tokens.weight differ" in message
        assert "set tie_word_embeddings to false" in message


def save_untied(rank: int, ranks: int, folder: Path) -> None:
    run = weft.prepare(tie_by_hand(False), optimizer=partial(torch.optim.AdamW, lr=1e-30), plan=plan_for("fp32"))
    run.save(folder / "step-1")
    run.finish()


def test_a_checkpoint_of_weights_that_a_loop_has_untied_is_converted(tmp_path: Path) -> None:
    run_ranks(2, save_untied, tmp_path)
    to_huggingface(folder_of(tmp_path, 1), tmp_path / "export")
    for name, weight in tie_by_hand(False).state_dict().items():
        assert torch.equal(load(tmp_path / "export").state_dict()[name], weight), name


def test_weights_are_exported_without_the_folder_that_they_came_from(source: Path, tmp_path: Path) -> None:
    model = load(source)
    with pytest.warns(UserWarning, match="is no longer there"):
        save_model(model, dict(model.state_dict()), tmp_path / "export", torch.float32, tmp_path / "gone")
    assert torch.equal(load(tmp_path / "export").lm_head.weight, model.lm_head.weight.float())


def test_a_folder_in_which_some_tied_weights_differ_is_refused(tmp_path: Path) -> None:
    table = {
        "model_type": "t5",
        "vocab_size": 96,
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 1,
        "num_heads": 4,
    }
    source = Model(config=table)
    config = read_config(source, "seq2seq")
    model = build_plain(source, config, torch.float32, "seq2seq")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["shared.weight"] + 1}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"lm_head.weight and shared.weight differ"):
        read_config(Model(path=str(tmp_path)), "seq2seq")
