"""Causal language model of one's own: Transformers' base classes, and module names that no other family uses."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


class OddConfig(PreTrainedConfig):
    """Sizes of the model."""

    model_type = "odd"
    vocab_size: int = 300
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False


class Scale(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


class Mixer(nn.Module):
    """Causal attention. It reads the number of heads from the width of its projections, which tp divides."""

    is_causal = True

    def __init__(self, config: OddConfig, layer_idx: int):
        super().__init__()
        size = config.hidden_size
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = size // config.num_attention_heads
        self.scaling, self.num_key_value_groups = self.head_dim**-0.5, 1
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.merge = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, position_ids=position_ids)
        return self.merge(out.flatten(2))


class Net(nn.Module):
    """Feed-forward part."""

    def __init__(self, size: int):
        super().__init__()
        self.widen, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(gelu(self.widen(x)))


class Layer(nn.Module):
    """Block of the model."""

    def __init__(self, config: OddConfig, layer_idx: int):
        super().__init__()
        self.scale_in, self.mixer = Scale(config.hidden_size), Mixer(config, layer_idx)
        self.scale_mid, self.net = Scale(config.hidden_size), Net(config.hidden_size)

    def forward(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
        x = x + self.mixer(self.scale_in(x), attention_mask, position_ids)
        return x + self.net(self.scale_mid(x))


class OddForCausalLM(PreTrainedModel, GenerationMixin):
    """The model."""

    config_class = OddConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: OddConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.tower = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.scale_out = Scale(config.hidden_size)
        self.vote = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.vote

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        **_: object,
    ) -> CausalLMOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.tokens(input_ids) + self.places(position_ids)
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None, position_ids=position_ids)
        for layer in self.tower:
            x = layer(x, mask, position_ids)
        logits = self.vote(self.scale_out(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register("odd", OddConfig)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
