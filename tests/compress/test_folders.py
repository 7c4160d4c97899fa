"""weft compress: every recipe is a folder that plain Transformers loads, in the dtypes of its source; or it is refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.compress.fresh import FreshTransformers
from tests.compress.test_compress import quiet, save, text
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import observe, plain_held_out_loss
from weft.checkpoint.convert import to_checkpoint, to_huggingface
from weft.checkpoint.huggingface import convert_folder
from weft.compress import work
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.report import compress_model
from weft.compress.run import compress
from weft.data.tokenizer import train_tokenizer
from weft.errors import CheckpointError, DataError, JobError, ModelError, WeftError
from weft.job import Job
from weft.precision.dtypes import DTYPES
from weft.training.metrics import read_evaluations

pytestmark = pytest.mark.together  # one process with plain Transformers
PAGE = Path(__file__).parents[2] / "docs" / "smaller-models.md"
FAMILIES = {
    "glm4_moe": {"head_dim": 16},
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Keys of families whose routers have biases in float32."""


def table_recipes() -> list[str]:
    """Recipes in the first table of the page, and the one below it that joins three."""
    page = PAGE.read_text()
    names = re.findall(r"^\| `([^`]+)` \|", page.partition("A recipe of your own")[0], re.MULTILINE)
    assert {"int8", "int4+2:4", "drop=0.3"} <= set(names)
    return [
        *(name for name in names if name != "trained"),
        *re.findall(r"^`(drop=\S+)` does all three", page, re.MULTILINE),
    ]


def file_recipe() -> str:
    """Recipe file that the page prints."""
    block = PAGE.read_text().partition("A recipe of your own")[2].partition("\n## ")[0]
    return "\n".join(line[4:] for line in block.splitlines() if line.startswith("    "))


def checked(logits: Tensor, before: Tensor) -> float:
    return float((logits - before).norm() / before.norm())


# Recipes


@pytest.mark.parametrize("recipe", [*table_recipes(), "the file of the page"])
def test_each_recipe_of_the_page_loads_and_generates(recipe: str, fresh: FreshTransformers, tmp_path: Path) -> None:
    save(tmp_path / "model", num_hidden_layers=4, intermediate_size=256)
    (tmp_path / "own.toml").write_text(file_recipe())
    keys = read_recipe(str(tmp_path / "own.toml") if " " in recipe else recipe)
    compress(tmp_path / "model", tmp_path / "small", keys, list(text(64)), quiet)
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()
    assert " " not in recipe or set(re.findall(r"^(\w+) =", file_recipe(), re.MULTILINE)) == set(Recipe.model_fields)


@pytest.mark.parametrize("method", ["gptq", "nearest"])
@pytest.mark.parametrize(("weights", "inputs"), [("int4", "none"), ("int8", "none"), ("int8", "int8")])
def test_zero_points_are_loaded(
    weights: Any, inputs: Any, method: Any, fresh: FreshTransformers, tmp_path: Path
) -> None:
    """Weights that are all positive need twice the range without a zero point."""
    model = save(tmp_path / "model")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name:
                weight.add_(0.1)
    model.save_pretrained(tmp_path / "model")
    errors = []
    for symmetric in (True, False):
        out = tmp_path / f"small-{symmetric}"
        keys = Recipe(
            weights=weights, inputs=inputs, method=method, symmetric=symmetric, group_size=32 * (weights == "int4")
        )
        found = compress(tmp_path / "model", out, keys, list(text()), quiet)
        with torch.no_grad():
            assert checked(fresh.logits(out, text(2), tmp_path), model(text(2)).logits) < (
                0.2 if weights == "int4" else 0.03
            )
        errors.append(sum(error for name, error in found.errors.items() if "mlp" in name))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("keys", [{"weights": "int4", "inputs": "int8"}, {"weights": "fp8"}])
def test_zero_points_that_no_library_loads_are_refused(keys: Any, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="symmetric = false with weights") as caught:
        compress(tmp_path / "no model", tmp_path / "small", Recipe(**keys, symmetric=False), None, quiet)
    assert "set symmetric = true" in str(caught.value)


def zero(name: str, weight: Tensor, *rest: Any) -> dict[str, Tensor]:
    return pack(name, weight * 0, *rest)


def unnamed(name: str, *rest: Any) -> dict[str, Tensor]:
    return {key if "embed" in key else f"of_another.{key}": value for key, value in pack(name, *rest).items()}


pack = work.pack


