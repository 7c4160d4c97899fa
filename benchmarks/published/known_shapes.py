"""Dimensions of published models by name, for tables that lack some of them."""

from dataclasses import replace

from weft.planner.costmodel.shape import Shape

_MLA = Shape(
    61, 7168, 128, 128, 128, 18432, 129280, q_lora=1536, kv_lora=512, rope_dim=64, value_dim=128, experts=256, top_k=8,
    top_groups=4, expert_ffn=2048, shared_ffn=2048, dense_layers=3,
)  # fmt: skip
_LLAMA2_7B = Shape(32, 4096, 32, 32, 128, 11008, 32000)
# The first key that occurs in a model's name is used.
KNOWN: dict[str, Shape] = {
    "deepseekv3": replace(_MLA, predict_ahead=1),
    "deepseekv2": replace(
        _MLA,
        layers=60,
        hidden=5120,
        ffn=12288,
        vocab=102400,
        experts=160,
        top_k=6,
        top_groups=3,
        expert_ffn=1536,
        shared_ffn=3072,
        dense_layers=1,
    ),
    "dsv3mini": replace(
        _MLA,
        layers=4,
        hidden=1792,
        heads=8,
        kv_heads=8,
        ffn=4864,
        experts=16,
        top_k=4,
        top_groups=0,
        expert_ffn=1024,
        shared_ffn=1024,
        dense_layers=1,
    ),
    "kimik2": replace(_MLA, heads=64, kv_heads=64, vocab=163840, experts=384, top_groups=0, dense_layers=1),
    "moonlight": replace(
        _MLA,
        layers=27,
        hidden=2048,
        heads=16,
        kv_heads=16,
        ffn=11264,
        vocab=163840,
        experts=64,
        top_k=6,
        top_groups=0,
        expert_ffn=1408,
        shared_ffn=2816,
        dense_layers=1,
        q_lora=0,
    ),
    "gptoss120b": Shape(
        36, 2880, 64, 8, 64, 0, 201088, experts=128, top_k=4, expert_ffn=2880, window=128, expert_biases=True
    ),
    "gptoss20b": Shape(
        24, 2880, 64, 8, 64, 0, 201088, experts=32, top_k=4, expert_ffn=2880, window=128, expert_biases=True
    ),
    "qwen3235b": Shape(94, 4096, 64, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=1536),
    "qwen330b": Shape(48, 2048, 32, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=768),
    "qwen257b": Shape(28, 3584, 28, 4, 128, 0, 151936, experts=64, top_k=8, expert_ffn=2560, shared_ffn=20480),
    "mixtral8x7b": Shape(32, 4096, 32, 8, 128, 0, 32000, experts=8, top_k=2, expert_ffn=14336),
    "mixtral8x22bg8t8": Shape(56, 6144, 48, 8, 128, 0, 32000, experts=64, top_k=8, expert_ffn=2048),
    "mixtral8x22b": Shape(56, 6144, 48, 8, 128, 0, 32768, experts=8, top_k=2, expert_ffn=16384),
    "llama38x70b": Shape(80, 8192, 64, 8, 128, 0, 128256, experts=8, top_k=2, expert_ffn=28672),
    "nemotron3nano": Shape(
        52,
        2688,
        32,
        2,
        128,
        0,
        131072,
        False,
        experts=128,
        top_k=6,
        expert_ffn=1856,
        shared_ffn=3712,
        mamba_layers=23,
        mamba_inner=4096,
        attention_layers=6,
        mlp_layers=23,
    ),
    "nemotron3super": Shape(
        88,
        4096,
        32,
        2,
        128,
        0,
        131072,
        False,
        experts=512,
        top_k=22,
        expert_ffn=2688,
        shared_ffn=5376,
        latent=1024,
        mamba_layers=40,
        mamba_inner=8192,
        attention_layers=8,
        mlp_layers=40,
        predict_ahead=2,
    ),
    "nemotron415b": Shape(32, 6144, 48, 8, 128, 24576, 256000, gated=False),
    "gpt3": Shape(96, 12288, 96, 96, 128, 49152, 51200, gated=False, positions=2048, biases=True, tied=True),
    "gpt175b": Shape(96, 12288, 96, 96, 128, 49152, 51200, gated=False, positions=2048, biases=True, tied=True),
    "mistral7b": Shape(32, 4096, 32, 8, 128, 14336, 32000, window=4096, windowed=1.0),
    "llama213b": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "llama270b": Shape(80, 8192, 64, 8, 128, 28672, 32000),
    "llama27b": _LLAMA2_7B,
}


def known_shape(name: str) -> Shape | None:
    """Published dimensions of a model by its name; None if unknown."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return next((shape for part, shape in KNOWN.items() if part in plain), None)
