"""Model folders that cannot be trained are named before a rank computes; buffers that no file has are those of `__init__`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoint.own_classes import OwnConfig, OwnModel
from tests.lab.families import FAMILIES, family
from tests.lab.jobs import write_job
from tests.lab.pool import RankError
from tests.lab.runs import observe
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, find_slices
from weft.checkpoint.source_folder import detect_format
from weft.compress.recipe import read_recipe
from weft.compress.run import compress
from weft.errors import CheckpointError, ModelError, WeftError
from weft.evaluation.source import model_folder
from weft.job import Job, Model
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import check_job

TABLE = {**family("llama"), "vocab_size": 300}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any] = lambda weights: None, **shards: Any) -> Path:
    """Folder of a small Llama whose weights a function has changed."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TABLE)).save_pretrained(folder, **shards)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        change(weights)
        save_file(weights, file, {"format": "pt"})
    return folder


def job_of(folder: Path, model: str | Path, **tables: Any) -> Job:
    folder.mkdir(exist_ok=True)
    job = Job.load(write_job(folder, **tables))
    return Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(model)}})


def refusal_before_the_run_folder(folder: Path, model: str | Path, **tables: Any) -> WeftError:
    """Error of `weft train`, which has not made a run folder."""
    with pytest.raises(WeftError) as caught:
        observe(job_of(folder, model, **tables), 2)
    assert not (folder / "run" / "job.toml").exists()
    return caught.value


def trainer_job(model: str) -> TrainerJob:
    tables = {"out": "unused", "model": {"path": model}, "data": {"path": "unused"}, "trainer": {"kind": "dpo"}}
    return TrainerJob.model_validate(tables)


# Weights


def int8(weights: dict[str, torch.Tensor]) -> None:
    if WEIGHT in weights:
        weights[WEIGHT] = (weights[WEIGHT] * 100).to(torch.int8)


def fp8(weights: dict[str, torch.Tensor]) -> None:
    if WEIGHT in weights:
        weights[WEIGHT] = weights[WEIGHT].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("change", "dtype"), [(int8, "I8"), (fp8, "F8_E4M3")])
