"""Structured pruning: smaller plain configurations, with what the parts that are left make up for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compress.fresh import FreshTransformers
from tests.compress.test_compress import quiet, save, text
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.run import compress
from weft.compress.widths import choose, refit
from weft.errors import DataError, JobError, ModelError


@pytest.mark.must("parity: pruned models")
def test_the_weights_that_are_left_make_up_for_the_others() -> None:
    """The same outputs as by least squares on the inputs; and of all pairs of columns, the one that costs least goes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    inputs[:, 4] = 0.7 * inputs[:, 1] + 0.7 * inputs[:, 4]
    weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    hessian, outputs = inputs.T @ inputs, inputs @ weight.T
    costs = []
    for pair in ((0, 1), (2, 3), (4, 5)):
        left = [column for column in range(6) if column not in pair]
        best = torch.linalg.lstsq(inputs[:, left], outputs).solution.T
        found = refit(weight, hessian, torch.tensor(left))
        assert (found[:, list(pair)] == 0).all()
        torch.testing.assert_close(found[:, left], best, rtol=0.05, atol=0.02)  # the Hessian is damped
        costs.append(float((inputs[:, left] @ best.T - outputs).square().sum()))
    kept = choose(weight, hessian, groups=3, kept=2)
    worst = costs.index(min(costs))
    assert kept.tolist() == [pair for pair in range(3) if pair != worst]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3_text", "olmo2", "starcoder2", "granite", "opt"])
def test_units(name: str, tmp_path: Path) -> None:
    """The smaller model computes what the larger one does with zeros in place of the units that went."""
    sizes = {"ffn_dim": 64} if name == "opt" else {"intermediate_size": 64}
    model = save(tmp_path / "model", name, **sizes)
    compress(tmp_path / "model", tmp_path / "small", Recipe(prune=0.25, prune_parts=("units",)), text(), quiet)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert getattr(small.config, next(iter(sizes))) == 48
    assert_close_to(model, tmp_path)
    assert_filled(model, small)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3_text", "starcoder2", "granite"])
def test_heads(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "model", name, num_attention_heads=8, num_key_value_heads=4, head_dim=8, hidden_size=96)
    compress(tmp_path / "model", tmp_path / "small", Recipe(prune=0.25, prune_parts=("heads",)), text(), quiet)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (6, 3)
    assert_close_to(model, tmp_path)
    assert_filled(model, small)


def assert_close_to(model: Any, folder: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(folder / "small")
    with torch.no_grad():
        logits, before = small(text(2)).logits, model(text(2)).logits
    assert float((logits - before).norm() / before.norm()) < 0.8


def assert_filled(model: Any, small: Any) -> None:
    """Logits of the small model are those of the large one, in which its weights fill the places that they come from."""
    # The rows of projections are not changed by a pruning: they say which ones are left.
    large = dict(model.named_parameters())
    places: dict[str, list[int]] = {}
    for name, weight in small.named_parameters():
        if weight.ndim == 2 and weight.shape != large[name].shape and weight.shape[1:] == large[name].shape[1:]:
            places[name] = [int((large[name] == row).flatten(1).all(1).nonzero()[0]) for row in weight.unsqueeze(1)]
    assert places
    for name, rows in places.items():
        gone = sorted(set(range(len(large[name]))) - set(rows))
        assert len(gone) == len(large[name]) - len(rows), name
    logits, expected = small(text(2)).logits, with_zeros(model, small, places)(text(2)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def with_zeros(model: Any, small: Any, places: dict[str, list[int]]) -> Any:
    """The large model with the small one's reading layers in the columns that they come from, and zeros elsewhere."""
    found = dict(small.named_parameters())
    for name, weight in model.named_parameters():
        if weight.shape == found[name].shape:
            weight.data.copy_(found[name].data)
        elif weight.ndim == 2 and name not in places and weight.shape[0] == found[name].shape[0]:
            siblings = [key for key in places if key.startswith(name.rsplit(".", 2)[0]) and key.endswith("weight")]
            columns = columns_of(model, siblings, places, weight.shape[1])
            weight.data.zero_()
            weight.data[:, columns] = found[name].data
    return model


def columns_of(model: Any, siblings: list[str], places: dict[str, list[int]], width: int) -> list[int]:
    """Columns of the layer that reads what these layers write."""
    shapes = dict(model.named_parameters())
    for name in siblings:
        rows = places[name]
        if len(shapes[name]) == width:  # up_proj, q_proj
            return rows
        if "gate_up" in name or "qkv" in name:  # the first projection of a packed layer, or the query
            return [row for row in rows if row < width]
    raise AssertionError(f"no layer of {siblings} writes {width} channels")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "starcoder2", "qwen3_moe"])
