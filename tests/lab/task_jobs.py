"""Small jobs of every task, with records of functions in this file."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.shapes import processor
from PIL import Image

from tests.lab import tones
from tests.lab.kinds import DECODER, NO_DROPOUT, PICTURE, SIZES
from weft.job import Job

WORDS = ("red", "blue", "green", "one", "two", "three")
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "masked": {"model_type": "bert", **SIZES, **NO_DROPOUT, "vocab_size": 300, "max_position_embeddings": 32},
    "seq2seq": {"model_type": "t5", **T5, "vocab_size": 280, "decoder_start_token_id": 0},
    "text classification": {
        "model_type": "bert",
        **SIZES,
        **NO_DROPOUT,
        "vocab_size": 280,
        "max_position_embeddings": 32,
        "num_labels": 3,
        "pad_token_id": 0,
    },
    "decoder classification": {
        "model_type": "llama",
        **DECODER,
        "vocab_size": 280,
        "num_labels": 3,
        "pad_token_id": 7,
    },
    "image classification": {"model_type": "vit", **PICTURE, **NO_DROPOUT, "num_labels": 3, "num_channels": 1},
    "vlm": {
        "model_type": "llava",
        "vision_config": {"model_type": "clip_vision_model", **SIZES, "image_size": 32, "patch_size": 8},
        "text_config": {"model_type": "llama", **DECODER, "vocab_size": 64},
        "image_token_index": 3,
        "image_seq_length": 16,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    "audio seq2seq": tones.WHISPER,
    "audio classification": tones.WHISPER,
    "diffusion": {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_embeds_ada_norm": 3,
        "in_channels": 1,
        "out_channels": 1,
        "sample_size": 8,
        "patch_size": 2,
    },
}
RECORDS = {
    "seq2seq": "tests.lab.task_jobs:reversed_words",
    "text classification": "tests.lab.task_jobs:counted_words",
    "decoder classification": "tests.lab.task_jobs:counted_words",
    "image classification": "tests.lab.task_jobs:stripes",
    "vlm": "tests.lab.task_jobs:questions",
    "diffusion": "tests.lab.task_jobs:stripes",
    "audio seq2seq": "tests.lab.tones:records",
    "audio classification": "tests.lab.tones:single_tones",
}
ROWS = 40


def _sentences() -> Iterator[list[str]]:
    chance = random.Random(0)
    for _ in range(ROWS):
        yield [chance.choice(WORDS) for _ in range(chance.randint(2, 6))]


def reversed_words(data: Any) -> Iterator[dict[str, str]]:
    """Sentences, and their words in reverse order."""
    for words in _sentences():
        yield {"source": " ".join(words), "target": " ".join(reversed(words))}


def counted_words(data: Any) -> Iterator[dict[str, Any]]:
    """Sentences, and a class from their number of words."""
    for words in _sentences():
        yield {"text": " ".join(words), "label": len(words) % 3}


def stripes(data: Any) -> Iterator[dict[str, Any]]:
    """Grey images with a bright column, and its place as a class."""
    for index in range(ROWS):
        image = Image.new("L", (16, 16), 40)
        image.paste(200, (4 * (index % 3), 0, 4 * (index % 3) + 4, 16))
        yield {"image": image, "label": index % 3}


def questions(data: Any) -> Iterator[dict[str, Any]]:
    """Images of one colour, and its name."""
    for index in range(ROWS):
        colour = ("red", "green", "blue")[index % 3]
        yield {"image": Image.new("RGB", (32, 32), colour), "prompt": "what colour ?", "answer": f"a {colour} square"}


def task_job(name: str, folder: Path, **tables: dict[str, Any]) -> Job:
    """Job of a task, in a folder for its data and its run, with changes of its tables."""
    (folder / "text").mkdir(exist_ok=True)
    for index in range(10):
        (folder / "text" / f"{index}.txt").write_text(" ".join(WORDS[index % 6 :] + WORDS[: index % 6]) * 20)
    data: dict[str, Any] = {"source": RECORDS.get(name, "text"), "held_out": 0.2, "seq_len": 16, "vocab_size": 280}
    if name == "masked":
        data |= {"path": str(folder / "text")}
    if name == "vlm":
        processor().save_pretrained(folder / "processor")
        data |= {"tokenizer": str(folder / "processor")}
    if name.startswith("audio"):
        tones.save_processor(folder / "processor")
        data |= {"tokenizer": str(folder / "processor")}
    found: dict[str, Any] = {
        "task": {"kind": name.rpartition(" ")[2]},
        "model": {"config": MODELS[name]},
        "data": {**data, "cache": str(folder / "cache")},
        "train": {"steps": 3, "global_batch_size": 6, "micro_batch_size": 2},
        "optimizer": {
            "lr": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "clip_norm": 0.0,
            "weight_decay": 0.0,
            "eps": 1e-4,
        },
        "plan": {"precision": {"param_dtype": "fp32"}},
        "out": str(folder / "run"),
    }
    for table, changes in tables.items():
        found[table] = {**found.get(table, {}), **changes}
    return Job.parse(found)
