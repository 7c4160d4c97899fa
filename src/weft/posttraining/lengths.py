"""Rows that a trainer of TRL leaves out because of `max_length`, and steps without enough prompts, found before ranks start."""

import json
from typing import Any

from weft.errors import DataError
from weft.posttraining.kinds import Kind

ANSWERS: dict[Kind, tuple[str, ...]] = {"dpo": ("chosen", "rejected"), "kto": ("completion",)}
"""Columns of answers of the trainers that leave out rows whose prompt has no room for an answer."""


def count_rows(rows: Any, kind: Kind, tokenizer: Any, options: dict[str, Any], where: str) -> str:
    """Text with the number of rows that a trainer uses.

    Args:
        rows: `datasets.Dataset` that `check_rows` has passed.
        kind: kind of the trainer.
        options: options of the trainer, with defaults.
        where: path of the rows, for the message.

    Raises:
        DataError: no row is left.
    """
    limit = options.get("max_length")
    drops = kind in ("kto", "reward") or (kind == "dpo" and options.get("truncation_mode") == "keep_start")
    if limit is None or not drops:
        return f"{len(rows)} rows"
    lengths = [_length(row, kind, tokenizer) for row in rows]
    kept = sum(length <= limit if kind == "reward" else length < limit for length in lengths)
    if not kept:
        raise DataError(
            f"trainer.options.max_length = {limit} leaves out all {len(rows)} rows",
            where=where,
            rule="a reward model learns from texts of at most max_length tokens"
            if kind == "reward"
            else "a prompt has fewer than max_length tokens, so that there is room for an answer",
            fix=f"set trainer.options.max_length above {min(lengths)}, the length of the shortest, or add shorter rows",
        )
    left_out = len(rows) - kept
    return f"{kept} rows" + (f" ({left_out} left out by max_length = {limit})" if left_out else "")


def check_prompts(count: int, options: dict[str, Any], data_ranks: int, where: str) -> None:
    """Refuse fewer prompts than one generation of GRPO or RLOO takes: TRL would train no step.

    Args:
        count: number of prompts.
        options: options of the trainer, with defaults.
        data_ranks: number of data ranks.
        where: path of the prompts, for the message.

    Raises:
        DataError: there are fewer.
    """
    steps = options.get("steps_per_generation") or options["gradient_accumulation_steps"]
    rows = options.get("generation_batch_size") or options["per_device_train_batch_size"] * data_ranks * steps
    if count < (needed := rows // options["num_generations"]):
        raise DataError(
            f"{count} prompts, and a generation takes {needed}",
            where=where,
            rule="a generation has per_device_train_batch_size * steps_per_generation rows on each data rank, and "
            "num_generations of them for each prompt",
            fix="set a smaller per_device_train_batch_size or a larger num_generations, or add prompts",
        )


def _length(row: dict[str, Any], kind: Kind, tokenizer: Any) -> int:
    """Number of tokens that TRL compares with `max_length`: of a prompt, or of the longer text of a reward model."""
    from trl.data_utils import common_prefix_length, extract_prompt  # here, because it takes seconds

    tools, given = row.get("tools"), row.get("chat_template_kwargs") or {}
    arguments = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **given}
    if kind == "reward":
        texts = [row["prompt"] + row[name] if "prompt" in row else row[name] for name in ("chosen", "rejected")]
        return max(len(_tokens(tokenizer, _with_end(text, tokenizer), arguments)) for text in texts)
    row = row if "prompt" in row else dict(extract_prompt(row))
    prompt = _tokens(tokenizer, row["prompt"], {"add_generation_prompt": True, **arguments})
    fulls = [_tokens(tokenizer, _with_end(row["prompt"] + row[name], tokenizer), arguments) for name in ANSWERS[kind]]
    return min(common_prefix_length(prompt, full) for full in fulls)


def _with_end(text: Any, tokenizer: Any) -> Any:
    """Text that ends with the end-of-text token, as TRL adds it; messages unchanged."""
    return text if isinstance(text, list) or text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _tokens(tokenizer: Any, value: Any, arguments: dict[str, Any]) -> list[int]:
    if isinstance(value, str):
        return list(tokenizer(text=value)["input_ids"])
    return list(tokenizer.apply_chat_template(value, tokenize=True, return_dict=True, **arguments)["input_ids"])
