"""Tiny configurations of real families, small enough for a parity test in milliseconds."""

from typing import Any

SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
COMMON = {**SIZE, **HEADS, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON},
    "qwen3": {**COMMON, "tie_word_embeddings": True},
    "qwen3_moe": {**COMMON, **EXPERTS, "num_experts": 4},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **COMMON,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "olmo2": {**COMMON},
    "gemma3_text": {**COMMON, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "phi3": {**COMMON},
    "olmoe": {**COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        **COMMON,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "granitemoe": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def family(name: str) -> dict[str, Any]:
    """Configuration table of a family, for a job's `model.config`."""
    return {"model_type": name, **FAMILIES[name]}
