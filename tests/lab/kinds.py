"""Small models of every kind, with a batch of four rows: encoders, encoder-decoders, images and text, diffusion.

Dropout is off, and all rows have the same number of targets, so that the mean over rows is the mean over ranks.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers as library
from torch import Tensor, nn

from tests.lab.shrink import shrunk

ROWS, TOKENS, VOCABULARY, IMAGE = 4, 16, 96, 90
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
PICTURE: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CHANNELS = {"in_channels": 4, "out_channels": 4}
Built = tuple[nn.Module, dict[str, Any]]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(*images: int) -> Tensor:
    """Token ids [rows, tokens]; positions `images` are those of an image."""
    ids = torch.randint(5, 80, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    ids[:, list(images)] = IMAGE
    return ids


def _labels() -> Tensor:
    return torch.arange(ROWS) % 3


def _encoder(name: str, config: str, **settings: Any) -> Built:
    made = getattr(library, config)(**TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)
    return getattr(library, name)(made), {"input_ids": _ids(), "labels": _ids()}


def bert() -> Built:
    return _encoder("BertForMaskedLM", "BertConfig", **NO_DROPOUT)


def bert_classifier() -> Built:
    model, _ = _encoder("BertForSequenceClassification", "BertConfig", **NO_DROPOUT, num_labels=3)
    return model, {"input_ids": _ids(), "labels": _labels()}


def roberta() -> Built:
    return _encoder("RobertaForMaskedLM", "RobertaConfig", **NO_DROPOUT)


def modernbert() -> Built:
    return _encoder("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2)


def vit() -> Built:
    model = library.ViTForImageClassification(library.ViTConfig(**PICTURE, **NO_DROPOUT, num_labels=3))
    return model, {"pixel_values": _random(ROWS, 3, 16, 16), "labels": _labels()}


def _two_towers(name: str) -> Built:
    text = {**TEXT, "max_position_embeddings": 32, "eos_token_id": 2}
    config = getattr(library, f"{name}Config")(text_config=text, vision_config=PICTURE, projection_dim=16)
    batch = {"input_ids": _ids(), "pixel_values": _random(ROWS, 3, 16, 16), "return_loss": True}
    return getattr(library, f"{name}Model")(config), batch


def clip() -> Built:
    return _two_towers("CLIP")


def siglip() -> Built:
    return _two_towers("Siglip")


def t5() -> Built:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = library.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)
    return library.T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids()}


def _encoder_decoder() -> dict[str, Any]:
    parts = ("encoder", "decoder")
    layers = {f"{part}_layers": 2 for part in parts} | {f"{part}_attention_heads": 4 for part in parts}
    return {**layers, **{f"{part}_ffn_dim": 64 for part in parts}, "d_model": 32, "dropout": 0.0}


def bart() -> Built:
    config = library.BartConfig(vocab_size=VOCABULARY, **_encoder_decoder(), max_position_embeddings=64)
    return library.BartForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids()}


def whisper() -> Built:
    config = library.WhisperConfig(
        vocab_size=VOCABULARY,
        **_encoder_decoder(),
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    batch = {"input_features": _random(ROWS, 8, 32), "labels": _ids()}
    return library.WhisperForConditionalGeneration(config), batch


def llava() -> Built:
    vision = library.CLIPVisionConfig(**{**PICTURE, "patch_size": 8}, projection_dim=32)
    config = library.LlavaConfig(
        vision_config=vision,
        text_config=library.LlamaConfig(**DECODER),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=4,
    )
    batch = {"input_ids": _ids(2, 3, 4, 5), "pixel_values": _random(ROWS, 3, 16, 16), "labels": _ids()}
    return library.LlavaForConditionalGeneration(config), batch


def _patches(name: str) -> Built:
    """SmolVLM and Idefics3: features of the patches of a tile, joined by twos."""
    config = getattr(library, f"{name}Config")(
        vision_config=PICTURE,
        text_config={"model_type": "llama", **DECODER},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    batch = {"input_ids": _ids(2, 3, 4, 5), "pixel_values": _random(ROWS, 1, 3, 16, 16), "labels": _ids()}
    return getattr(library, f"{name}ForConditionalGeneration")(config), batch


def smolvlm() -> Built:
    return _patches("SmolVLM")


def idefics3() -> Built:
    return _patches("Idefics3")


def _qwen_vl(name: str, vision: dict[str, Any]) -> Built:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = getattr(library, f"{name}Config")(
        text_config={**DECODER, "rope_parameters": rope, "head_dim": 8},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            **vision,
        },
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    ids = _ids(3, 4, 5, 6)
    ids[:, 2], ids[:, 7] = 92, 93
    kinds = torch.zeros_like(ids)
    kinds[:, 3:7] = 1
    patch = 3 * 2 * vision["patch_size"] ** 2
    batch = {
        "input_ids": ids,
        "labels": _ids(),
        "pixel_values": _random(ROWS * 16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "mm_token_type_ids": kinds,
    }
    return getattr(library, f"{name}ForConditionalGeneration")(config), batch


def qwen2_5_vl() -> Built:
    return _qwen_vl("Qwen2_5_VL", {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]})


def qwen3_vl() -> Built:
    return _qwen_vl("Qwen3VL", {"patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]})


def gemma3() -> Built:
    config = library.Gemma3Config(
        text_config={**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
        vision_config={"model_type": "siglip_vision_model", **PICTURE, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=91,
        eoi_token_id=92,
    )
    kinds = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    kinds[:, 2:6] = 1
    batch = {"input_ids": _ids(2, 3, 4, 5), "pixel_values": _random(ROWS, 3, 16, 16), "labels": _ids()}
    model = library.Gemma3ForConditionalGeneration(config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)  # the library sets it to 0
    return model, {**batch, "token_type_ids": kinds}


def _diffusion(name: str, **settings: Any) -> nn.Module:
    made = getattr(diffusers, name)(**HEADS, **settings)
    for module in made.modules():
        if hasattr(module, "dropout_prob"):  # of classes
            module.dropout_prob = 0.0
    return made


def _noise() -> dict[str, Any]:
    return {"hidden_states": _random(ROWS, 4, 8, 8), "timestep": torch.tensor([1, 20, 30, 77])}


def dit() -> Built:
    model = _diffusion("DiTTransformer2DModel", in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=9)
    return model, {**_noise(), "class_labels": _labels()}


def pixart() -> Built:
    sizes = {"num_layers": 2, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 32, "caption_channels": 32}
    model = _diffusion("PixArtTransformer2DModel", **CHANNELS, **sizes, use_additional_conditions=False)
    return model, {**_noise(), "encoder_hidden_states": _random(ROWS, 5, 32), "added_cond_kwargs": {}}


def flux() -> Built:
    sizes = {"patch_size": 1, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32}
    model = _diffusion(
        "FluxTransformer2DModel", in_channels=4, **sizes, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)
    )
    batch = {"hidden_states": _random(ROWS, 64, 4), "timestep": torch.tensor([0.1, 0.2, 0.3, 0.7])}
    text = {"encoder_hidden_states": _random(ROWS, 5, 32), "pooled_projections": _random(ROWS, 32)}
    return model, {**batch, **text, "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(5, 3)}


def wan() -> Built:
    sizes = {"patch_size": (1, 2, 2), "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2}
    batch = {**_noise(), "hidden_states": _random(ROWS, 4, 1, 8, 8), "encoder_hidden_states": _random(ROWS, 5, 32)}
    return _diffusion("WanTransformer3DModel", **CHANNELS, **sizes), batch


def classifier() -> Built:
    config = library.LlamaConfig(**DECODER, num_labels=3, pad_token_id=0)
    return library.LlamaForSequenceClassification(config), {"input_ids": _ids(), "labels": _labels()}


def _hybrid(family: str) -> Built:
    """Decoder with recurrent mixers beside attention."""
    config = library.AutoConfig.for_model(**shrunk(family))
    ids = _ids() % config.vocab_size
    model: nn.Module = library.AutoModelForCausalLM.from_config(config)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def qwen3_next() -> Built:
    return _hybrid("qwen3_next")


def falcon_h1() -> Built:
    return _hybrid("falcon_h1")


def nemotron_h() -> Built:
    return _hybrid("nemotron_h")


def jamba() -> Built:
    return _hybrid("jamba")


KINDS: dict[str, Callable[[], Built]] = {
    made.__name__: made
    for made in (
        *(bert, bert_classifier, roberta, modernbert, vit, clip, siglip, t5, bart, whisper),
        *(llava, smolvlm, idefics3, qwen2_5_vl, qwen3_vl, gemma3, dit, pixart, flux, wan, classifier),
        *(qwen3_next, falcon_h1, nemotron_h, jamba),
    )
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Built:
    """Model of a kind with seeded weights, in train mode, and its batch of `ROWS` rows."""
    torch.manual_seed(0)
    model, batch = KINDS[kind]()
    model = model.to(dtype).train()
    return model, {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def rows_of(batch: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Rows of one data rank; what is the same for all rows stays."""
    shared = ("img_ids", "txt_ids")
    return {
        name: value.chunk(parts)[part] if isinstance(value, Tensor) and name not in shared else value
        for name, value in batch.items()
    }


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Loss of a library's own model; the mean of squares of the output of a diffusion model."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    return output.sample.square().mean() if loss is None else loss
