"""Costs of rows with images of different sizes, by which the rows of a global batch are divided over ranks."""

from collections.abc import Callable
from typing import Any


def image_and_text_cost(
    processor: Any, config: Any, records: Any, text_of: Callable[[dict[str, Any]], str]
) -> Callable[[int], float]:
    """Function that gives the cost of a record by its index, without reading its image.

    The cost is the number of tokens of text and image, plus the number of patches, weighted by the sizes of the two models: a
    patch passes through the vision model, a token through the language model.

    Args:
        records: stored records.
        text_of: text of a record, with one placeholder of the image.
    """
    texts = records.select_columns(["prompt", "answer", "height", "width"])
    of_patch = _elements(getattr(config, "vision_config", None)) / (_elements(config.get_text_config()) or 1)
    merge = getattr(processor.image_processor, "merge_size", 1) ** 2

    def cost(index: int) -> float:
        record = texts[index]
        words = len(processor.tokenizer(text_of(record))["input_ids"]) - 1
        image = _image_tokens(processor, record["height"], record["width"], merge)
        return words + image * (1 + merge * of_patch)

    return cost


def _image_tokens(processor: Any, height: int, width: int, merge: int) -> int:
    """Number of tokens of an image; 0 if the processor does not tell it."""
    if hasattr(processor, "_get_num_multimodal_tokens"):
        return int(processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])
    if hasattr(processor.image_processor, "merge_size"):
        return int(processor.image_processor.get_number_of_image_patches(height, width, {})) // merge
    return 0


def _elements(part: Any) -> float:
    """Elements of the weights of all blocks of a model, up to a factor."""
    layers = getattr(part, "num_hidden_layers", None) or getattr(part, "depth", None) or 0
    width = getattr(part, "embed_dim", None) or getattr(part, "hidden_size", None) or 0
    return float(layers * width**2)
