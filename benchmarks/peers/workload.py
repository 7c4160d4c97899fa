"""What every system trains on: the same model, rows and update rule. The systems differ in how they split it."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from weft.job import Optimizer

RANKS = 2
GLOBAL_BATCH = 4  # rows of one step, over all ranks
SEQ_LEN = 256
CONFIG: dict[str, Any] = {  # 10.6 million parameters
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
}
SETTINGS = Optimizer(lr=1e-3, clip_norm=1.0)
NUM_BATCHES = 2  # taken in turn, so that the model can learn them: what does other work soon has another loss


def untouched_model() -> PreTrainedModel:
    """The model as Transformers builds it, in float32, with the same weights in every process."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))


def rows_of(step: int, rank: int) -> Tensor:
    """This rank's share of the random tokens of a step, int64 [GLOBAL_BATCH / RANKS, SEQ_LEN]."""
    generator = torch.Generator().manual_seed(step % NUM_BATCHES)
    tokens = torch.randint(CONFIG["vocab_size"], (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    return tokens.chunk(RANKS)[rank].contiguous()
