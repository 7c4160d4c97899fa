"""Generated tones with their names, as WAV files, and a small Whisper that writes them down."""

import io
import math
import random
import struct
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from tests.lab.kinds import SIZES

RATE = 16000
TONES = {"low": 300, "middle": 900, "high": 2700}
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 32,
    "vocab_size": 16,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))},
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "begin_suppress_tokens": [],
    "num_labels": 3,
    "classifier_proj_size": 16,
}

WAV2VEC2: dict[str, Any] = {
    "model_type": "wav2vec2",
    **SIZES,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "final_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("feat_proj_dropout", "layerdrop"), 0.0),
    "conv_dim": [16, 16],
    "conv_kernel": [64, 16],
    "conv_stride": [32, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
    "num_labels": 3,
}


def write_tones(names: list[str], rate: int = RATE, channels: int = 1) -> bytes:
    """WAV file of tones of a quarter of a second, 16 bits."""
    file, count = io.BytesIO(), rate // 4
    samples = [
        round(12000 * math.sin(2 * math.pi * TONES[name] * index / rate)) for name in names for index in range(count)
    ]
    with wave.open(file, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(b"".join(struct.pack("<h", sample) * channels for sample in samples))
    return file.getvalue()


def records(data: Any, count: int = 40) -> Iterator[dict[str, Any]]:
    """One to three tones, and their names."""
    chance = random.Random(0)
    for _ in range(count):
        names = [chance.choice([*TONES]) for _ in range(chance.randint(1, 3))]
        yield {"audio": {"bytes": write_tones(names), "path": None}, "target": " ".join(names)}


def many_records(data: Any) -> Iterator[dict[str, Any]]:
    """Records for a model to learn from."""
    return records(data, 400)


def single_tones(data: Any) -> Iterator[dict[str, Any]]:
    """Single tones, and their names as classes."""
    for index in range(40):
        name = [*TONES][index % 3]
        yield {"audio": {"bytes": write_tones([name]), "path": None}, "label": name}


def save_processor(folder: Path) -> None:
    """Write a tokenizer and a feature extractor that pads to one second."""
    plain = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate([*SPECIAL, *TONES])}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(  # begins and ends, as the tokenizer of Whisper
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **names).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
