"""Classes of a user: buffers that `__init__` computes, one that `_init_weights` knows, and ties of their own."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OwnConfig(PretrainedConfig):
    model_type = "own_classes"

    def __init__(self, vocab_size: int = 96, hidden_size: int = 16, num_hidden_layers: int = 1, **others: Any):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**others)


class OwnMixer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(size, size) for _ in range(3))
        self.register_buffer("decay", torch.linspace(0.5, 1.5, size), persistent=False)
        self.register_buffer("is_even", torch.arange(size) % 2 == 0, persistent=False)
        self.register_buffer("steps", torch.arange(size), persistent=False)
        self.register_buffer("known", torch.zeros(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.decay * self.is_even * self.q_proj(x) + self.known * self.steps)


class OwnBlock(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.self_attn, self.mlp = OwnMixer(size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.self_attn(x))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = ""

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnBlock(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, OwnMixer):
            with torch.no_grad():
                module.known.fill_(7.0)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.scale * self.lm_head(self.norm(x)))


AutoConfig.register("own_classes", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnModel)
