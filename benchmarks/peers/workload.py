"""Workload of every system: the same model, rows and update rule."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from weft.job import Optimizer

SETTINGS = Optimizer(lr=1e-3, clip_norm=1.0)
NUM_BATCHES = (
    2  # repeated in turn, so that the model learns them, and a system with other updates soon has another loss
)


@dataclass(frozen=True)
class Workload:
    """Model, and rows of a step."""

    config: dict[str, Any]
    """Transformers configuration, with its model_type."""
    global_batch: int
    """Rows per step, over all ranks."""
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len

    def untouched_model(self) -> PreTrainedModel:
        """Model as built by Transformers, in float32, with the same weights in every process."""
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))

    def rows_of(self, step: int) -> Tensor:
        """Random tokens of a step, int64 [global_batch, seq_len], for all ranks."""
        generator = torch.Generator().manual_seed(step % NUM_BATCHES)
        return torch.randint(self.config["vocab_size"], (self.global_batch, self.seq_len), generator=generator)


SIZE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZE}  # 10.6 million parameters
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
# 23.6 million parameters, 10.7 million active per token
QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe", **SIZE, "head_dim": 32, **EXPERTS}
