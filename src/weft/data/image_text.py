"""Rows of images and text by a processor of Transformers: prompts, answers, and the tokens that have a loss."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.data.batches import IGNORED
from weft.data.images import in_mode
from weft.errors import DataError


def prompt_of(processor: Any, prompt: str) -> str:
    """Prompt with an image, by the chat template of a processor; without one, after its image token."""
    if marks_answers(processor):
        return f"{processor.image_token}{prompt}"
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    return f"{processor.image_token}{prompt} "


def text_of(processor: Any, record: dict[str, Any]) -> str:
    """Prompt, answer and end of a row, with one placeholder of the image."""
    text, tokenizer = prompt_of(processor, record["prompt"]) + record["answer"], processor.tokenizer
    ends = not _special_tokens(processor, [text]) and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return text if ends else text + (tokenizer.eos_token or "")


def encode(processor: Any, texts: list[str], images: list[Any], **options: Any) -> dict[str, Any]:
    """Arguments of a model for texts with one image each, and labels where the processor makes them.

    Args:
        processor: processor of images and text.
        texts: results of `prompt_of` or `text_of`.
        images: images of Pillow.
        options: further arguments of the processor.
    """
    pixels = [[in_mode(image, 3)] for image in images]
    options |= {"return_tensors": "pt", **_special_tokens(processor, texts)}
    return dict(processor(text=texts, images=pixels, **options))


def _special_tokens(processor: Any, texts: list[str]) -> dict[str, bool]:
    """Options by which a row has one token that begins a text (BOS): that of the template, else that of the tokenizer."""
    begin = processor.tokenizer.bos_token
    return {"add_special_tokens": False} if begin and all(text.startswith(begin) for text in texts) else {}


def marks_answers(processor: Any) -> bool:
    """True if a processor gets the answer as its `suffix`, as that of PaliGemma: every token of the prompt sees all of it, and
    only the tokens that the processor marks as answer see none that follow."""
    return "suffix" in inspect.signature(type(processor).__call__).parameters


def rows_of(processor: Any, records: Sequence[dict[str, Any]], multiple: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a model, and targets int64 [rows, tokens]: the id that the logits at the same place predict.

    Args:
        processor: processor of images and text.
        records: records with image, prompt and answer.
        multiple: number that divides the length of the rows.
    """
    prompts = [prompt_of(processor, record["prompt"]) for record in records]
    images, tokenizer = [record["image"] for record in records], processor.tokenizer
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    padding = {"padding": True, "pad_to_multiple_of": multiple}
    if marks_answers(processor):
        inputs = encode(processor, prompts, images, suffix=[record["answer"] for record in records], **padding)
        labels = inputs.pop("labels")
    else:
        texts = [text_of(processor, record) for record in records]
        inputs = encode(processor, texts, images, **padding)
        inputs.pop("labels", None)
        options = {"return_offsets_mapping": True, **_special_tokens(processor, texts)}
        places = tokenizer(texts, **options)["offset_mapping"]
        ends = inputs["attention_mask"].sum(1).tolist()
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for line, (prompt, found, end) in enumerate(zip(prompts, places, ends, strict=True)):
            # Tokens of an image are in the prompt: the answer is the last tokens, from the first that ends beyond the prompt.
            begin = next((index for index, (_, last) in enumerate(found) if last > len(prompt)), len(found))
            answer = slice(end - (len(found) - begin), end)
            labels[line, answer] = inputs["input_ids"][line, answer]
    return inputs, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def check_texts(processor: Any, records: Any, place: Callable[[int], str]) -> None:
    """Refuse texts with a token that stands for an image: the processor would look for another image.

    Args:
        processor: processor of images and text.
        records: stored records.
        place: location of a record by its index.

    Raises:
        DataError: names the first record.
    """
    import pyarrow.compute as arrow

    names = [name for name in vars(processor) if name.endswith(("_token", "_tag"))]
    for token in sorted({str(value) for name in names if (value := getattr(processor, name))}):
        for field in ("prompt", "answer"):
            found = arrow.index(arrow.match_substring(records.data.column(field), token), True).as_py()
            if found >= 0:
                raise DataError(
                    f"the {field} of a record contains {token}",
                    where=place(found),
                    rule=f"{token} has a meaning for {type(processor).__name__}; an image is put before each prompt",
                    fix="remove it from the record, or write it in another way",
                )
