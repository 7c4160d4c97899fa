"""Small speech models of Transformers, with audio that their loss depends on: speech to text, CTC and classification."""

import functools
import inspect
import operator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from tests.lab.shrink import VOCABULARY, shrunk

ROWS, TOKENS, TARGETS = 4, 16, 4
MEL, AUDIO_TOKEN = 16, 90
# Shape of the audio of a row; the other families have SAMPLES, of which their convolutions make 16 frames.
SAMPLES = (5200,)
SHAPES: dict[str, tuple[int, ...]] = {
    "audio-spectrogram-transformer": (46, MEL),
    "canary": (128, MEL),
    "cohere_asr": (128, MEL),
    "fun_asr_nano": (24, 7 * MEL),
    "granite_speech": (40, MEL),
    "granite_speech5_ctc": (64, 4 * MEL),
    "granite_speech_plus": (40, MEL),
    "lasr_ctc": (76, MEL),
    "moonshine_streaming": (5120,),
    "parakeet_ctc": (128, MEL),
    "pop2piano": (16, 32),
    "qwen3_asr": (MEL, 200),
    "seamless_m4t": (120, MEL),
    "seamless_m4t_v2": (120, MEL),
    "speech_to_text": (64, MEL),
    "vibevoice": (1, 64),
    "vibevoice_asr": (1, 64),
    "voxtral": (MEL, 32),
    "voxtral_realtime": (MEL, 128),
    "wav2vec2-bert": (16, MEL),
    "whisper": (MEL, 32),
}
MASKED = ("granite_speech5_ctc", "lasr_ctc", "parakeet_ctc")
"""Models for CTC that need a mask."""
# Sizes and settings of every configuration that has them, also within another.
SETTINGS: dict[str, Any] = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_mel_bins": MEL,
    "input_feat_per_channel": MEL,
    "feature_projection_input_dim": MEL,
    "subsampling_conv_channels": 16,
    "conv_channels": 16,
    "downsample_hidden_size": 8,
    "classifier_proj_size": 16,
    "num_filters": 8,
    "audio_token_id": AUDIO_TOKEN,
    "use_cache": False,
    "convolution_bias": False,  # its gradient before a norm over the batch is zero but for rounding
    "decoder_start_token_id": 1,
}
GRANITE_SPEECH: dict[str, Any] = {
    "encoder_config.hidden_dim": 32,
    "encoder_config.input_dim": MEL,
    "encoder_config.context_size": 8,
    "projector_config.encoder_hidden_size": 32,
    "window_size": 10,
}
SEAMLESS: dict[str, Any] = {
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
}
CROSS = (("hidden_size", 32), ("num_attention_heads", 4), ("num_key_value_heads", 2), ("head_dim", 8))
CODEC: tuple[tuple[str, Any], ...] = (("downsampling_ratios", [2, 2]), ("depths", [1, 1, 1]))
# Settings of a family; dots lead into the configurations within.
OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 46},
    "dia": {f"decoder_config.cross_{key}": value for key, value in CROSS},
    "fun_asr_nano": {
        "adaptor_config.intermediate_size": 8,
        "audio_config.num_hidden_layers": 3,
        "audio_config.num_timestamp_prediction_layers": 1,
    },
    "granite_speech": GRANITE_SPEECH,
    "granite_speech5_ctc": {"encoder_config.context_size": 8, "encoder_config.num_key_value_heads": 4},
    "granite_speech_plus": GRANITE_SPEECH,
    "kyutai_speech_to_text": {
        "num_codebooks": 2,
        "codebook_vocab_size": 32,
        "audio_pad_token_id": VOCABULARY + 64,
        "codec_config.upsample_groups": 32,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pop2piano": {"decoder_start_token_id": 0},
    "qwen3_asr": {"audio_config.output_dim": 32},
    "seamless_m4t": SEAMLESS,
    "seamless_m4t_v2": SEAMLESS,
    "speech-encoder-decoder": {
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "decoder.is_decoder": True,
        "decoder.add_cross_attention": True,
    },
    "vibevoice": {f"{part}.{key}": value for part in ("audio_config", "semantic_model_config") for key, value in CODEC},
    "vibevoice_asr": {
        f"{part}_tokenizer_encoder_config.{key}": value for part in ("acoustic", "semantic") for key, value in CODEC
    },
    "voxtral": {"audio_config.max_source_positions": 16, "audio_config.intermediate_size": 64},
    "whisper": {"max_source_positions": 16},
}
SPEECH: dict[str, str] = dict(auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
AUDIO: dict[str, str] = {**auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, **auto.MODEL_FOR_CTC_MAPPING_NAMES}
"""Class names by family: the class for CTC where the family has one, else the classifier."""


def build_speech_model(task: str, family: str) -> tuple[nn.Module, dict[str, Any]]:
    """Model of `SPEECH` ("speech") or of `AUDIO` ("audio"), and a batch of `ROWS` rows with labels."""
    torch.manual_seed(0)
    table = shrunk(family)
    for key, value in OVERRIDES.get(family, {}).items():
        *path, name = key.split(".")
        functools.reduce(operator.getitem, path, table)[name] = value
    config = transformers.AutoConfig.for_model(**table)
    _set_sizes(config)
    model: Any = getattr(transformers, (SPEECH if task == "speech" else AUDIO)[family])(config)
    audio = _random(ROWS, *SHAPES.get(family, SAMPLES))
    parameters = inspect.signature(model.forward).parameters
    batch: dict[str, Any] = {"input_features" if "input_features" in parameters else "input_values": audio}
    if task == "audio":
        labels = _ids(TARGETS) if family in auto.MODEL_FOR_CTC_MAPPING_NAMES else torch.arange(ROWS) % 2
        mask = {"attention_mask": _ones(audio.shape[1])} if family in MASKED else {}
        return model, {**batch, **mask, "labels": labels}
    if hasattr(getattr(model, "model", None), "get_audio_features"):
        return model, _with_audio_tokens(model, batch)
    if family == "kyutai_speech_to_text":  # ids of the text, and of each codebook
        return model, {"input_ids": torch.stack([_ids(TOKENS)] * 3, dim=2), "labels": _ids(TOKENS)}
    if family == "dia":  # text to ids of codebooks
        codes = torch.stack([_ids(TOKENS)] * model.num_channels, dim=2)
        labels = codes.transpose(1, 2).flatten(0, 1)
        return model, {"input_ids": _ids(TOKENS), "decoder_input_ids": codes, "labels": labels}
    return model, {**batch, "labels": _ids(TOKENS)}


def _with_audio_tokens(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Batch of a language model, with as many audio tokens in each row as its audio tower has features."""
    (audio,) = batch.values()
    parameters = inspect.signature(model.forward).parameters
    masks = inspect.signature(model.model.get_audio_features).parameters.keys() & {
        "input_features_mask",
        "padding_mask",
    }
    frames = audio.shape[1 if audio.shape[2] == 7 * MEL else 2]  # Fun-ASR stacks the mel bins of seven frames
    batch |= {name: _ones(frames) for name in masks}
    batch |= {"sample": False} if "sample" in parameters else {}  # no noise
    with torch.no_grad():
        features = model.model.get_audio_features(**batch).pooler_output
    count = features.numel() // features.shape[-1] // ROWS
    if "num_delay_tokens" in parameters:  # the features are added to those of tokens
        return {**batch, "num_delay_tokens": 1, "input_ids": _ids(count), "labels": _ids(count)}
    ids = _ids(TOKENS + count + count % 2)
    ids[:, 1 : 1 + count] = AUDIO_TOKEN
    return {**batch, "input_ids": ids, "labels": ids.masked_fill(ids == AUDIO_TOKEN, -100)}


def _set_sizes(config: PreTrainedConfig) -> None:
    for key, value in SETTINGS.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if hasattr(config, "conv_dim"):
        config.conv_dim = [16] * len(config.conv_dim)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            _set_sizes(value)


def _ones(length: int) -> Tensor:
    return torch.ones(ROWS, length, dtype=torch.long)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _ids(tokens: int) -> Tensor:
    return torch.randint(5, 30, (ROWS, tokens), generator=torch.Generator().manual_seed(3))
