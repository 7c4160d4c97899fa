"""Training FLOPs per token from the anatomy of a model: the numerator of MFU."""

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
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return of_matmuls
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    query_dim = getattr(text, "qk_head_dim", None) or head_dim
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    attending = sum(1 for block in anatomy.blocks if block.attention)
    return of_matmuls + 6.0 * attending * seq_len * heads * (query_dim + value_dim) / 2
