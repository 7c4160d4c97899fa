"""weft compress: all small decoder families, read back by Transformers: rounded with logits close to those before, pruned with
the logits of the untouched model in which what went is switched off."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import FAMILIES, family
from tests.lab.shrink import PROVED, shrunk
from weft.anatomy.transformers import read_anatomy
from weft.compress import width_slices, widths
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.run import compress
from weft.errors import ModelError

NAMES = sorted({name for names in PROVED.values() for name in names})
FARTHEST = {"int8": 0.3, "2:4": 1.3}
"""Largest relative change of the logits: int8 rounds a little, 2:4 removes half of the weights of a random model."""
NO_LINEAR, READ_WHOLE = "has no linear layer", "not stored as the model has them"
BESIDE_TEXT, REPLACED = "text does not run through", "other layers in their place"
REFUSED = {
    ("git", "2:4"): BESIDE_TEXT,
    **{(name, "int8"): REPLACED for name in ("llama4", "llama4_text")},
    **{(name, recipe): NO_LINEAR for name in ("falcon", "gpt2", "gpt-sw3") for recipe in FARTHEST},
    **{("hrm_text", recipe): READ_WHOLE for recipe in FARTHEST},
}
STACKED = (
    *("aria_text", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v4"),
    *("inkling2_text", "inkling_text", "llama4", "llama4_text", "minimax_m3_vl_text", "zaya"),
)
"""Families with experts that are stored as one tensor."""
MERGED = ("bailing_hybrid", "kimi_linear", "olmo_hybrid")
"""Families with convolutions that are stored as several tensors."""
FIXES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("jamba", "2:4"): ("has 2 input channels", {"skip": (".*dt_proj",)}),
    **{(name, recipe): ("stored as one tensor", {"skip": (".*experts.*",)}) for name in STACKED for recipe in FARTHEST},
    **{(name, "int8"): ("stored as several tensors", {"weights": "fp8", "embedding": "none"}) for name in MERGED},
}
"""Words of a refusal, and keys that its fix sets, by family and recipe."""


# What a pruning by half says of families that cannot be pruned so, by family.
NO_DROP = {
    "gemma3n_text": "refuses the smaller configuration",
    "git": BESIDE_TEXT,
    "hrm_text": READ_WHOLE,
    "longcat_flash": "no key of the configuration has the number of blocks",
    "minicpm3": "cannot take the place of",  # it scales by the number of blocks
    "olmo_hybrid": "at least one 'linear_attention' layer",
}
NO_PART = (
    *("bitnet", "bloom", "falcon", "git", "gpt-sw3", "gpt2", "gpt_neox_japanese", "jetmoe", "moshi", "mpt"),
    *("recurrent_gemma", "xlstm"),
)
NO_PRUNE = {
    **dict.fromkeys(NO_PART, "can be pruned by 0.5"),
    **dict.fromkeys(("axk1", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32"), "experts in 2 groups"),
    "deepseek_v4": "has indices of experts",
    "hrm_text": READ_WHOLE,
    "hunyuan_v1_moe": "0.5 of 1 experts",
    "inkling_text": "in a model of the smaller configuration",
    **dict.fromkeys(("llama4", "llama4_text"), "not told which experts"),
    "longcat_flash": "no key of the configuration has the number of experts",
    "zaya": "in a model of the smaller configuration",
}


def small_model(name: str, folder: Path) -> tuple[Any, Tensor]:
    """Small model of a family, saved in a folder, and calibration rows."""
    torch.manual_seed(0)
    table = family(name) if name in FAMILIES else shrunk(name)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table)).eval()
    for buffer_name, buffer in model.named_buffers():
        if "bias" in buffer_name and buffer.is_floating_point():  # of routers, which begin as zeros
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    vocabulary = min(90, model.config.get_text_config().vocab_size)
    tokens = 128 if name == "deepseek_v4" else 32  # it has a layer of 8192 input channels
    return model, torch.randint(5, 90, (64, tokens), generator=torch.Generator().manual_seed(1)) % vocabulary


def load(folder: Path) -> Any:
    """The model that Transformers loads, with all weights and no others."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@pytest.mark.parametrize("recipe", FARTHEST)
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_compressed_or_refused_with_a_fix(name: str, recipe: str, tmp_path: Path) -> None:
    model, rows = small_model(name, tmp_path / "model")
    keys = read_recipe(recipe)

    def run() -> None:
        compress(tmp_path / "model", tmp_path / "small", keys, rows, lambda line: None)

    refusal = REFUSED.get((name, recipe))
    words, fix = (refusal, None) if refusal else FIXES.get((name, recipe), (None, None))
    if words:
        with pytest.raises(ModelError, match=words):
            run()
        assert not (tmp_path / "small").exists()
    if refusal:
        return
    if fix:
        keys = keys.model_copy(update=fix)
    run()
    before, after = logits_of(model, rows[:2]), logits_of(load(tmp_path / "small"), rows[:2])
    assert 0 < (before - after).norm() / before.norm() < FARTHEST[recipe]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_a_family_are_dropped_or_refused(name: str, tmp_path: Path) -> None:
    """The smaller model computes what the untouched one does without these blocks."""
    model, rows = small_model(name, tmp_path / "model")
    lines = pruned_or_refused(Recipe(drop_blocks=0.5), rows, NO_DROP.get(name), tmp_path)
    if lines:
        for block in lines[0].partition(": ")[2].split(", "):
            model.get_submodule(block).register_forward_hook(unchanged, with_kwargs=True)
        torch.testing.assert_close(
            logits_of(load(tmp_path / "small"), rows[:2]), logits_of(model, rows[:2]), rtol=1e-4, atol=1e-4
        )


