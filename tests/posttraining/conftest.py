"""A small model folder with a tokenizer, and rows for each trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.lab.families import family

WORDS = ["weft", "warp", "loom", "shuttle", "thread", "yarn", "cloth", "weave", "reed", "heddle"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def line(index: int) -> str:
    return " ".join(WORDS[(index * 3 + offset) % 10] for offset in range(3 + index % 5))


PAIRS = [{"prompt": f"Say {i} :", "chosen": f" {line(i)}", "rejected": f" {line(i + 1)}"} for i in range(32)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS,
    "reward": PAIRS,
    "kto": [{"prompt": f"Say {i} :", "completion": f" {line(i // 2 + i % 2)}", "label": i % 2 == 0} for i in range(32)],
    "grpo": [{"prompt": f"Say {i} :"} for i in range(32)],
    "rloo": [{"prompt": f"Say {i} :"} for i in range(32)],
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of two layers, with a tokenizer of words and a chat template."""
    return make_small_model(tmp_path_factory.mktemp("model"))


def make_small_model(folder: Path) -> Path:
    """Write the small model into a folder."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "Say", ":", "user", "assistant"]
    names = {word: index for index, word in enumerate(special + WORDS + [str(number) for number in range(32)])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), **sizes, **heads, **tokens)).save_pretrained(folder)
    return folder


def experts_model(folder: Path, small_model: Path) -> Path:
    """Mixture of experts with the tokenizer of the small model."""
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.save_pretrained(folder)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**family("qwen3_moe"), "vocab_size": len(tokenizer), **tokens})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[list[Any]], Path]:
    """Function that writes rows as JSON lines and returns the path."""

    def write(rows: list[Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
