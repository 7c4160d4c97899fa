"""Name patterns of linear layers for tensor parallelism, and their numbers of heads and hidden units."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import standard_name
from weft.errors import Refusal, raise_if_refused

# Last name components of linear layers in the families of Transformers 5.17 to 5.23.
QUERY = re.compile(
    r"q_proj|q_b_proj|q_lin|query|wq|q|to_q|add_q_proj|gate_proj|g_proj"
)  # the last two gate the output of each head
KEY_VALUE = re.compile(r"[kv]_proj|[kv]_lin|key|value|wk|wv|k|v|(to|add)_[kv](_proj)?")
LATENT_KEY_VALUE = re.compile(r"kv_b_proj")  # keys and values of every query head (multi-head latent attention)
PACKED_QUERY_KEY_VALUE = re.compile(r"qkv_proj|c_attn|Wqkv")
PACKED_UP = re.compile(r"gate_up_proj|Wi")
# Families whose packed weights are known to hold one projection after the other. Other families (GPT-NeoX) interleave the
# projections head by head, and a split in the wrong order would silently give wrong results.
PACKED_FAMILIES = (
    *("glm", "glm4", "gpt2", "modernbert", "phi3", "phi4_multimodal"),
    *("Flux2Transformer2DModel", "Flux3Transformer2DModel", "OmniGenTransformer2DModel"),
)
# Families whose code reads the weight of the embedding, which ranks of tp divide.
READS_EMBEDDING = ("gemma4",)
# Families whose attention reshapes its heads to the width of the residual stream.
FIXED_WIDTH = ("big_bird", "fsmt", "led", "trocr", "OmniGenTransformer2DModel")
# Families whose attentions get features of positions that all heads share, in the argument `position_bias`.
SHARED_POSITIONS = ("speecht5",)
# Families whose attention reads its numbers of heads from its configuration.
READS_HEADS = ("moonshine", "moonshine_streaming", "moonshine_streaming_encoder")
# Arguments of attentions that compute queries, keys and values from several inputs: those of PEGASUS-X and MobileBERT.
SEVERAL_INPUTS = {"global_hidden_states", "value_tensor"}
UP = re.compile(
    r"gate_proj|up_proj|c_fc|fc1|fc_in|ffn|lin1|dense1|pwconv1|w1|w3|w_[01]|wi(_0|_1)?|dense_h_to_4h"
    r"|intermediate_dense|linear1"
)
DOWN = re.compile(
    r"o|o_proj|to_add_out|out_proj|out_lin|down_proj|c_proj|fc2|fc_out|ffn_output|lin2|dense2|pwconv2|w2|w_out|wo|Wo"
    r"|dense|dense_4h_to_h|output_dense|linear2"
)
REPLICATED = re.compile(r"q_a_proj|kv_a_proj_with_mqa|.*norm.*|ln_.*")
PER_HEAD = re.compile(r"sinks|gate_bias")
PER_HEAD_COLUMNS = re.compile(r"relative_attention_bias\.weight")  # [buckets, heads], the weight of an embedding
# Norms inside attention over one head or over the full output of a projection (see `wide_norms`).
PROJECTION_NORM = re.compile(r"(q|k|v|query|key|value|q_a|kv_a)_(layer)?norm|norm_(added_)?[qk]")
ATTENTION_MATRICES = (QUERY, KEY_VALUE, LATENT_KEY_VALUE, PACKED_QUERY_KEY_VALUE, DOWN, REPLICATED)
MLP_MATRICES = (PACKED_UP, UP, DOWN)


def config_of(model: Any, name: str) -> Any:
    """Configuration of the part of a model that a module belongs to, such as that of a vision tower."""
    found = model.config
    for end in [index for index, letter in enumerate(name) if letter == "."]:
        found = getattr(model.get_submodule(name[:end]), "config", found)
    return found.get_text_config() if isinstance(found, PretrainedConfig) else found


def regions_of(part: Any, name: str) -> list[str]:
    """Names of the modules of an attention or MLP that get its input or make its output.

    A part adds nothing to the residual stream itself, except in BERT and its descendants, and in Funnel. In their parts
    `attention.output` and `output`, a dense layer is followed by the sum and its norm; the dense layer alone is then a region.

    Args:
        part: the attention or MLP.
        name: its full name.
    """
    if hasattr(getattr(part, "output", None), "dense"):
        inner = [child for child in ("self", "attention") if hasattr(part, child)]
        return [f"{name}.{child}" for child in (*inner, "output.dense")]
    is_half = name.rpartition(".")[2] in ("intermediate", "output") and hasattr(part, "dense")
    if hasattr(part, "linear_1") and hasattr(part, "layer_norm"):  # Funnel adds the residual stream inside its MLP
        return [f"{name}.linear_1", f"{name}.linear_2"]
    return [f"{name}.dense"] if is_half else [name]


def read_heads(config: Any) -> tuple[int, int] | Refusal:
    """Numbers of query heads and of KV heads, from the configuration of a language model; by default as many KV heads.

    Returns:
        A refusal if the configuration does not contain them, or they differ between layers.
    """
    is_diffusers = not isinstance(config, PretrainedConfig)  # Z-Image has n_heads, Lumina num_kv_heads
    keys = {
        "num_attention_heads": ("n_heads",) if is_diffusers else (),
        "num_key_value_heads": ("num_kv_heads", "n_kv_heads") if is_diffusers else (),
    }
    rule, fix = (
        "heads are divided among the ranks of tp and cp_ulysses",
        "set plan.parallel.tp = 1 and plan.parallel.cp = 1",
    )
    counts: list[int] = []
    for key, others in keys.items():
        try:
            values = [getattr(config, each, None) for each in (key, *others)]
        except RuntimeError:  # Transformers' AmbiguousGlobalPerLayerAttributeError
            what = f"{key} of {config.model_type} differs between layers"
            return Refusal(what, "plan.parallel", f"{rule} in the same way in every layer", fix)
        found = next((value for value in values if value is not None), None)
        if not counts and not isinstance(found, int):
            what = f"the configuration of {getattr(config, 'model_type', 'the model')} has no num_attention_heads"
            return Refusal(what, "plan.parallel", rule, fix)
        counts.append(found or counts[0])
    return counts[0], counts[1]


def count_heads(config: Any) -> tuple[int, int]:
    """Numbers of query heads and of KV heads, see `read_heads`.

    Raises:
        PlanError: the refusal.
    """
    return raise_if_refused(read_heads(config))


def is_depthwise(module: nn.Module, units: int) -> bool:
    """True for a convolution that computes each of the hidden units of an MLP alone (SegFormer)."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return False
    return module.groups == module.in_channels == module.out_channels == units


