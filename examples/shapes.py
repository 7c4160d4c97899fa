"""Drawn shapes with questions about them, and a processor for a small LLaVA: python examples/shapes.py data/shapes

Writes data/shapes/processor, and data/shapes/records.parquet with `image`, `prompt` and `answer`.
"""

import random
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, Value
from PIL import Image as Pixels
from PIL import ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
PROMPTS = ("what shape ?", "what colour ?", "describe it .")
SIZE = 32


def draw(shape: str, colour: str, chance: random.Random) -> Pixels.Image:
    """Draw a shape of random size at a random place on a dark ground."""
    picture = Pixels.new("RGB", (SIZE, SIZE), (20, 20, 20))
    side = chance.randint(12, 22)
    x, y = chance.randint(1, SIZE - side - 1), chance.randint(1, SIZE - side - 1)
    pen, box = ImageDraw.Draw(picture), (x, y, x + side, y + side)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=COLOURS[colour])
    return picture


def records(count: int) -> list[dict[str, Any]]:
    """Records with an image, a prompt and its answer."""
    chance, made = random.Random(0), []
    for _ in range(count):
        shape, colour, prompt = chance.choice(SHAPES), chance.choice([*COLOURS]), chance.choice(PROMPTS)
        answer = {PROMPTS[0]: shape, PROMPTS[1]: colour, PROMPTS[2]: f"a {colour} {shape}"}[prompt]
        made.append({"image": draw(shape, colour, chance), "prompt": prompt, "answer": answer})
    return made


def processor() -> LlavaProcessor:
    """Processor of LLaVA: images of 32 x 32 pixels in patches of 8, and a tokenizer of the words above."""
    words = sorted({"a", *COLOURS, *SHAPES, *(word for prompt in PROMPTS for word in prompt.split())})
    special = ["<pad>", "</s>", "<unk>", "<image>"]
    model = models.WordLevel({word: number for number, word in enumerate([*special, *words])}, unk_token="<unk>")
    plain = Tokenizer(model)
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    patches = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(images, tokenizer, **patches)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    processor().save_pretrained(folder / "processor")
    features = Features({"image": Image(), "prompt": Value("string"), "answer": Value("string")})
    Dataset.from_list(records(3000), features=features).to_parquet(folder / "records.parquet")