def test_quantized_weights_without_scales_are_named_with_their_file(
    change: Callable[[Any], None], dtype: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "model", change, max_shard_size="40KB")
    file = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][WEIGHT]
    errors = [
        refusal_before_the_run_folder(tmp_path, source),
        refusal_before_the_run_folder(tmp_path, source, adapter={"kind": "lora"}),
    ]
    for call in (
        lambda: build_plain(Model(path=str(source)), read_config(Model(path=str(source))), torch.float32),
        lambda: compress(source, tmp_path / "small", read_recipe("int8"), None, lambda line: None),
        lambda: model_folder(source, None).__enter__(),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        errors.append(caught.value)
    for error in errors:
        assert (error.what, error.where) == (f"{WEIGHT} is stored as {dtype}", str(source / file))
    assert not (tmp_path / "small").exists()


def test_integers_that_are_no_weights_are_read(tmp_path: Path) -> None:
    def add_masks(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        weights["model.position_ids"] = torch.arange(8)

    source = Model(path=str(saved(tmp_path, add_masks)))
    assert build_plain(source, read_config(source), torch.float32) is not None


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_weight_whose_square_overflows_is_named_with_its_file(adapter: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "model", lambda weights: weights[WEIGHT][3, 2].fill_(-1e38))
    with pytest.raises(RankError, match=r"up_proj\.\S*weight has a weight of 1e\+38") as caught:
        observe(job_of(tmp_path, source, adapter={"kind": adapter}), 2)
    assert str(source / "model.safetensors") in str(caught.value)


def test_large_weights_that_a_step_can_use_are_trained(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", lambda weights: weights[WEIGHT][3, 2].fill_(1e15))
    assert len(observe(job_of(tmp_path, source, train={"steps": 1}), 2).losses) == 1


@pytest.mark.parametrize("parallel", [{"zero": 2}, {"zero": 0}, {"tp": 2, "zero": 3}], ids=str)
def test_weights_of_several_parts_are_read_from_a_folder(parallel: dict[str, Any], tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    losses = []
    for weights in ("whole", "split_even"):
        plan = {"precision": {"param_dtype": "bf16", "weights": weights}, "parallel": parallel}
        losses.append(observe(job_of(tmp_path / weights, source, plan=plan), 2).losses)
    assert losses[0] == losses[1]


# Folders


def test_a_folder_without_weights_is_refused_before_a_run_folder_is_made(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    (source / "model.safetensors").unlink()
    error = refusal_before_the_run_folder(tmp_path, source)
    assert isinstance(error, ModelError)
    assert error.what == f"{source} has a config.json, and no *.safetensors file"
    assert f'model.config = "{source}/config.json"' in str(error.fix)
    saved(tmp_path / "student")
    settings: dict[str, Any] = {"train": {"loss": "weft:distillation"}, "distillation": {"teacher": str(source)}}
    error = refusal_before_the_run_folder(tmp_path, tmp_path / "student", **settings)
    assert (error.where, error.what) == (
        "distillation.teacher",
        f"{source} has a config.json, and no *.safetensors file",
    )
    (source / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \*.safetensors file"):
        check_job(trainer_job(str(source)), 2)


def test_the_id_of_a_model_on_the_hub_is_named_in_every_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen2.5-0.5B"
    doors: dict[str, Callable[[], Any]] = {
        "weft train": lambda: observe(job_of(tmp_path, name), 2),
        "model.config": lambda: read_config(Model(config=name)),
        "a trainer": lambda: check_job(trainer_job(name), 2),
        "weft compress": lambda: compress(Path(name), Path("small"), read_recipe("int8"), None, lambda line: None),
        "weft eval": lambda: model_folder(Path(name), None).__enter__(),
        "weft checkpoint convert": lambda: detect_format(Path(name)),
    }
    for door, call in doors.items():
        with pytest.raises(ModelError) as caught:
            call()
        assert caught.value.what == f"there is no folder {name}; it looks like a Hub id", door
        assert f"`hf download {name} --local-dir models/Qwen2.5-0.5B`" in str(caught.value.fix), door


def test_a_path_with_a_typing_error_is_no_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/qwem", "qwen", "./Qwen/Qwen3", "/Qwen/Qwen3", "a/b/c", "configs/qwen.json"):
        with pytest.raises(ModelError, match="there is no file"):
            read_config(Model(config=path) if path.endswith("json") else Model(path=path))


def test_a_model_with_code_in_its_folder_needs_a_package(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "them/repo--modeling_x.XModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo_x", "auto_map": code}))
    with pytest.raises(ModelError) as caught:
        read_config(Model(path=str(tmp_path)))
    assert "its code is configuration_x.py, modeling_x.py" in caught.value.what
    assert "model.package" in str(caught.value.fix)
    assert "'olmo" not in str(caught.value.fix)


# Buffers


def test_buffers_that_no_file_has_are_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = OwnModel(OwnConfig())
    plain.save_pretrained(tmp_path)
    source = Model(path=str(tmp_path))
    found = build_plain(source, read_config(source), torch.float32)
    buffers = dict(plain.named_buffers())
    assert float(buffers["layers.0.self_attn.known"][0]) == 7  # `_init_weights` counts, and not `__init__`
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    ids = torch.arange(8)[None]
    assert torch.equal(found(ids).logits, plain(ids).logits)
    slices = find_slices(source, read_config(source), torch.float32, "causal")
    assert slices is not None
    for name, buffer in slices[0].named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_buffers_of_the_library_are_those_of_a_new_model(name: str, tmp_path: Path) -> None:
    source = Model(config=family(name))
    plain = build_plain(source, read_config(source), torch.float32)
    plain.save_pretrained(tmp_path)
    folder = Model(path=str(tmp_path))
    found = dict(build_plain(folder, read_config(folder), torch.float32).named_buffers())
    for key, buffer in plain.named_buffers():
        assert torch.equal(found[key], buffer), key