@pytest.mark.parametrize(
    ("fault", "message"), [(zero, "loads another model"), (unnamed, "cannot load or run the model")]
)
@pytest.mark.parametrize("recipe", ["int8", "int4", "prune=0.5+fp8"])
def test_a_folder_that_is_not_the_model_is_removed(
    recipe: str, fault: Callable[..., Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model", tie_word_embeddings=True)
    monkeypatch.setattr(work, "pack", fault)
    with pytest.raises(ModelError, match=message):
        compress(tmp_path / "model", tmp_path / "small", read_recipe(recipe), list(text()), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Dtypes


def mixed(folder: Path, name: str) -> dict[str, Tensor]:
    """Folder of a family in bf16 whose norms and router biases are stored in float32; returns its tensors."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    experts = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    more = {**experts, "first_k_dense_replace": 1, **FAMILIES[name]} if name in FAMILIES else {"head_dim": 16}
    config = AutoConfig.for_model(name, **sizes, num_key_value_heads=4, max_position_embeddings=64, **more)
    model: Any = AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if "correction" in key:
                buffer.data = (7.0 + torch.rand(buffer.shape) * 0.06).float()
    model.save_pretrained(folder)
    weights = {key: w.float() if "norm" in key else w for key, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize("recipe", ["prune=0.25", "drop=0.25", "int8", "int4", "2:4"])
@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_each_tensor_keeps_its_dtype(name: str, recipe: str, fresh: FreshTransformers, tmp_path: Path) -> None:
    before = mixed(tmp_path / "model", name)
    compress(tmp_path / "model", tmp_path / "small", read_recipe(recipe), list(text()), quiet)
    after = load_file(tmp_path / "small" / "model.safetensors")
    for key, tensor in after.items():
        if "norm" in key or "correction" in key:
            assert tensor.dtype == torch.float32
            assert "drop" in recipe or tensor.numel() < before[key].numel() or torch.equal(tensor, before[key])
        elif key in before:
            assert tensor.dtype in (torch.bfloat16, torch.int8)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()


def test_the_experts_that_are_left_have_their_own_biases(tmp_path: Path) -> None:
    before = mixed(tmp_path / "model", "glm4_moe")
    compress(tmp_path / "model", tmp_path / "small", read_recipe("prune=0.25"), list(text()), quiet)
    after = load_file(tmp_path / "small" / "model.safetensors")
    for key in [key for key in after if "correction" in key]:
        gate = key.replace("e_score_correction_bias", "weight")
        kept = [next(i for i in range(8) if torch.equal(before[gate][i], row)) for row in after[gate]]
        assert torch.equal(after[key], before[key][kept])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("door", ["export", "checkpoint", "recipe"])
def test_router_biases_stay_in_float32_in_another_dtype(door: str, dtype: Any, tmp_path: Path) -> None:
    before = mixed(tmp_path / "model", "deepseek_v3")
    if door == "export":
        convert_folder(tmp_path / "model", tmp_path / "small", dtype)
    elif door == "checkpoint":
        to_checkpoint(tmp_path / "model", tmp_path / "checkpoint")
        to_huggingface(tmp_path / "checkpoint", tmp_path / "small", dtype=dtype)
    else:
        compress(tmp_path / "model", tmp_path / "small", Recipe(sparsity="2:4", dtype=dtype), list(text()), quiet)
    after = load_file(tmp_path / "small" / "model.safetensors")
    biases = [key for key in after if "correction" in key]
    assert all(torch.equal(after[key], before[key]) for key in biases)
    assert {after[key].dtype for key in after.keys() - biases} == {DTYPES[dtype]}


@pytest.mark.parametrize("door", ["export", "recipe"])
def test_weights_that_are_too_large_for_a_dtype_are_refused(door: str, tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 2] = 1e5
    model.save_pretrained(tmp_path / "model")
    call = {
        "export": partial(convert_folder, dtype="fp16"),
        "recipe": partial(compress, recipe=Recipe(sparsity="2:4", dtype="fp16"), rows=list(text()), log=quiet),
    }[door]
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has .* too large for float16"):
        call(tmp_path / "model", tmp_path / "small")
    assert not (tmp_path / "small").exists()


# Numbers, texts and disks


def refusal(error: type[WeftError], folder: Path, recipe: str, **options: Any) -> str:
    """Message of a refusal that leaves nothing behind."""
    found = sorted(path.name for path in folder.iterdir())
    with pytest.raises(error) as caught:
        compress_model(folder / "model", folder / "small", recipe, log=quiet, **options)
    assert sorted({path.name for path in folder.iterdir()} - {"cache"}) == sorted(set(found) - {"cache"})
    return str(caught.value)


def data_file(folder: Path, tokens: int = 32) -> Path:
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(0, 96, (40, tokens + 1)))
    keys = f'source = "tokens"\npath = "{folder / "rows.npy"}"\nseq_len = {tokens}\nheld_out = 0.2\n'
    (folder / "data.toml").write_text(f'[data]\n{keys}cache = "{folder / "cache"}"\n')
    return folder / "data.toml"


@pytest.mark.parametrize("recipe", ["int8", "fp8", "int4", "prune=0.5", "drop=0.5"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named_with_their_file(number: float, recipe: str, tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 2] = number
    model.save_pretrained(tmp_path / "model")
    message = refusal(CheckpointError, tmp_path, recipe, calibrate=data_file(tmp_path))
    assert "model.layers.0.mlp.up_proj.weight is not finite" in message
    assert str(tmp_path / "model" / "model.safetensors") in message


def test_a_weight_of_zeros_has_an_error_of_zero(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    model.save_pretrained(tmp_path / "model")
    compress_model(tmp_path / "model", tmp_path / "small", "int8", log=quiet)
    report = json.loads((tmp_path / "small" / "compression.json").read_text(), parse_constant=pytest.fail)
    assert report["errors"]["model.layers.0.mlp.down_proj"] == 0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("int4", r"model.layers.0 computes numbers that are not finite in float16"), ("int8", "float16")],
)
def test_numbers_that_overflow_are_named_with_their_dtype(recipe: str, words: str, tmp_path: Path) -> None:
    model = save(tmp_path / "model").half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3e4)
        for part in ("up", "gate"):
            getattr(model.model.layers[0].mlp, f"{part}_proj").weight.mul_(200)
    model.save_pretrained(tmp_path / "model")
    assert words in refusal(ModelError, tmp_path, recipe, calibrate=data_file(tmp_path))
    recipe_file = tmp_path / "own.toml"
    recipe_file.write_text('weights = "int4"\ndtype = "fp32"\n')
    if recipe == "int4":  # the fix
        compress(tmp_path / "model", tmp_path / "small", read_recipe(str(recipe_file)), list(text()), quiet)


@pytest.mark.parametrize("recipe", ["int8", "int4", "drop=0.5"])
def test_texts_that_are_longer_than_the_positions_are_refused(recipe: str, tmp_path: Path) -> None:
    keys = {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 16}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("opt", vocab_size=96, hidden_size=64, num_attention_heads=4, **keys)
    ).save_pretrained(tmp_path / "model")
    message = refusal(DataError, tmp_path, recipe, calibrate=data_file(tmp_path))
    assert "a text of 32 tokens" in message
    assert "the model has 16 positions" in message
    data_file(tmp_path, 16)
    compress_model(tmp_path / "model", tmp_path / "small", recipe, calibrate=tmp_path / "data.toml", log=quiet)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.compress.folder.save_file", full)
    assert "No space left on device" in refusal(CheckpointError, tmp_path, "int8")


def test_lists_are_of_blocks_by_their_names(tmp_path: Path) -> None:
    save(tmp_path / "model", num_hidden_layers=2, eos_token_id=[5, 6])
    compress(tmp_path / "model", tmp_path / "small", read_recipe("drop=0.5"), list(text()), quiet)
    assert json.loads((tmp_path / "small" / "config.json").read_text())["eos_token_id"] == [5, 6]


# Texts of runs


def chats(path: Path) -> None:
    turns = {"user": "The quick brown fox jumps", "assistant": "over the lazy dog"}
    rows = [
        {"messages": [{"role": role, "content": f"{words} {n}. " * (1 + n % 3)} for role, words in turns.items()]}
        for n in range(80)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


CHATML = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"


@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_a_run_is_compressed_with_its_own_texts_and_masks(kind: str, tmp_path: Path) -> None:
    """The loss before is that of the export, each document alone; that of the recipe `trained` is what the run has reported."""
    (tmp_path / "docs.jsonl").write_text(
        "\n".join(json.dumps({"text": f"The quick brown fox number {n} jumps. " * (1 + n % 5)}) for n in range(200))
    )
    data: dict[str, Any] = {"source": "jsonl", "path": str(tmp_path / "docs.jsonl"), "seq_len": 64, "held_out": 0.2}
    if kind == "chats":
        chats(tmp_path / "chats.jsonl")
        data |= {
            "path": str(tmp_path / "chats.jsonl"),
            "format": "chat",
            "tokenizer": str(tmp_path / "tokenizer"),
        }
        words = "user: assistant: The quick brown fox jumps over the lazy dog 0123456789."
        train_tokenizer([words] * 20, vocab_size=300, folder=tmp_path / "tokenizer")
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    path = write_job(
        tmp_path,
        model={
            "config": {
                **family("llama"),
                "vocab_size": 300,
                "hidden_size": 64,
                "intermediate_size": 128,
                "head_dim": 16,
            }
        },
        data=data,
        optimizer={"lr": 3e-3, "warmup_steps": 0},
        train={"steps": 4, "global_batch_size": 4},
        plan={"precision": {"param_dtype": "fp32", "quantize": "int4", "quantize_group_size": 32}},
    )
    run = observe(Job.load(path), 1).folder
    report = compress_model(run, tmp_path / "small", "trained", log=quiet)
    assert report.before
    assert report.after
    assert report.before.loss == pytest.approx(plain_held_out_loss(run, run / "export"), rel=1e-4)
    assert report.after.loss == pytest.approx(read_evaluations(run / "evaluations.jsonl")[-1].held_out_loss, rel=1e-3)
    report = compress_model(run, tmp_path / "calibrated", "int4", log=quiet)
    assert report.after
    assert report.after.loss == pytest.approx(report.before.loss if report.before else 0, rel=0.05)