def unchanged(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """The inputs of a block in place of its outputs."""
    states = args[0] if args else kwargs["hidden_states"]
    return (states, *output[1:]) if isinstance(output, tuple) else states


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_family_are_pruned_or_refused(name: str, tmp_path: Path) -> None:
    """The smaller model computes what the untouched one does, if its layers read only the heads and units that are left."""
    model, rows = small_model(name, tmp_path / "model")
    chosen: list[Tensor] = []
    real = widths.choose
    with mock.patch.object(widths, "choose", lambda *args: chosen.append(real(*args)) or chosen[-1]):
        lines = pruned_or_refused(Recipe(prune=0.5), rows, NO_PRUNE.get(name), tmp_path)
    if not lines:
        return
    small = load(tmp_path / "small")
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    if not chosen:  # experts: all tokens of these families choose among those that are left
        assert torch.isfinite(logits_of(small, rows[:2])).all()
        return
    stayed = {line.partition(" stay as they are")[0] for line in lines}
    for block in read_anatomy(model).blocks:
        for part in ("heads", "units"):
            if part not in stayed:
                name_, reader = reader_of(model, block, part)
                kept, read = chosen.pop(0), small.get_submodule(name_).weight
                columns = kept[:, None] * (read.shape[1] // len(kept)) + torch.arange(read.shape[1] // len(kept))
                reader.weight.data.zero_()
                reader.weight.data[:, columns.flatten()] = read.data
                if reader.bias is not None:
                    torch.testing.assert_close(reader.bias, small.get_submodule(name_).bias, rtol=0, atol=0)
    assert not chosen
    torch.testing.assert_close(logits_of(small, rows[:2]), logits_of(model, rows[:2]), rtol=1e-4, atol=1e-4)


def reader_of(model: Any, block: Any, part: str) -> tuple[str, nn.Linear]:
    """The layer that reads the heads or units of a block."""
    _, name, reader = width_slices.part_of(model.config, block, model.get_submodule(block.name), part)
    return f"{block.name}.{name}", reader


def pruned_or_refused(recipe: Recipe, rows: Tensor, words: str | None, folder: Path) -> list[str]:
    """Lines that a pruning prints; none if it is refused, as expected."""
    lines: list[str] = []

    def run() -> None:
        compress(folder / "model", folder / "small", recipe, rows, lines.append)

    if words is None:
        run()
        return lines
    with pytest.raises(ModelError, match=words):
        run()
    assert not (folder / "small").exists()
    return []


@torch.no_grad()
def logits_of(model: Any, rows: Tensor) -> Tensor:
    return model(rows, use_cache=False).logits
