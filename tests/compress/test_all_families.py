"""weft compress: all small decoder families, read back by Transformers with logits close to those before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import FAMILIES, family
from tests.lab.shrink import PROVED, shrunk
from weft.compress.recipe import read_recipe
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


@pytest.mark.thin(60)
@pytest.mark.parametrize("recipe", FARTHEST)
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_compressed_or_refused_with_a_fix(name: str, recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = family(name) if name in FAMILIES else shrunk(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table)).eval()
    model.save_pretrained(tmp_path / "model")
    vocabulary = min(90, model.config.get_text_config().vocab_size)
    tokens = 128 if name == "deepseek_v4" else 32  # it has a layer of 8192 input channels
    rows = torch.randint(5, 90, (64, tokens), generator=torch.Generator().manual_seed(1)) % vocabulary
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
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    small, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    before, after = logits_of(model, rows[:2]), logits_of(small.eval(), rows[:2])
    assert 0 < (before - after).norm() / before.norm() < FARTHEST[recipe]


@torch.no_grad()
def logits_of(model: Any, rows: Tensor) -> Tensor:
    return model(rows, use_cache=False).logits