def out_features(module: Any) -> int:
    """Number of output features of a linear layer."""
    return int(module.weight.shape[1 if isinstance(module, Conv1D) else 0])


def inner_features(module: Any, last: str) -> int:
    """Number of hidden units of the MLP that a linear layer belongs to; a packed layer has two outputs per unit."""
    if DOWN.fullmatch(last):
        return int(module.weight.shape[0 if isinstance(module, Conv1D) else 1])
    return out_features(module) // (2 if PACKED_UP.fullmatch(last) else 1)


def width_of_head(attention: Any) -> int | None:
    """Features of a head; None if the attention tells neither them nor, as in Diffusers, the number of its heads."""
    head_dim: int | None = getattr(attention, "head_dim", None)
    if head_dim is None and hasattr(attention, "heads") and hasattr(attention, "to_q"):
        return out_features(attention.to_q) // int(attention.heads)
    return head_dim


def wide_norms(attention: Any, config: Any) -> Iterator[nn.Module]:
    """Norms of queries and keys over all heads together, as in OLMo-2; `config` is the configuration of the model."""
    head_dim = width_of_head(attention)
    for name, module in attention.named_children():
        weight = getattr(module, "weight", None)
        is_norm = re.fullmatch(r"([qk]|query|key)_(layer)?norm|norm_(added_)?[qk]", standard_name(config, name))
        if is_norm and weight is not None and weight.numel() != head_dim:
            yield module
