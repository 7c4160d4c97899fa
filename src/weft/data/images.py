"""Images of records: their sizes, and the pixels that a model reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.anatomy.classes import vision_config
from weft.errors import JobError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Modes of Pillow by the number of channels of a model."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a folder from which Transformers loads a processor of images or audio."""


def has_processor(folder: Path | None) -> bool:
    """True if a folder has a processor of images or audio."""
    return folder is not None and any((folder / name).is_file() for name in PROCESSOR_FILES)


def image_size(value: dict[str, Any]) -> tuple[int, int]:
    """Height and width of an image, as a rank will read it: all of it is decoded.

    Args:
        value: contents or path of a file.

    Raises:
        Exception: Pillow cannot read the image, in any of its many types; or the range of its values is unknown (ValueError).
    """
    from datasets import Image

    image = _in_8_bits(Image().decode_example(value))
    return image.height, image.width


def _in_8_bits(image: Any) -> Any:
    """Image whose values of 16 bits are scaled to 8: Pillow would clip them, and show white."""
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, of which white is unknown")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() >= 2**16:
        raise ValueError(f"its values are integers from {values.min()} to {values.max()}, beyond 16 bits")
    from PIL import Image

    return Image.fromarray(np.round(values / 257).astype(np.uint8))


def in_mode(image: Any, channels: int) -> Any:
    """Image of Pillow with 8 bits, and the channels that a model reads.

    Raises:
        ValueError: no image has this number of channels.
    """
    if channels not in MODES:
        raise ValueError(f"the model reads {channels} channels; images have 1, 3 or 4")
    return _in_8_bits(image).convert(MODES[channels])


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images of a model, by its configuration.

    Raises:
        JobError: the configuration has no image_size.
    """
    part = vision_config(config)
    size = getattr(part, "image_size", None)
    if size is None:
        raise JobError(
            f"no image_size in the configuration of {config.model_type}",
            where="model.path, data.tokenizer",
            rule="images get the size that a preprocessor_config.json or the configuration of the model says",
            fix="set data.tokenizer to a folder with the preprocessor_config.json of the model",
        )
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(part, "num_channels", 3), height, width


def pixels_of(folder: Path | None, config: Any) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Function that makes arguments of a model, such as pixel_values, of records with `image`.

    It is the processor of the folder; without one, images are resized to the size of the model.

    Args:
        folder: folder with the preprocessor_config.json; None: no processor.

    Raises:
        JobError: there is no processor, and the configuration has no size.
    """
    if not has_processor(folder):
        channels, height, width = image_shape(config)
        return lambda records: {
            "pixel_values": torch.stack([scaled(record["image"], (height, width), channels) for record in records])
        }
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    channels = getattr(vision_config(config), "num_channels", 3)

    def pixels(records: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(processor([in_mode(record["image"], channels) for record in records], return_tensors="pt"))

    return pixels


def scaled(image: Any, size: int | Sequence[int], channels: int) -> Tensor:
    """Pixels of an image in [-1, 1], float32 [channels, height, width], resized to the size of the model."""
    height, width = (size, size) if isinstance(size, int) else size
    resized = in_mode(image, channels).resize((width, height))
    pixels = torch.from_numpy(np.array(resized)).reshape(height, width, channels)
    return pixels.permute(2, 0, 1).float() / 127.5 - 1
