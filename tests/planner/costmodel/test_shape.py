"""Parameters, FLOPs and bytes of a decoder's shape match published formulas and figures."""

import pytest
from benchmarks.published.known_shapes import KNOWN, known_shape
from benchmarks.published.published import megatron_hardware_flops

from weft.errors import ModelError
from weft.planner.costmodel.shape import (
    Shape,
    activation_bytes,
    from_config,
    model_state_bytes_of,
)


def megatron_flops(shape: Shape, batch: int, seq: int) -> float:
    """Model FLOPs of one GPT step: 72 B L s h^2 (1 + s / 6h + V / 12 h L) (Korthikanti et al. 2022, appendix A)."""
    h, layers = shape.hidden, shape.layers
    return 72 * batch * layers * seq * h**2 * (1 + seq / (6 * h) + shape.vocab / (12 * h * layers))


def gpt_parameters(shape: Shape) -> float:
    """Parameters of a GPT: 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h) (Narayanan et al. 2021, equation 2)."""
    h, layers = shape.hidden, shape.layers
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (shape.vocab + shape.positions) / (12 * layers * h))


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    return Shape(layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, False, True, 2048, True)


@pytest.mark.parametrize(
    ("name", "seq", "giga"),
    [("deepseekv3", 4096, 260), ("qwen3235b", 4096, 148), ("qwen330b", 4096, 23.0), ("kimik2", 4096, 204)],
)
def test_flops_per_token_match_megatron_bridge(name: str, seq: int, giga: float) -> None:
    assert KNOWN[name].flops(seq) == pytest.approx(giga * 1e9, rel=0.01)


@pytest.mark.parametrize(("seq", "giga"), [(4096, 27.2), (8192, 30.8)])
def test_gpt_oss_flops_match_megatron_bridge_with_its_simplifications(seq: int, giga: float) -> None:
    counted = Shape(36, 2880, 64, 8, 64, 0, 201088, gated=False, experts=128, top_k=4, expert_ffn=2880)
    assert counted.flops(seq) == pytest.approx(giga * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseekv3", 671), ("deepseekv2", 236), ("qwen3235b", 235.1), ("mixtral8x7b", 46.7), ("nemotron3nano", 31.6)],
)
def test_parameters_match_the_model_card(name: str, billions: float) -> None:
    assert KNOWN[name].parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128)])
def test_gpt_parameters_and_flops_match_published_formulas(layers: int, hidden: int, heads: int) -> None:
    shape = gpt(layers, hidden, heads)
    assert shape.parameters == pytest.approx(gpt_parameters(shape), rel=1e-3)
    assert shape.flops(2048, causal=False) * 2048 * 4 == pytest.approx(megatron_flops(shape, 4, 2048), rel=1e-3)
    head = 2048 * 2 * shape.vocab * hidden
    recomputed = shape.flops(2048, causal=False) * 2048 / 3 - head
    hardware = megatron_flops(shape, 1, 2048) + recomputed
    assert hardware == pytest.approx(megatron_hardware_flops(shape, 1, 2048), rel=1e-3)


def test_activation_bytes_match_korthikanti() -> None:
    shape, s, b, t = gpt(48, 6144, 64), 2048, 4, 8
    h, a = shape.hidden, shape.heads
    token = s * b * h
    cases = (
        (activation_bytes(shape, s, b), 34 + 5 * a * s / h),
        (activation_bytes(shape, s, b, t), 10 + 24 / t + 5 * a * s / (h * t)),
        (activation_bytes(shape, s, b, t, sp=True), (34 + 5 * a * s / h) / t),
        (activation_bytes(shape, s, b, t, recompute="selective"), 10 + 24 / t),
        (activation_bytes(shape, s, b, t, sp=True, recompute="selective"), 34 / t),
        (activation_bytes(shape, s, b, t, recompute="full"), 2),
    )
    for found, expected in cases:
        assert found == pytest.approx(token * expected)


def test_activation_shares_match_figure_7_of_korthikanti() -> None:
    shape = gpt(48, 6144, 64)
    full = activation_bytes(shape, 2048, 4, 8)
    parts = [
        activation_bytes(shape, 2048, 4, 8, sp=True),
        activation_bytes(shape, 2048, 4, 8, sp=True, recompute="selective"),
    ]
    assert [round(100 * part / full, 1) for part in parts] == [66.8, 16.1]


def test_flash_attention_saves_no_scores() -> None:
    shape = KNOWN["llama27b"]
    scores = activation_bytes(shape, 4096, 1) - activation_bytes(shape, 4096, 1, flash=True)
    assert scores == 32 * 4096 * (5 * 4096 - 4)
    assert activation_bytes(shape, 4096, 1, recompute="light", flash=True) < activation_bytes(
        shape, 4096, 1, flash=True
    )


@pytest.mark.parametrize(
    ("billions", "ranks", "gigabytes"),
    [(7.5, 64, (120, 31.4, 16.6, 1.88)), (128, 4, (2048, 896, 704, 512)), (1000, 1024, (16000, 4011, 2013, 15.6))],
)
def test_model_state_bytes_match_table_1_of_zero(billions: float, ranks: int, gigabytes: tuple[float, ...]) -> None:
    for zero, expected in enumerate(gigabytes):
        assert model_state_bytes_of(billions, zero, ranks) == pytest.approx(expected, rel=0.01)


def test_shape_from_hugging_face_config() -> None:
    config = {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
    }  # fmt: skip
    assert from_config(config).parameters == KNOWN["deepseekv3"].parameters
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    gpt2 |= {"activation_function": "gelu_new", "tie_word_embeddings": True}
    assert from_config(gpt2).parameters == pytest.approx(124.4e6, rel=0.002)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    windows = from_config(config | {"sliding_window": 512, "layer_types": kinds})
    assert (windows.window, windows.windowed) == (512, pytest.approx(5 / 6))
    assert windows.attention_flops(4096) < from_config(config).attention_flops(4096) / 2
    assert from_config(config | {"sliding_window": 512, "use_sliding_window": False}).window == 0
    with pytest.raises(ModelError, match="num_hidden_layers"):
        from_config({"hidden_size": 8, "num_attention_heads": 1})


def test_known_shape_ignores_spelling() -> None:
    assert known_shape("Qwen3_30B_a3B") is known_shape("Qwen3-30B-A3B") is KNOWN["qwen330b"]
    assert known_shape("somebody's 7B") is None
