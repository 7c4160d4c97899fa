"""Small tokenizer with a chat template, and chats in every shape."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from weft.data import tokenizer as tok

HEAD = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
CALLS = "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = TOOLS + HEAD + "{{ message['content'] }}" + CALLS + "{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
"""ChatML without a mark of what the assistant says."""
MARKED = (
    TOOLS
    + HEAD
    + "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + PROMPT
)
"""ChatML that marks what the assistant says, and the end of its turn."""


def save_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """Byte-level tokenizer with the special tokens of ChatML."""
    folder.mkdir()
    tok.train_tokenizer([json.dumps(chat) for chat in chats(8)], vocab_size=400, folder=folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def chats(count: int) -> list[dict[str, Any]]:
    """Records with messages of one to three turns and different lengths."""
    records = []
    for number in range(count):
        messages = [message("system", "Be brief.")] * (number % 2)
        for turn in range(1 + number % 3):
            messages.append(message("user", f"Question {turn} of chat {number}: " + "why? " * (number % 5 + 1)))
            messages.append(message("assistant", f"Answer {number * 7 + turn}: " + "because. " * (number % 4 + 1)))
        records.append({"messages": messages})
    return records


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of stored tokens, with {braces} around those that have a loss."""
    text, inside = "", False
    for token in [int(token) for token in tokens]:
        text += "{" * (token >= 0 and not inside) + "}" * (token < 0 and inside)
        inside = token >= 0
        text += tokenizer.decode([token if inside else ~token])
    return text + "}" * inside
