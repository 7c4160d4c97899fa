"""Small copies of a model for checks at startup: the same code and kinds of blocks in a few megabytes."""

import copy
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.errors import ModelError

MAX_COPY_PARAMETERS = 2**25  # parameters
VOCABULARY = 96
POSITIONS = 64
NEAR = 8  # distance in tokens, shorter than the documents of a check
BETWEEN = 16  # distance in tokens, longer than the first document of a row and shorter than the second
NOISE = 0.1  # standard deviation of noise added to all weights, so that no gate is closed and attention is not uniform
# Sizes in every copy, by patterns of their keys.
FIXED_SIZES: tuple[tuple[str, int], ...] = (
    (r"(padded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions", POSITIONS),
)
# Sizes in a copy with small widths. A value that is already smaller is rounded down to a power of two; 0 is kept.
SIZES: tuple[tuple[str, int], ...] = (
    (r"hidden_size|n_embd|d_model|embedding_(size|dim)|word_embed_proj_dim|lru_width", 32),
    (r"adapter_(input_size|in_dim|out_dim)", 32),
    (r"num_attention_heads(_per_layer)?|n_heads?|num_heads|(en|de)coder_attention_heads|swa_num_attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_global_key_value_heads", 2),
    (r"head_dim|qk_(rope|nope)_head_dim|v_head_dim|kv_channels|(global|swa|swa_v)_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r"intermediate_size(_mlp)?|(en|de)coder_ffn_dim|ffn_dim|n_inner|ffn_hidden_size|mlp_dim|dim_ff", 48),
    (r"(moe|shared_experts?|dense|shared)_intermediate_size|expert_ffn_hidden_size", 24),
    (r"moe_shared_expert_intermediate_size", 24),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"(q|kv)_lora_rank|hidden_size_per_layer_input|laurel_rank", 16),
    (r"linear_num_((key|value)_)?heads", 4),
    (r"index_n_heads", 32),  # with few heads, all scores may be zero, and ties decide which keys are attended to
    (r"index_head_dim|linear_((key|value)_)?head_dim", 8),
    (r"mamba_(n|num)_heads|mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size", 8),
    (r"mamba_d_ssm", 64),
)
# Distances in tokens: shrunk so that they are shorter than rows of a check exactly if they are shorter than rows of the job.
ORIGINAL_LENGTH = "original_max_position_embeddings"
DISTANCES = re.compile(
    rf"(attention_)?window_size|\w*sliding_window(_size)?|attention_chunk_size|index_topk|{ORIGINAL_LENGTH}"
)
DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers")
RANDOMNESS = re.compile(r".*(dropout|pdrop|layerdrop|jitter).*")
TOKENS = re.compile(r".*_token_id")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def small_copy(model: PreTrainedModel, anatomy: Anatomy, seq_len: int | None) -> PreTrainedModel:
    """Build a small model of the same class: float32, in host memory, evaluation mode, eager attention, new random weights.

    The first of these copies that can be built and run is returned:

    1. small widths, and the first blocks up to the one that completes all kinds of blocks;
    2. small widths, and all blocks;
    3. the model's widths, with the blocks of 1;
    4. the model's widths, with the blocks of 2.

    No copy has more than 2^25 parameters. The weights are deterministic, and torch's default generator is not changed.

    Args:
        model: full model on any device, including meta; it is not modified.
        seq_len: tokens of the longest row; attention windows of at least this length have no effect in the copy. None: any
            length.

    Raises:
        ModelError: no small copy can be built; the message has the first reason.
    """
    kinds, reasons = block_kinds(model, anatomy), []
    for widths, depth in product((True, False), sorted({_first_with_all(kinds), len(kinds)})):
        try:
            table = _shrink(model.config.to_dict(), seq_len, depth, widths=widths)
            small = _build(type(model), type(model.config)(**table))
            if depth < len(kinds) and not set(kinds) <= set(block_kinds(small, read_anatomy(small))):
                continue
            with torch.no_grad(), torch.device("cpu"):
                small(input_ids=torch.full((1, 4), 3), use_cache=False)
            return small
        except Exception as error:  # families raise many types of exceptions for sizes that they do not support
            reasons.append(" ".join(f"{type(error).__name__}: {error}".split())[:200])
    raise ModelError(
        f"no small copy of {anatomy.family} can be built: {reasons[0]}",
        where=f"model_type {anatomy.family}",
        rule=f"a small copy has all kinds of blocks and at most {MAX_COPY_PARAMETERS:,} parameters",
    )


def memo_of(model: PreTrainedModel) -> dict[str, Any]:
    """Results of experiments on small copies, by name of the experiment, for models of one class and configuration."""
    kind: Any = type(model)
    return _memo(kind, model.config.to_json_string(use_diff=False))


@lru_cache(64)
def _memo(kind: Any, config: str) -> dict[str, Any]:
    return {}


def block_kinds(model: PreTrainedModel, anatomy: Anatomy) -> list[tuple[Any, ...]]:
    """Kind of each block: the classes of its modules and their boolean and string attributes, without any sizes."""
    return [tuple(dict.fromkeys(_flags(model.get_submodule(block.name)))) for block in anatomy.blocks]


def _flags(block: nn.Module) -> Iterator[tuple[Any, ...]]:
    for name, module in block.named_modules():
        flags = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if (value is None or isinstance(value, str | bool)) and key != "training" and not key.startswith("_")
        ]
        yield re.sub(r"\d+", "*", name), type(module).__name__, *flags


def _first_with_all(kinds: list[tuple[Any, ...]]) -> int:
    """Number of leading blocks that include all kinds of blocks, at least two."""
    return min(max(2, *(kinds.index(kind) + 1 for kind in kinds)), len(kinds))


