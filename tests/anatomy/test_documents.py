"""`check_packing`: agreement with the full model, small copies, and absence of side effects."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.lab.families import FAMILIES, family
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.documents import TOLERANCE, check_packing
from weft.anatomy.shrink import MAX_COPY_PARAMETERS, block_kinds, small_copy
from weft.anatomy.transformers import read_anatomy, row_arguments
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", [*FAMILIES, "minimax", "zaya", "mpt", "jamba", "moshi", "glm_moe_dsa"])
def test_check_packing_agrees_with_the_full_model(name: str) -> None:
    """Reference: two random documents, run through the full model instead of a small copy."""
    many_heads = {"index_n_heads": 32} if name == "glm_moe_dsa" else {}
    source = Model(config=shrunk(name) | {**many_heads, "initializer_range": 0.1})
    model = build_plain(source, read_config(source), torch.float32).eval()
    tokens = torch.randint(3, 96, (4, 30), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(11), torch.arange(19)]).expand(4, -1)
    with torch.no_grad():
        packed = model(input_ids=tokens, **row_arguments(model, positions)).logits
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in tokens.split([11, 19], 1)], 1)
    differs = bool((packed - alone).abs().max() > TOLERANCE * alone.abs().max())
    assert bool(check_packing(model, read_anatomy(model)).problem) == differs
    assert differs == (name in ("minimax", "zaya", "jamba", "moshi"))


def test_model_and_torch_rng_are_unchanged() -> None:
    source = Model(config=family("gemma3_text"))
    model = build_plain(source, read_config(source), torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, state = model.config.to_dict(), torch.get_rng_state()
    first = check_packing(model, read_anatomy(model))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert check_packing(model, read_anatomy(model)) == first
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "jamba", "gemma3_text", "deepseek_v3", "qwen3_next", "gpt2", "gemma3"])
def test_a_small_copy_has_all_kinds_of_blocks(name: str) -> None:
    """For models of real sizes: one of eight blocks of Jamba has attention, the first three of DeepSeek-V3 have no experts."""
    model = build_on_meta(AutoConfig.for_model(name), torch.float32)
    anatomy = read_anatomy(model)
    copy = small_copy(model, anatomy, None)
    assert set(block_kinds(model, anatomy)) <= set(block_kinds(copy, read_anatomy(copy)))
    assert sum(parameter.numel() for parameter in copy.parameters()) < MAX_COPY_PARAMETERS / 10


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 3), (9, 3), (5, 5), (1, 1)])
def test_a_small_copy_can_be_built_for_odd_sizes(heads: int, kv_heads: int) -> None:
    odd = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 24 * heads, "vocab_size": 50}
    for table in (family("llama") | odd, {"model_type": "gpt2", "n_head": heads, "n_embd": 24 * heads}):
        model = build_on_meta(read_config(Model(config=table)), torch.float32)
        assert check_packing(model, read_anatomy(model)).problem is None


def packing_lines() -> dict[str, str]:
    text = (DOCS / "packing.md").read_text(encoding="utf-8")
    if f"Transformers {transformers.__version__}:" not in text:
        pytest.skip("another version has other families")
    return {line.split(" ")[1]: line for line in text.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "minimax", "bart", "mamba", "deepseek_v32", "moshi"])
def test_packing_table_matches_the_code(name: str) -> None:
    assert runpy.run_path(str(DOCS / "generate.py"))["packing_line"](name) == packing_lines()[name]


def test_full_packing_table_matches_the_code() -> None:
    packing_lines()
    page = runpy.run_path(str(DOCS / "generate.py"))["packing_page"]()
    assert page == (DOCS / "packing.md").read_text(encoding="utf-8"), (
        "run python docs/generate.py: packing.md is outdated"
    )