def test_blocks(name: str, tmp_path: Path) -> None:
    """Exactly the model without these blocks; the block that changes nothing goes first."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name == "gemma3_text" else {}
    model = save(tmp_path / "model", name, num_hidden_layers=4, **kinds)
    layer = model.model.layers[2]
    for name_, weight in layer.named_parameters():
        if any(part in name_ for part in ("o_proj", "down_proj", "c_proj")):
            torch.nn.init.zeros_(weight)
    model.save_pretrained(tmp_path / "model")
    lines: list[str] = []
    compress(tmp_path / "model", tmp_path / "small", read_recipe("drop=0.25"), text(), lines.append)
    assert "model.layers.2" in lines[0]
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert small.config.num_hidden_layers == 3
    with torch.no_grad():
        torch.testing.assert_close(small(text(2)).logits, model(text(2)).logits, rtol=1e-5, atol=1e-5)
    if name == "gemma3_text":
        assert small.config.layer_types == [kind for i, kind in enumerate(model.config.layer_types) if i != 2]


def test_blocks_of_a_pattern_go_together(tmp_path: Path) -> None:
    """Every second block has experts: where the third and the fifth should go, two neighbours do."""
    model = save(tmp_path / "model", "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[])
    for name, weight in model.named_parameters():
        if any(part in name for part in ("layers.2.", "layers.4.")) and any(
            part in name for part in ("o_proj", "down_proj")
        ):
            torch.nn.init.zeros_(weight)
        if "layers.3." in name and any(part in name for part in ("o_proj", "down_proj")):
            weight.data *= 0.1
    model.save_pretrained(tmp_path / "model")
    lines: list[str] = []
    compress(tmp_path / "model", tmp_path / "small", read_recipe("drop=0.33"), text(), lines.append)
    assert lines[0].endswith(("model.layers.2, model.layers.3", "model.layers.3, model.layers.4"))
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert [type(layer.mlp) for layer in small.model.layers] == [type(layer.mlp) for layer in model.model.layers][:4]
    model.model.layers[3].register_forward_hook(lambda module, args, output: args[0])
    with torch.no_grad():
        torch.testing.assert_close(small(text(2)).logits, model(text(2)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "tied"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", False)])
def test_experts(name: str, tied: bool, tmp_path: Path) -> None:
    """The experts that no token chooses go, and nothing changes."""
    model = save(tmp_path / "model", name, tie_word_embeddings=tied)
    for layer in model.model.layers:
        router = layer.mlp.gate
        router.weight.data[1] = -10 * router.weight.data.abs().amax(0)  # chosen by few tokens
    model.save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "small", read_recipe("prune=0.25"), text(), quiet)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    experts = [module for module in small.modules() if type(module).__name__.endswith("Experts")]
    assert all(parameter.shape[0] == 3 for module in experts for parameter in module.parameters())
    assert_close_to(model, tmp_path)


@pytest.mark.must("composition: pruned models")
def test_a_pruned_model_is_quantized(fresh: FreshTransformers, tmp_path: Path) -> None:
    save(tmp_path / "model", num_hidden_layers=4, intermediate_size=256)
    recipe = read_recipe("drop=0.25+prune=0.25+int8")
    found = compress(
        tmp_path / "model", tmp_path / "small", recipe.model_copy(update={"prune_parts": ("units",)}), text(), quiet
    )
    assert found.bytes_after < 0.3 * found.bytes_before
    assert len(found.errors) == 3 * 7
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()


def test_a_pruned_model_with_experts_is_quantized(fresh: FreshTransformers, tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral", num_hidden_layers=4)
    found = compress(tmp_path / "model", tmp_path / "small", read_recipe("drop=0.25+prune=0.25+int4"), text(), quiet)
    assert found.bytes_after < 0.25 * found.bytes_before
    assert len(found.errors) == 3 * (4 + 2)
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()


def test_a_healed_model_learns(tmp_path: Path) -> None:
    """The folder is a plain model: it trains as any other."""
    save(tmp_path / "model", intermediate_size=64)
    compress(tmp_path / "model", tmp_path / "small", Recipe(prune=0.5, prune_parts=("units",)), text(), quiet)
    small: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    rows: Tensor = text(8)
    optimizer = torch.optim.AdamW(small.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        logits = small(rows).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize(
    ("name", "sizes", "recipe", "error", "words"),
    [
        ("llama", {}, {"prune": 0.3, "prune_parts": ("experts",)}, ModelError, "has no experts"),
        ("qwen3_moe", {}, {"prune": 0.3, "prune_parts": ("units",)}, ModelError, "has experts"),
        ("qwen3_moe", {}, {"prune": 0.75}, ModelError, "each token chooses 2"),
        ("hrm_text", {}, {"drop_blocks": 0.5}, ModelError, "not stored as the model has them"),
        ("llama", {}, {"drop_blocks": 0.1}, ModelError, "0.1 of 2 blocks"),
        (
            "llama",
            {"num_attention_heads": 8, "num_key_value_heads": 1},
            {"prune": 0.5, "prune_parts": ("heads",)},
            ModelError,
            "of 1 key and value",
        ),
        (
            "olmo2",
            {},
            {"prune": 0.5, "prune_parts": ("heads",)},
            ModelError,
            "norm.weight is of all heads",
        ),
        ("gpt2", {}, {"prune": 0.5}, ModelError, "nothing of gpt2 can be pruned"),
        ("deepseek_v3", {}, {"prune": 0.5}, ModelError, "2 of 4 experts in 2 groups"),
        ("gpt2", {}, {"prune": 0.5, "prune_parts": ("units",)}, ModelError, "no feed-forward layer with a known name"),
    ],
)
def test_models_that_cannot_be_pruned_so(
    name: str, sizes: dict[str, Any], recipe: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    save(tmp_path / "model", name, **sizes)
    with pytest.raises(error, match=words):
        compress(tmp_path / "model", tmp_path / "small", Recipe(**recipe), text(), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_bad_input(tmp_path: Path) -> None:
    save(tmp_path / "model")
    with pytest.raises(DataError, match="8 calibration tokens"):
        compress(tmp_path / "model", tmp_path / "small", read_recipe("prune=0.5"), text(1, 8), quiet)
    with pytest.raises(DataError, match="there are no calibration rows"):
        compress(tmp_path / "model", tmp_path / "small", read_recipe("drop=0.5"), None, quiet)
    for bad in ("prune=1.5", "prune=", "prune=0.3+prune=0.2", "drop=-1"):
        with pytest.raises(JobError, match=r"recipe|twice"):
            read_recipe(bad)
