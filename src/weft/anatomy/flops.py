"""Training FLOPs per token from the anatomy of a model: the numerator of MFU."""

from statistics import fmean

from transformers import PretrainedConfig

from weft.anatomy.roles import Anatomy


def training_flops_per_token(anatomy: Anatomy, config: PretrainedConfig, seq_len: int) -> float:
    """FLOPs of forward and backward per token: 6 N + 6 layers seq_len width (Chowdhery et al., PaLM, 2022, causal).

    N is the number of active parameters in matmuls: all except the input embedding (a tied head counts). The second term is
    causal attention over the full row, where `width` = heads x mean of query and value head dims; attention inside shorter
    documents does less work. Recomputation is not counted. A frozen weight has no gradient: 4 instead of 6. A model without
    attention heads (Mamba, RWKV) has no second term.
    """
    text = config.get_text_config()
    embedding = anatomy.vocab_size * text.hidden_size
    multiplying = anatomy.active_parameters - (0 if anatomy.tied else embedding)
    trained = anatomy.parameters - anatomy.frozen_parameters
    of_matmuls = 6.0 * multiplying - (2.0 * max(multiplying - trained, 0) if anatomy.frozen_parameters else 0.0)
    if getattr(text, "num_attention_heads", None) is None:
        return of_matmuls
    width = fmean(_attention_width(layer) for layer in layer_configs(config))
    attending = sum(1 for block in anatomy.blocks if block.attention)
    return of_matmuls + 6.0 * attending * seq_len * width


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Text configuration of each layer, where Transformers keeps one for each; else that of all layers.

    The configuration of a model with unlike layers refuses to give a value that its layers differ in.
    """
    text = config.get_text_config()
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _attention_width(text: PretrainedConfig) -> float:
    """Heads x mean of query and value head dims."""
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    query_dim = getattr(text, "qk_head_dim", None) or head_dim
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    return heads * (query_dim + value_dim) / 2