def _build(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with deterministic random weights."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(prod(parameter.shape) for parameter in kind(copy.deepcopy(config)).parameters())
    if size > MAX_COPY_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        with torch.device("cpu"), torch.no_grad():
            model = kind(config).float().eval()
            for parameter in (parameter for parameter in model.parameters() if parameter.is_floating_point()):
                parameter += NOISE * torch.randn_like(parameter)
    finally:
        torch.set_rng_state(state)
    return model


def _shrink(table: dict[str, Any], seq_len: int | None, depth: int, *, widths: bool) -> dict[str, Any]:
    """Table of a small configuration: each key is shrunk by the pattern that its name matches.

    Args:
        table: table of the original configuration.
        seq_len: tokens of the longest row; None: any length.
        depth: number of leading blocks to keep.
        widths: shrink the keys of SIZES; otherwise only those of FIXED_SIZES.
    """
    blocks = next((value for key, value in table.items() if DEPTH.fullmatch(key) and value), 0)
    small: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list | tuple) and blocks > 1 and len(value) == blocks:
            small[key] = [_size(key, item, widths=widths) for item in value[:depth]]
        elif isinstance(value, dict) and key.startswith("rope_"):
            small[key] = _shrink_rope(value, seq_len)
        elif isinstance(value, dict) and "model_type" in value:
            small[key] = _shrink(value, seq_len, depth, widths=widths)
        elif isinstance(value, dict) and key.startswith("per_layer"):  # by block index
            own = {index: settings for index, settings in value.items() if int(index) < depth}
            small[key] = {index: _shrink(settings, seq_len, depth, widths=widths) for index, settings in own.items()}
        else:
            small[key] = _shrink_value(key, value, seq_len, depth, widths=widths)
    if widths:
        _match_sizes(table, small)
    return small


def _shrink_value(key: str, value: Any, seq_len: int | None, depth: int, *, widths: bool) -> Any:
    """Value of a key that has no table; arguments as of `_shrink`."""
    if DEPTH.fullmatch(key) and value:
        return min(value, depth)
    if DISTANCES.fullmatch(key) and isinstance(value, int) and value > 0:
        return _distance(key, value, seq_len)
    if RANDOMNESS.fullmatch(key) and isinstance(value, int | float):
        return type(value)(0)
    if TOKENS.fullmatch(key):
        return _token(key, value)
    if (
        key == "output_router_logits"
    ):  # Weft computes the auxiliary loss: that of the library supports no prebuilt masks
        return False
    return _size(key, value, widths=widths)


def _size(key: str, value: Any, *, widths: bool) -> Any:
    """Size of a key in a copy; a value that is not a size is returned unchanged."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, size in FIXED_SIZES:
        if re.fullmatch(pattern, key):
            return size
    for pattern, size in SIZES if widths else ():
        if re.fullmatch(pattern, key):
            return size if value >= size else 1 << (value.bit_length() - 1)
    return value


def _match_sizes(table: dict[str, Any], small: dict[str, Any]) -> None:
    """Set sizes in the small table that depend on other sizes."""
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    if kv_heads in small and (small.get("kv_lora_rank") or table[kv_heads] == table[heads]):
        small[kv_heads] = small[heads]  # a key and a value for every query head
    if {"expand", "hidden_size", "num_heads", "head_dim"} <= small.keys():  # Mamba 2
        small["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
    if small.get("n_routed_experts") and small.get("num_experts_per_tok", 1) is None:
        small["num_experts_per_tok"] = 2
    parts = "qk_nope_head_dim", "qk_rope_head_dim"
    per_layer = "per_layer_config" in table and all(part in table for part in parts)
    if per_layer or table.get("head_dim") == sum(table.get(part) or 0 for part in parts):
        small["head_dim"] = sum(small[part] for part in parts)
    for key, value in small.items():
        if isinstance(value, dict) and key.startswith("rope_"):
            _cut_factors(value, _rotary_dim(small) / _rotary_dim(table))


def _rotary_dim(table: dict[str, Any]) -> int:
    """Rotary dims per head, up to a factor (partial_rotary_factor) that is the same in the copy."""
    heads = table.get("num_attention_heads") or table.get("n_head") or 1
    width = table.get("hidden_size") or table.get("n_embd") or heads
    return table.get("qk_rope_head_dim") or table.get("head_dim") or width // heads


def _cut_factors(rope: dict[str, Any], share: float) -> None:
    """Truncate the factors of LongRoPE for heads that are smaller by the factor `share`, in place."""
    for key, value in rope.items():
        if isinstance(value, dict):
            _cut_factors(value, share)
        elif key in ("short_factor", "long_factor"):
            rope[key] = value[: max(1, round(len(value) * share))]


def _shrink_rope(rope: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """Copy of rotary parameters with shrunk original lengths."""
    small = {}
    for key, value in rope.items():
        small[key] = _shrink_rope(value, seq_len) if isinstance(value, dict) else value
        if DISTANCES.fullmatch(key) and value:
            small[key] = _distance(key, value, seq_len)
    return small


def _token(key: str, value: Any) -> Any:
    """Id of a special token in a copy: an id that no check uses, or the unchanged id if it is out of range."""
    if isinstance(value, list):
        return [_token(key, item) for item in value]
    if value is None or (value >= VOCABULARY and key not in SPECIAL):
        return value
    return SPECIAL.get(key, 2)


def _distance(key: str, value: int, seq_len: int | None) -> int:
    """Distance in a copy: longer than rows of a check if it is at least seq_len, else shorter."""
    near = BETWEEN if key == ORIGINAL_LENGTH else NEAR
    return max(value, POSITIONS) if seq_len is not None and value >= seq_len else min(value, near)
