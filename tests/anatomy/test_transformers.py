"""Anatomy of real model families, read on the meta device."""

import pytest
import torch
import transformers

from tests.lab.families import FAMILIES, family
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.flops import training_flops_per_token
from weft.anatomy.roles import Anatomy, standard_name
from weft.anatomy.transformers import read_anatomy, row_arguments
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import ModelError
from weft.job import Model


def anatomy_of(table: dict[str, object]) -> Anatomy:
    return read_anatomy(build_on_meta(read_config(Model(config=table)), torch.float32))


def test_llama_anatomy() -> None:
    found = anatomy_of(family("llama"))
    assert (found.embedding, found.final_norm, found.head, found.tied) == (
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        False,
    )
    block = found.blocks[1]
    assert block.name == "model.layers.1"
    assert block.attention == ("model.layers.1.self_attn",)
    assert block.mlp == ("model.layers.1.mlp",)
    assert block.norms == ("model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm")
    assert not block.is_moe
    assert found.active_parameters == found.parameters


def test_deepseek_has_dense_and_moe_blocks() -> None:
    dense, moe = anatomy_of(family("deepseek_v3")).blocks
    assert not dense.is_moe
    assert moe.router == ("model.layers.1.mlp.gate",)
    assert moe.experts == ("model.layers.1.mlp.experts",)
    assert moe.shared_experts == ("model.layers.1.mlp.shared_experts",)


def test_gpt2_anatomy_is_tied_with_its_module_names() -> None:
    found = anatomy_of(family("gpt2"))
    assert (found.embedding, found.head, found.tied) == ("transformer.wte", "lm_head", True)
    assert found.blocks[0].attention == ("transformer.h.0.attn",)
    assert found.final_norm == "transformer.ln_f"
    assert found.max_positions == 64


def test_active_parameters_exclude_inactive_experts() -> None:
    found = anatomy_of(family("mixtral"))
    one_expert = 3 * 32 * 48
    assert found.parameters - found.active_parameters == 2 * 2 * one_expert  # layers x inactive experts


@pytest.mark.parametrize(
    ("model_type", "total", "active"),
    [
        ("qwen3_moe", 30.5e9, 3.3e9),
        ("mixtral", 46.7e9, 12.9e9),
        ("deepseek_v3", 671e9, 37.5e9),
        ("gpt_oss", 117e9, 5.13e9 + 0.58e9),
    ],
)
def test_parameter_counts_match_published_sizes(model_type: str, total: float, active: float) -> None:
    """Total and active parameters from the model cards (GPT-OSS does not count the 0.58e9 of its embedding)."""
    sizes = {
        "qwen3_moe": {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
        },
    }
    found = anatomy_of({"model_type": model_type, **sizes.get(model_type, {})})
    assert found.parameters == pytest.approx(total, rel=0.02)
    assert found.active_parameters == pytest.approx(active, rel=0.03)


def test_flops_of_a_dense_model_match_the_formula() -> None:
    config = read_config(Model(config=family("llama")))
    found = anatomy_of(family("llama"))
    attention = 6 * 2 * 16 * 32  # layers x seq_len x width
    assert training_flops_per_token(found, config, 16) == 6 * (found.parameters - 96 * 32) + attention


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_flops_of_a_model_without_attention_heads(model_type: str) -> None:
    config = read_config(Model(config=shrunk(model_type)))
    found = anatomy_of(shrunk(model_type))
    multiplying = found.parameters - (0 if found.tied else 96 * 32)
    assert training_flops_per_token(found, config, 16) == 6 * multiplying


# Unsupported models


def test_an_unreadable_model_is_refused_with_the_searched_names() -> None:
    with pytest.raises(ModelError, match="no blocks found") as caught:
        anatomy_of({"model_type": "xlnet"})
    assert "looked for a list of blocks" in str(caught.value)


def test_a_model_without_embeddings_is_refused() -> None:
    class Line(transformers.PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(transformers.PreTrainedConfig())
            self.slope = torch.nn.Parameter(torch.zeros(()))

    with pytest.raises(ModelError, match="no embedding found"):
        read_anatomy(Line())


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("t5", "encoder-decoder"), ("mt5", "encoder-decoder"), ("bert", "encoder-only"), ("distilbert", "encoder-only")],
)
def test_encoders_are_refused_with_their_kind(model_type: str, kind: str) -> None:
    with pytest.raises(ModelError, match=f"{model_type} is an {kind} model") as caught:
        anatomy_of({"model_type": model_type})
    assert "name a causal model" in str(caught.value)
    assert len(str(caught.value)) < 400  # neither patterns nor a list of all families


def test_every_causal_model_of_the_library_is_read_or_refused() -> None:
    """Each family whose default configuration can be built is read or refused with a ModelError; few are refused."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    read, refused = [], []
    for model_type in names:
        try:
            config = transformers.AutoConfig.for_model(model_type)
            for key in ("num_hidden_layers", "n_layer"):
                if key in config.to_dict() and getattr(config, "layer_types", None) is None:
                    setattr(config, key, 2)
            model = build_on_meta(config, torch.float32)
        except Exception:  # the default configuration cannot be built
            continue
        try:
            read_anatomy(model)
            read.append(model_type)
        except ModelError:
            refused.append(model_type)
    assert len(read) >= 100, (len(read), refused)
    assert {"llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "opt", "bloom", "olmo2"} <= set(read)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_do_not_affect_each_other(name: str) -> None:
    """Logits of two documents in one row equal the logits of each document alone."""
    source = Model(config=family(name))
    model = build_plain(source, read_config(source), torch.float32).eval()
    tokens = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        packed = model(input_ids=tokens, **row_arguments(model, positions)).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in (tokens[:, :8], tokens[:, 8:])]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


def test_roles_of_a_configuration() -> None:
    config = transformers.AutoConfig.for_model(**family("llama"))
    assert standard_name(config, "model.layers.0.mixer") == "mixer"
    config.weft_roles = {"mix.*": "attention"}
    assert standard_name(config, "model.layers.0.mixer") == "self_attn"
    config.weft_roles = {"mix.*": "attn"}
    with pytest.raises(ModelError, match=r"the role attn of modules named mixer[\s\S]*the roles are attention, "):
        standard_name(config, "model.layers.0.mixer")
