"""weft compress: folders that plain Transformers loads in a fresh process, with the logits of the rounded weights."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from tests.compress.fresh import FreshTransformers, HereInAFork
from tests.lab.commands import completed, start_function, weft
from tests.lab.families import FAMILIES, family
from tests.lab.shrink import shrunk
from weft.compress import folder as folders
from weft.compress import run
from weft.compress.measure import PlainTransformers
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.report import compress_model
from weft.compress.run import Compressed, compress
from weft.errors import CheckpointError, DataError, JobError, ModelError

pytestmark = pytest.mark.together  # one process with plain Transformers


def save(folder: Path, name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    known = family(name) if name in FAMILIES else shrunk(name)
    table = {**known, **sizes, "head_dim": 16, "vocab_size": 96, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table)).eval()
    model.save_pretrained(folder)
    return model


def text(rows: int = 32, tokens: int = 32) -> Tensor:
    return torch.randint(0, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("head", ["equal", "other"])
@pytest.mark.parametrize("recipe", ["int8", "prune=0.5"])
def test_copies_of_tied_weights_are_read_as_the_library_reads_them(
    recipe: str, head: str, fresh: FreshTransformers, tmp_path: Path
) -> None:
    """Folders of tied models whose file has the head as well, equal to the embedding or different."""
    save(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    copy = embedding.clone() if head == "equal" else embedding.roll(1, 0).clone()
    save_file({**weights, "lm_head.weight": copy}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    rows = text()
    compress(tmp_path / "model", tmp_path / "small", read_recipe(recipe), rows, quiet)
    logits, before = (fresh.logits(tmp_path / name, rows[:4], tmp_path) for name in ("small", "model"))
    assert float((logits - before).norm() / before.norm()) < {"int8": 0.02, "prune=0.5": 0.7}[recipe]
    assert json.loads((tmp_path / "small" / "config.json").read_text())["tie_word_embeddings"] == (head == "equal")


@pytest.mark.must("format: compressed-tensors, int8", case="int8-True")
@pytest.mark.must("format: compressed-tensors, int4", case="int4-False")
@pytest.mark.must("format: compressed-tensors, fp8", case="fp8-False")
@pytest.mark.must("format: compressed-tensors, 2:4", case="2:4-False")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", ["int8", "int4", "fp8", "2:4", "int4+2:4"])
def test_a_fresh_process_loads_the_rounded_weights(
    recipe: str, tied: bool, fresh: FreshTransformers, tmp_path: Path
) -> None:
    model = save(tmp_path / "model", tie_word_embeddings=tied)
    rows = text()
    found = compress(tmp_path / "model", tmp_path / "small", read_recipe(recipe), rows, quiet)
    logits = fresh.logits(tmp_path / "small", rows[:4], tmp_path)
    with torch.no_grad():
        before = model(rows[:4]).logits
        own = rounded_model(model, tmp_path / "small")(rows[:4]).logits
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, before)
    limit = {"int8": 0.02, "int4": 0.2, "fp8": 0.08, "2:4": 0.7, "int4+2:4": 0.7}[recipe]
    assert float((logits - before).norm() / before.norm()) < limit
    assert found.bytes_before == (tmp_path / "model" / "model.safetensors").stat().st_size
    assert found.bytes_after == (tmp_path / "small" / "model.safetensors").stat().st_size
    if "int4" in recipe:
        assert found.bytes_after < 0.25 * found.bytes_before


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def rounded_model(model: Any, folder: Path) -> Any:
    """The original model with the stored values, unpacked here without the library."""
    stored = tensors_of(folder)
    weights = dict(model.state_dict())
    table = json.loads((folder / "config.json").read_text()).get("quantization_config", {"config_groups": {}})
    bits = {name: group["weights"]["num_bits"] for name, group in table["config_groups"].items()}
    for name in list(stored):
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            values = unpack(stored[name], bits["linear"], stored[f"{module}.weight_shape"].tolist())
            scale = stored[f"{module}.weight_scale"]
            weights[f"{module}.weight"] = (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
        elif kind == "weight":
            scale = stored.get(f"{module}.weight_scale", torch.ones(()))
            weights[name] = stored[name].float() * scale
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def unpack(packed: Tensor, bits: int, shape: list[int]) -> Tensor:
    """Signed integers that are packed from the lowest bits on, with an offset."""
    shifts = torch.arange(0, 32, bits)
    levels = (packed[..., None].long() >> shifts) & (2**bits - 1)
    return (levels.flatten(1)[:, : shape[1]] - 2 ** (bits - 1)).float()


def test_rounding_to_the_nearest_integer_clips_nothing(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keys = Recipe(weights="int4", group_size=32, method="nearest")
    compress(tmp_path / "model", tmp_path / "small", keys, None, quiet)
    stored, after = tensors_of(tmp_path / "small"), rounded_model(model, tmp_path / "small").state_dict()
    scales = {
        name.removesuffix("_scale"): value for name, value in stored.items() if name.endswith("proj.weight_scale")
    }
    assert len(scales) == 7 * model.config.num_hidden_layers
    for name, scale in scales.items():
        error = (after[name] - before[name]).unflatten(1, (scale.shape[1], -1)).abs()
        assert float((error / scale[..., None]).max()) < 0.5 + 1e-5


@pytest.mark.parametrize(("recipe", "weights", "inputs"), [("w8a8", (8, "int"), "int8"), ("fp8", (8, "float"), "fp8")])
def test_inputs_are_rounded_too(
    recipe: str, weights: tuple[int, str], inputs: str, fresh: FreshTransformers, tmp_path: Path
) -> None:
    """The model in a fresh process rounds the inputs of each layer, which changes its logits a little."""
    model = save(tmp_path / "model")
    keys = read_recipe(recipe).model_copy(update={"inputs": inputs})
    compress(tmp_path / "model", tmp_path / "small", keys, None, quiet)
    table = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    (group,) = table["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["type"]) == weights
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    logits = fresh.logits(tmp_path / "small", text(2), tmp_path)
    with torch.no_grad():
        weights_alone = rounded_model(model, tmp_path / "small")(text(2)).logits

        def round_inputs(module: Any, args: tuple[Tensor]) -> Tensor:
            scale = args[0].abs().amax(-1, True).clamp(min=1e-9) / (127.5 if inputs == "int8" else 448.0)
            levels = args[0] / scale
            return (
                levels.clamp(-128, 127).round() if inputs == "int8" else levels.to(torch.float8_e4m3fn).float()
            ) * scale

        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                layer.register_forward_pre_hook(round_inputs)
        own = model(text(2)).logits
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, weights_alone, rtol=1e-4, atol=1e-4)


def test_calibration_runs_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model", num_hidden_layers=4)
    from weft.compress import work as module

    seen: list[int] = []

    class Watched(module._Work):
        def _change(self, prefix: str, block: Any, hessians: Any) -> None:
            blocks = [self.model.get_submodule(one.name) for one in self.anatomy.blocks]
            seen.append(sum(not next(one.parameters()).is_meta for one in blocks))
            super()._change(prefix, block, hessians)

    monkeypatch.setattr(module, "_Work", Watched)
    compress(tmp_path / "model", tmp_path / "small", read_recipe("int4"), text(), quiet)
    assert seen == [1, 1, 1, 1]


def test_large_models_are_written_into_several_files(
    fresh: FreshTransformers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model")
    monkeypatch.setattr(folders, "FILE_BYTES", 20_000)
    compress(tmp_path / "model", tmp_path / "small", read_recipe("int8"), None, quiet)
    assert len(list((tmp_path / "small").glob("model-*-of-*.safetensors"))) > 1
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "starcoder2", "olmo2", "phi3", "granite"])
def test_families(name: str, fresh: FreshTransformers, tmp_path: Path) -> None:
    model = save(tmp_path / "model", name)
    compress(tmp_path / "model", tmp_path / "small", read_recipe("int4"), text(), quiet)
    logits = fresh.logits(tmp_path / "small", text(2), tmp_path)
    with torch.no_grad():
        before = model(text(2)).logits
    assert float((logits - before).norm() / before.norm()) < 0.35


def plain_loss(folder: Path, rows: Any) -> float:
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@pytest.mark.parametrize("process", [pytest.param("fork", marks=pytest.mark.must("command: compress")), "new process"])
def test_the_command_measures_both_models(process: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "PlainTransformers", HereInAFork if process == "fork" else PlainTransformers)
    save(tmp_path / "model")
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 96, (40, 33)))
    (tmp_path / "data.toml").write_text(
        f'[data]\nsource = "tokens"\npath = "{tmp_path / "rows.npy"}"\nseq_len = 32\nheld_out = 0.2\n'
    )
    arguments = ["compress", tmp_path / "model", tmp_path / "small", "--recipe", "int4"]
    done = weft(*arguments, "--calibrate", tmp_path / "data.toml")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "small" / "compression.json").read_text())
    assert report["before"]["loss"] == pytest.approx(report["after"]["loss"], rel=0.02)
    assert report["before"]["loss"] == pytest.approx(
        plain_loss(tmp_path / "model", np.load(tmp_path / "rows.npy")[-8:])
    )
    assert report["bytes_after"] < 0.25 * report["bytes_before"]
    page = (tmp_path / "small" / "report.html").read_text()
    assert "Error of each layer" in page
    assert "model.layers.1.mlp.down_proj" in page


def refused(
    error: type[Exception], text_: str, folder: Path, recipe: Recipe, rows: Tensor | None = None, ranks: int = 1
) -> None:
    with pytest.raises(error, match=text_):
        compress(folder, folder.with_name("small"), recipe, rows, quiet, ranks)
    assert not folder.with_name("small").exists()
    assert not list(folder.parent.glob(".small*"))


def test_bad_input(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(model, hidden_size=60, head_dim=12, intermediate_size=132)
    refused(DataError, "there are no calibration rows", model, read_recipe("2:4"))
    refused(DataError, "8 calibration tokens", model, Recipe(weights="int8"), text(1, 8))
    refused(ModelError, "has 60 input channels", model, read_recipe("int4"), text())
    odd = tmp_path / "odd"
    save(odd, intermediate_size=130)
    refused(ModelError, "has 130 input channels", odd, read_recipe("2:4"), text())
    fused = tmp_path / "fused"
    save(fused, "hrm_text")
    refused(ModelError, "not stored as the model has them", fused, read_recipe("int8"))
    images = tmp_path / "images"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shrunk("git"))).save_pretrained(images)
    refused(ModelError, "text does not run through git.image_encoder", images, read_recipe("2:4"), text())
    with pytest.raises(JobError, match="unknown recipe 'int3'"):
        read_recipe("int3")
    with pytest.raises(JobError, match="sets method twice"):
        read_recipe("int8+fp8")
    recipe = tmp_path / "own.toml"
    recipe.write_text('weights = "int5"\n')
    with pytest.raises(JobError, match="int5"):
        read_recipe(str(recipe))
    recipe.write_text('weights = "int8"\ninputs = "fp8"\n')
    with pytest.raises(JobError, match="integers by integers"):
        read_recipe(str(recipe))
    recipe.write_text("rows = 3\n")
    with pytest.raises(JobError, match="changes nothing"):
        read_recipe(str(recipe))
    compress(model, tmp_path / "small", read_recipe("int8"), None, quiet)
    with pytest.raises(CheckpointError, match="exists"):
        compress(model, tmp_path / "small", read_recipe("int8"), None, quiet)


@pytest.mark.parametrize(
    ("cls", "name", "match"),
    [
        (AutoModelForSequenceClassification, "llama", "the folder has a LlamaForSequenceClassification"),
        (AutoModelForMaskedLM, "bert", "the folder has a BertForMaskedLM"),
        (AutoModelForSeq2SeqLM, "t5", "t5 is an encoder-decoder model"),
    ],
)
def test_other_models_are_refused(cls: Any, name: str, match: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**(family(name) if name in FAMILIES else shrunk(name)))
    cls.from_config(config).save_pretrained(tmp_path / "model")
    refused(ModelError, match, tmp_path / "model", read_recipe("int8"))


def test_text_needs_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    """A tokenizer that is trained on the calibration text would give tokens that mean other words."""
    save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some words " * 1000)
    data = tmp_path / "data.toml"
    data.write_text(f'[data]\nsource = "text"\npath = "{tmp_path / "text.txt"}"\nseq_len = 32\n')
    with pytest.raises(DataError, match="there is no tokenizer in"):
        compress_model(tmp_path / "model", tmp_path / "small", "int4", calibrate=data, log=quiet)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("llama", "int4"), ("mixtral", "int4"), ("llama", "drop=0.25+prune=0.25+int8"), ("mixtral", "prune=0.25")],
)
def test_ranks_share_the_work(
    name: str, recipe: str, fresh: FreshTransformers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks write what one process writes, but for the order of the sums of Hessians."""
    save(tmp_path / "model", name, num_hidden_layers=4, intermediate_size=128, num_key_value_heads=4)
    alone = compress(tmp_path / "model", tmp_path / "1", read_recipe(recipe), text(), quiet)

    monkeypatch.setattr(run, "PlainTransformers", HereInAFork)

    def compress_on_ranks() -> None:
        found = compress(tmp_path / "model", tmp_path / "2", read_recipe(recipe), text(), quiet, 2)
        (tmp_path / "found.json").write_text(json.dumps(asdict(found)))

    done = completed(start_function(["compress"], compress_on_ranks))
    assert done.returncode == 0, done.stderr
    found = Compressed(**json.loads((tmp_path / "found.json").read_text()))
    assert found.bytes_after == alone.bytes_after
    assert found.errors.keys() == alone.errors.keys()
    for layer, error in alone.errors.items():
        assert found.errors[layer] == pytest.approx(error, rel=0.1)
    one, two = tensors_of(tmp_path / "1"), tensors_of(tmp_path / "2")
    assert {key: tensor.shape for key, tensor in one.items()} == {key: tensor.shape for key, tensor in two.items()}
    own, shared = (fresh.logits(tmp_path / ranks, text(2), tmp_path) for ranks in ("1", "2"))
    assert float((own - shared).norm() / own.norm()) < 0.05
    assert {path.name for path in (tmp_path / "1").iterdir()} == {path.name for path in (tmp_path / "2").iterdir()}
    refused(DataError, "2 calibration rows on 3 ranks", tmp_path / "model", read_recipe(recipe), text(2), 3)
