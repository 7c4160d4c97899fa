"""The matrices of attention and MLP: which role their names tell, and how many heads and hidden units they make."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.errors import PlanError

# Last names of matrices, as found in the families of Transformers 5.17 to 5.23.
QUERY = re.compile(r"q_proj|q_b_proj|query|wq|gate_proj|g_proj")  # and a gate on what each head gives
KEY_VALUE = re.compile(r"k_proj|v_proj|key|value|wk|wv")
LATENT_KEY_VALUE = re.compile(r"kv_b_proj")  # a key and a value for every query head
PACKED_QUERY_KEY_VALUE = re.compile(r"qkv_proj|c_attn")
PACKED_UP = re.compile(r"gate_up_proj")
# Families whose packed matrices are known to have one projection below the other. Others (GPT-NeoX) mix them head by head:
# a split by the wrong order would give wrong numbers without a word.
PACKED_FAMILIES = ("glm", "glm4", "gpt2", "phi3")
UP = re.compile(r"gate_proj|up_proj|c_fc|fc1|fc_in|w1|w3|dense_h_to_4h")
DOWN = re.compile(r"o_proj|out_proj|down_proj|c_proj|fc2|fc_out|w2|wo|dense|dense_4h_to_h")
REPLICATED = re.compile(r"q_a_proj|kv_a_proj_with_mqa|.*norm.*|ln_.*")
PER_HEAD = re.compile(r"sinks|gate_bias")
# Norms inside attention that see one head, or all of a projection's output (see `_wide_norms`).
PROJECTION_NORM = re.compile(r"(q|k|v|query|key|value|q_a|kv_a)_(layer)?norm")
CROSS_ATTENTION = re.compile(r"encoder_attn|cross_?att(entio)?n")
ATTENTION_MATRICES = (QUERY, KEY_VALUE, LATENT_KEY_VALUE, PACKED_QUERY_KEY_VALUE, DOWN, REPLICATED)
MLP_MATRICES = (PACKED_UP, UP, DOWN)


def count_heads(config: Any) -> int:
    """Query heads of an attention, by the configuration of a language model.

    Raises:
        PlanError: it does not say, or heads differ from layer to layer.
    """
    heads = _read_heads(config, "num_attention_heads")
    if not isinstance(heads, int):
        raise PlanError(
            f"the configuration of {config.model_type} does not say how many attention heads there are",
            where="plan.parallel",
            rule="heads are shared by the ranks of tp, and of cp_ulysses",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        )
    return heads


def count_kv_heads(config: Any) -> int:
    """Heads of keys and values, by the configuration of a language model; as many as query heads where it does not say.

    Raises:
        PlanError: see `count_heads`.
    """
    return _read_heads(config, "num_key_value_heads") or count_heads(config)


def _read_heads(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except RuntimeError:  # Transformers' AmbiguousGlobalPerLayerAttributeError
        raise PlanError(
            f"{key} of {config.model_type} differs from layer to layer",
            where="plan.parallel",
            rule="heads are shared by the ranks of tp, and of cp_ulysses, in the same way in every layer",
            fix="set plan.parallel.tp = 1 and plan.parallel.cp = 1",
        ) from None


def out_features(module: Any) -> int:
    """Outputs of a matrix."""
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def inner_features(module: Any, last: str) -> int:
    """Hidden units of the MLP that a matrix belongs to, each projection of a packed one for itself."""
    if DOWN.fullmatch(last):
        return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])
    return out_features(module) // (2 if PACKED_UP.fullmatch(last) else 1)


def wide_norms(attention: nn.Module) -> Iterator[nn.Module]:
    """Norms of queries and keys over all heads at once, as in OLMo-2."""
    head_dim = getattr(attention, "head_dim", None)
    for name, module in attention.named_children():
        weight = getattr(module, "weight", None)
        if re.fullmatch(r"([qk]|query|key)_(layer)?norm", name) and weight is not None and weight.numel() != head_dim:
            yield module
