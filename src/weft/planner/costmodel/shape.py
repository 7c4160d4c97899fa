"""Analytical model of a decoder: parameters, FLOPs per token and activation bytes, by formula, before any model is built.

A multiplication and an addition count as two FLOPs. Model FLOPs are one forward plus a backward of twice the forward's FLOPs,
without recomputation. Two conventions for attention are in use: full attention (PaLM, Megatron until 2024: 12 L h s per token)
and causal attention (half of that: Megatron-Bridge, Llama 3). Symbols: s sequence length, b micro-batch size, h hidden size,
a heads, t tp, c cp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from weft.errors import ModelError

Recompute = Literal["none", "light", "selective", "attention", "mlp", "full"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the dense MLP; 0 if the model has none."""
    vocab: int
    gated: bool = True
    """True if an MLP has three matrices (SwiGLU) instead of two."""
    tied: bool = False
    """True if the embedding and the head share one matrix."""
    positions: int = 0
    """Number of learned position embeddings."""
    biases: bool = False
    experts: int = 0
    top_k: int = 0
    top_groups: int = 0
    """Expert groups (one per host) that one token may be routed to; 0: no limit."""
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Total width of all shared experts."""
    dense_layers: int = 0
    """Leading layers with a dense MLP in an MoE model."""
    latent: int = 0
    """Input and output width of the experts (latent MoE: two projections around the experts); 0: hidden."""
    q_lora: int = 0
    kv_lora: int = 0
    """Low-rank dimensions of MLA; attention is MLA if kv_lora > 0."""
    rope_dim: int = 0
    """MLA: dimensions of a key with rotary embedding, in addition to head_dim."""
    value_dim: int = 0
    """MLA: dimensions of a head's value; 0: head_dim."""
    mamba_layers: int = 0
    """Layers with a state-space mixer instead of attention."""
    mamba_inner: int = 0
    attention_layers: int = -1
    """Layers with attention; -1: all layers without a Mamba mixer."""
    mlp_layers: int = -1
    """Layers with a dense MLP or experts; -1: all layers."""
    window: int = 0
    """Sliding-window length in tokens; 0: no layer has a window."""
    windowed: float = 0.5
    """Share of layers with a sliding window."""
    expert_biases: bool = False
    predict_ahead: int = 0
    """Multi-token prediction layers, each with its own head."""

    @property
    def num_attention(self) -> int:
        """Number of attention layers."""
        return self.layers - self.mamba_layers if self.attention_layers < 0 else self.attention_layers

    @cached_property
    def num_moe(self) -> int:
        """Number of MoE layers."""
        return self.num_mlp - self.dense_layers if self.experts else 0

    @cached_property
    def num_mlp(self) -> int:
        """Number of layers with a dense MLP or experts."""
        return self.layers if self.mlp_layers < 0 else self.mlp_layers

    @cached_property
    def q_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * (self.head_dim + self.rope_dim)

    @cached_property
    def v_width(self) -> int:
        """Width of the attention output of all heads: the input of the output projection."""
        return self.heads * (self.value_dim or self.head_dim)

    @cached_property
    def kv_width(self) -> int:
        """Width of the keys (and of the values) of all key-value heads."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Number of weight matrices of an MLP."""
        return 3 if self.gated else 2

    # Parameters

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer."""
        if self.kv_lora:
            queries = (
                self.hidden * self.q_lora + self.q_lora * self.q_width if self.q_lora else self.hidden * self.q_width
            )
            keys = self.hidden * (self.kv_lora + self.rope_dim) + self.kv_lora * (
                self.heads * self.head_dim + self.v_width
            )
            return queries + keys + self.v_width * self.hidden
        weights = self.hidden * (self.q_width + 2 * self.kv_width) + self.v_width * self.hidden
        return weights + (self.q_width + 2 * self.kv_width + self.hidden if self.biases else 0)

    @property
    def dense_parameters(self) -> int:
        """Parameters of one dense MLP."""
        return self.matrices * self.hidden * self.ffn + (self.ffn + self.hidden if self.biases else 0)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one layer."""
        return self.experts * self.matrices * (self.latent or self.hidden) * self.expert_ffn

    @property
    def router_parameters(self) -> int:
        """Parameters of an MoE layer outside the routed experts: router, shared experts and latent projections."""
        shared = self.matrices * self.hidden * self.shared_ffn
        return self.hidden * self.experts + shared + 2 * self.hidden * self.latent

    @property
    def mamba_parameters(self) -> int:
        """Parameters of one Mamba-2 mixer: input projections (gate, state) and output projection."""
        return self.hidden * (2 * self.mamba_inner + self.mamba_inner // 2) + self.mamba_inner * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Norm parameters of one layer."""
        return 2 * self.hidden * (2 if self.biases else 1)

    @cached_property
    def shared_parameters(self) -> int:
        """Parameters of all layers without the routed experts."""
        return (
            self.num_attention * self.attention_parameters
            + self.mamba_layers * self.mamba_parameters
            + (self.num_mlp - self.num_moe) * self.dense_parameters
            + self.num_moe * self.router_parameters
            + self.layers * self.norm_parameters
        )

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the full model."""
        ends = self.embedding_parameters + (0 if self.tied else self.vocab * self.hidden)
        return self.shared_parameters + self.num_moe * self.expert_parameters + ends + self.norm_parameters // 2

    @property
    def active_parameters(self) -> int:
        """Active parameters per token: without the embedding, with the head."""
        active = self.num_moe * self.expert_parameters * self.top_k // max(1, self.experts)
        return self.shared_parameters + active + self.vocab * self.hidden

    @cached_property
    def all_dense(self) -> "Shape":
        """The same dimensions with one dense MLP per MLP layer, of the mean width of dense MLPs and shared experts."""
        width = (self.num_mlp - self.num_moe) * self.ffn + self.num_moe * self.shared_ffn
        return replace(self, ffn=width // max(1, self.num_mlp))

    # FLOPs per token

    def attention_flops(self, seq: int, causal: bool = True) -> float:
        """Forward FLOPs per token of one layer's attention: scores and the weighted sum of values.

        In a model with sliding-window layers, the mean over all layers.
        """
        seen = seq / 2 if causal else seq
        if self.window and self.window < seq:
            seen = (1 - self.windowed) * seen + self.windowed * self.window
        return 2 * seen * (self.q_width + self.v_width)

    def flops(self, seq: int, causal: bool = True) -> float:
        """Model FLOPs per token, forward and backward: 6 per matrix parameter, plus attention (PaLM, appendix B)."""
        mamba = self.mamba_layers * 4 * self.mamba_inner * 128  # state updates; 128 states per channel
        forward = 2 * self.active_parameters + mamba + self.num_attention * self.attention_flops(seq, causal)
        if self.predict_ahead:
            layer = self.attention_parameters + self.router_parameters + 2 * self.hidden**2
            layer += self.expert_parameters * self.top_k // max(1, self.experts) + self.vocab * self.hidden
            forward += self.predict_ahead * (2 * layer + self.attention_flops(seq, causal))
        return 3 * forward


def from_config(config: Mapping[str, Any]) -> Shape:
    """Read the dimensions of a decoder from a Hugging Face config.json.

    Raises:
        ModelError: the config lacks a required dimension.
    """

    def need(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        raise ModelError(
            f"the config has no {names[0]}",
            where="config.json",
            rule="a decoder needs layers, hidden size, heads and vocabulary size",
            fix=f"set one of {', '.join(names)}",
        )

    def find(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name) is not None), 0)

    hidden, heads = need("hidden_size", "n_embd", "d_model"), need("num_attention_heads", "n_head")
    experts = find("n_routed_experts", "num_local_experts", "num_experts")
    ffn = find("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    expert_ffn = (find("moe_intermediate_size") or ffn) if experts else 0
    kinds = list(config.get("layer_types") or ())
    sliding = kinds.count("sliding_attention") / len(kinds) if kinds else float(config.get("use_sliding_window", True))
    activation = str(config.get("hidden_act") or config.get("activation_function") or "silu")
    return Shape(
        layers=need("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=find("num_key_value_heads") or heads,
        head_dim=find("qk_nope_head_dim", "head_dim") or hidden // heads,
        ffn=ffn,
        vocab=need("vocab_size"),
        gated=activation in ("silu", "swish", "gelu_pytorch_tanh", "swiglu"),
        tied=bool(config.get("tie_word_embeddings", False)),
        positions=find("n_positions") if "n_embd" in config else 0,
        biases="n_embd" in config,
        experts=experts,
        top_k=find("num_experts_per_tok", "moe_topk"),
        top_groups=find("topk_group") if find("n_group") > 1 else 0,
        expert_ffn=expert_ffn,
        shared_ffn=find("n_shared_experts") * expert_ffn or find("shared_expert_intermediate_size"),
        dense_layers=find("first_k_dense_replace"),
        q_lora=find("q_lora_rank"),
        kv_lora=find("kv_lora_rank"),
        rope_dim=find("qk_rope_head_dim") if find("kv_lora_rank") else 0,
        value_dim=find("v_head_dim") if find("kv_lora_rank") else 0,
        window=find("sliding_window") if sliding else 0,
        windowed=sliding,
    )


def model_state_bytes_of(
    parameters: float, zero: int, ranks: int, weights: float = 2, gradients: float = 2, optimizer: float = 12
) -> float:
    """Bytes of model states per data rank under a ZeRO stage (Rajbhandari et al. 2020, figure 1).

    Args:
        parameters: number of parameters that the rank would hold unsharded.
        zero: ZeRO stage: 0 shards nothing, 1 the optimizer states, 2 also gradients, 3 also weights.
        ranks: data ranks over which states are sharded.
        weights: bytes per weight.
        gradients: bytes per gradient element.
        optimizer: bytes per parameter of the float32 master copy and the moments.
    """
    parts = zip((weights, gradients, optimizer), (zero >= 3, zero >= 2, zero >= 1), strict=True)
    return parameters * sum(size / ranks if sharded else size for size, sharded in parts)


def activation_bytes(
    shape: Shape,
    seq: int,
    batch: int,
    tp: int = 1,
    sp: bool = False,
    recompute: Recompute = "none",
    flash: bool = False,
) -> float:
    """Activation bytes that one dense layer saves per micro-batch, in 16-bit dtypes.

    For a layer without a gated MLP and with multi-head attention the formula is that of Korthikanti et al. 2022, table 2:
    s b h (10 + 24 / t + 5 a s / h t), where sequence parallelism also divides the 10 by t. The tensors of gated MLPs and of
    grouped-query attention are counted in the same way, without dropout.

    Args:
        seq: tokens per sequence on this rank (sequence length / cp).
        batch: sequences per micro-batch.
        tp: tensor-parallel ranks.
        sp: True if sequence parallelism shards the activations between the matrices.
        recompute: activations that are recomputed in backward instead of saved:
            "light": outputs of norms and activation functions;
            "attention": the same, and everything inside attention;
            "mlp": everything inside the MLP;
            "selective": attention scores and probabilities;
            "full": everything but the input of the layer.
        flash: True if attention is fused: saves one float32 element per head and token instead of scores and probabilities.
    """
    tokens, h = seq * batch, shape.hidden
    outside = tp if sp else 1
    if recompute == "full":
        return 2 * tokens * h / outside
    light = recompute in ("light", "attention")
    # Norm inputs 4 h; matrix inputs 4 h (sp gathers them again in backward); layers without gating also have dropout masks 2 h.
    near = (8 if shape.gated else 10) * h - 4 * h * light
    # Gate, up and the output of the activation function; without gating, input and output of GELU.
    wide = 0 if recompute == "mlp" else (6 if shape.gated else 4) - 2 * light
    # Bytes per element: 2 each for q, out, k and v.
    attended = 0 if recompute == "attention" else 2 * shape.q_width + 2 * shape.v_width + 4 * shape.kv_width
    inside = attended + wide * shape.ffn
    scores = 5 * shape.heads * seq * tokens  # scores 2 bytes, dropout mask 1, dropout output 2
    if flash:
        scores = 4 * shape.heads * tokens
    if recompute == "attention" or (recompute == "selective" and not flash):
        scores = 0
    return tokens * near / outside + (tokens * inside + scores) / tp
