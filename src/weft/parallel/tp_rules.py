"""Name patterns of linear layers for tensor parallelism, and their numbers of heads and hidden units."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import standard_name
from weft.anatomy.transformers import MASKED_WORDS
from weft.errors import PlanError

# Last name components of linear layers in the families of Transformers 5.17 to 5.23.
QUERY = re.compile(r"q_proj|q_b_proj|query|wq|gate_proj|g_proj")  # the last two gate the output of each head
KEY_VALUE = re.compile(r"k_proj|v_proj|key|value|wk|wv")
LATENT_KEY_VALUE = re.compile(r"kv_b_proj")  # keys and values of every query head (multi-head latent attention)
PACKED_QUERY_KEY_VALUE = re.compile(r"qkv_proj|c_attn|Wqkv")
PACKED_UP = re.compile(r"gate_up_proj|Wi")
# Families whose packed weights are known to hold one projection after the other. Other families (GPT-NeoX) interleave the
# projections head by head, and a split in the wrong order would silently give wrong results.
PACKED_FAMILIES = ("glm", "glm4", "gpt2", "modernbert", "phi3")
UP = re.compile(r"gate_proj|up_proj|c_fc|fc1|fc_in|w1|w3|dense_h_to_4h")
DOWN = re.compile(r"o_proj|out_proj|down_proj|c_proj|fc2|fc_out|w2|wo|Wo|dense|dense_4h_to_h")
REPLICATED = re.compile(r"q_a_proj|kv_a_proj_with_mqa|.*norm.*|ln_.*")
PER_HEAD = re.compile(r"sinks|gate_bias")
# Norms inside attention over one head or over the full output of a projection (see `wide_norms`).
PROJECTION_NORM = re.compile(r"(q|k|v|query|key|value|q_a|kv_a)_(layer)?norm")
ATTENTION_MATRICES = (QUERY, KEY_VALUE, LATENT_KEY_VALUE, PACKED_QUERY_KEY_VALUE, DOWN, REPLICATED)
MLP_MATRICES = (PACKED_UP, UP, DOWN)


def config_of(model: Any, name: str) -> Any:
    """Configuration of the part of a model that a module belongs to, such as that of a vision tower."""
    found = model.config
    for end in [index for index, letter in enumerate(name) if letter == "."]:
        found = getattr(model.get_submodule(name[:end]), "config", found)
    return found.get_text_config()


def splits_vocabulary_of(model: Any) -> bool:
    """True if embedding and head are split over tp by vocabulary.

    Encoder-decoder models and those of masked words compute their losses from the logits of the full vocabulary.
    """
    return not model.config.is_encoder_decoder and type(model).__name__ not in MASKED_WORDS


def count_heads(config: Any) -> int:
    """Number of query heads, from the configuration of a language model.

    Raises:
        PlanError: the configuration does not contain it, or it differs between layers.
    """
    heads = _read_heads(config, "num_attention_heads")
    if not isinstance(heads, int):
        raise PlanError(
            f"the configuration of {config.model_type} has no num_attention_heads",
            where="plan.parallel",
            rule="heads are divided among the ranks of tp and cp_ulysses",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    return heads


def count_kv_heads(config: Any) -> int:
    """Number of KV heads, from the configuration of a language model; by default the number of query heads.

    Raises:
        PlanError: see `count_heads`.
    """
    return _read_heads(config, "num_key_value_heads") or count_heads(config)


def _read_heads(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except RuntimeError:  # Transformers' AmbiguousGlobalPerLayerAttributeError
        raise PlanError(
            f"{key} of {config.model_type} differs between layers",
            where="plan.parallel",
            rule="heads are divided among the ranks of tp and cp_ulysses in the same way in every layer",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        ) from None


def out_features(module: Any) -> int:
    """Number of output features of a linear layer."""
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def inner_features(module: Any, last: str) -> int:
    """Number of hidden units of the MLP that a linear layer belongs to; a packed layer has two outputs per unit."""
    if DOWN.fullmatch(last):
        return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])
    return out_features(module) // (2 if PACKED_UP.fullmatch(last) else 1)


def wide_norms(attention: nn.Module, config: Any) -> Iterator[nn.Module]:
    """Norms of queries and keys over all heads together, as in OLMo-2; `config` is the configuration of the model."""
    head_dim = getattr(attention, "head_dim", None)
    for name, module in attention.named_children():
        weight = getattr(module, "weight", None)
        is_norm = re.fullmatch(r"([qk]|query|key)_(layer)?norm", standard_name(config, name))
        if is_norm and weight is not None and weight.numel() != head_dim:
            yield module
