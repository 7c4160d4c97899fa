"""Small models of images and text of every family of Transformers (AutoModelForImageTextToText), with a batch of four rows."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.lab.shrink import shrunk

ROWS, TEXT, IMAGE = 4, 12, 90  # tokens of text in a row; id of an image's tokens
SIDE, PATCH, GRID = 64, 16, 4  # pixels, pixels, patches
LARGEST = 60_000_000  # parameters
SIZES: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "projection_hidden_size": 32,
    "projection_hidden_dim": 32,
    "projection_intermediate_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "vision_hidden_size": 32,
    "encoder_hidden_size": 32,
    "decoder_hidden_size": 32,
    "output_channels": 32,
    "image_text_hidden_size": 32,
    "image_size": SIDE,
    "patch_size": PATCH,
    "patch_dim": 3 * PATCH**2,
    "window_size": SIDE,
    "num_position_embeddings": GRID**2,
    "num_patches": GRID**2,
    "num_image_tokens": GRID**2,
    "image_seq_length": GRID**2,
    "num_query_tokens": 4,
    "mm_tokens_per_image": 4,
    "latent_query_num": 4,
    "resampler_n_latents": 4,
    "pos_emb_height": GRID,
    "pos_emb_width": GRID,
    "posemb_grid_size": GRID,
    "num_global_layers": 1,
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "vision_feature_layer": -1,
    "image_grid_pinpoints": [[SIDE, 2 * SIDE]],
}
"""Sizes of towers, projections and images, by key."""
TOKENS = {"image_token_id": IMAGE, "image_token_index": IMAGE, "image_patch_id": IMAGE}
OTHER_TOKENS = (
    *("video_token_id", "video_token_index", "vision_start_token_id", "vision_end_token_id", "audio_token_id"),
    *(
        "boi_token_id",
        "eoi_token_id",
        "boi_token_index",
        "eoi_token_index",
        "image_start_token_id",
        "image_end_token_id",
    ),
)


def _three_axes(*sections: int) -> dict[str, Any]:
    """Rotary embeddings of time, height and width."""
    return {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}
    }


THREE_AXES, HALF = _three_axes(1, 1, 2), _three_axes(1, 1, 0)
QFORMER = {"num_hidden_layers": 2, "cross_attention_frequency": 1}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "position_embedding_size": GRID**2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {GRID**2: 4}, "max_value_projector_patch_to_query_dict": 4},
    "blip-2": {"image_token_index": IMAGE, "qformer_config": QFORMER},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "cosmos3_edge": THREE_AXES,
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [32, 32]}},
    },
    "florence2": {
        "vision_config": {
            "depths": [1] * 4,
            "embed_dim": [32] * 4,
            "num_heads": [2] * 4,
            "num_groups": [2] * 4,
            "patch_size": [7, 3, 3, 3],
            "window_size": 4,
        }
    },
    "gemma4": {"vision_config": GEMMA4_VISION},
    "glm46v": THREE_AXES,
    "glm4v": THREE_AXES,
    "glm4v_moe": HALF,
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "glm_ocr": THREE_AXES,
    "glmga": THREE_AXES,
    "hunyuan_vl": {"text_config": {"head_dim": 8, **THREE_AXES["text_config"]}},
    "instructblip": {"image_token_index": IMAGE, "qformer_config": QFORMER},
    "instructblipvideo": {"video_token_index": IMAGE, "qformer_config": QFORMER},
    "janus": {"vq_config": {"base_channels": 32, "embed_dim": 8, "num_embeddings": 16, "latent_channels": 32}},
    "llama4": {"vision_config": {"intermediate_size": 128, "pixel_shuffle_ratio": 0.5}},
    "minicpm_ocr": {"image_token_id": IMAGE},
    "minicpmv4_6": {"image_token_id": IMAGE},
    "minicpmv4_7": {"image_token_id": IMAGE},
    "mllama": {
        "text_config": {"num_hidden_layers": 2, "cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "paddleocr_vl": THREE_AXES,
    "pix2struct": {
        "text_config": {"d_kv": 8, "num_heads": 4, "d_ff": 48},
        "vision_config": {"d_kv": 8, "num_attention_heads": 4, "d_ff": 48, "patch_embed_hidden_size": 3 * PATCH**2},
    },
    "pp_formulanet": {
        "vision_config": {"post_conv_in_channels": 32, "post_conv_mid_channels": 32, "post_conv_out_channels": 32}
    },
    "qwen2_5_omni_thinker": THREE_AXES,
    "qwen2_5_vl": THREE_AXES,
    "qwen2_vl": THREE_AXES,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "udop": {"decoder_start_token_id": 0},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 0},
}
"""Settings that do not follow from key names."""


def build_image_text(task: str, family: str) -> tuple[nn.Module, dict[str, Any]]:
    """Model, and a batch of rows with one image each; raises what the library raises for a family without one."""
    config = small_config(family)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _built(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = _built(config)
    problems: list[str] = []
    for images in forms(model):
        try:
            batch = _with_text(model, images)
            if _reach_the_loss(model, batch, images):
                return model, batch
        except Exception as error:  # of another form than the model takes
            shapes = [tuple(value.shape) for value in images.values()]
            problems.append(f"{shapes}: {type(error).__name__}: {error}")
    raise ValueError("\n".join(problems))


def _built(config: Any) -> Any:
    return transformers.AutoModelForImageTextToText.from_config(config)


def small_config(family: str) -> Any:
    """Configuration of about two layers, 32 wide, in each of its parts."""
    default = transformers.AutoConfig.for_model(family).to_dict()
    table = _merged(_sized(default), shrunk(family))
    table = _merged(table, _sized(default))
    return transformers.AutoConfig.for_model(**_merged(table, SETTINGS.get(family, {})))


def _sized(default: dict[str, Any]) -> dict[str, Any]:
    """Sizes and token ids for the keys that a configuration sets, in its parts too."""
    table: dict[str, Any] = {}
    for key, value in default.items():
        if isinstance(value, dict) and "model_type" in value:
            table[key] = {"model_type": value["model_type"], **_sized(value)}
        elif key in TOKENS and value is not None:
            table[key] = TOKENS[key]
        elif key in OTHER_TOKENS and value is not None:
            table[key] = IMAGE - 1 - OTHER_TOKENS.index(key) % 6
        elif key in SIZES and value is not None and not isinstance(value, bool):
            small = 2 if key == "window_size" and value == 14 else SIZES[key]  # patches, not pixels (SAM)
            is_pair = isinstance(value, list | tuple) and not isinstance(small, list)
            table[key] = [small] * len(value) if is_pair else small
    return table


def _merged(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(table[key], other[key])
        for key in table.keys() & other.keys()
        if isinstance(table[key], dict) and isinstance(other[key], dict)
    }
    return {**table, **other, **both}


def forms(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs of an image in each row, in the forms that models of this signature and configuration may take."""
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    vision = getattr(config, "vision_config", None) or config
    side = _one(getattr(vision, "image_size", None), SIDE)
    patch = _one(getattr(vision, "patch_size", None), PATCH)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    patches = ROWS * GRID**2
    sizes = torch.tensor([[side, side]] * ROWS)
    if "image_grid_thw" in names:
        grid = {"image_grid_thw": torch.tensor([[1, GRID, GRID]] * ROWS)}
        if "image_merge_sizes" in names:
            grid["image_merge_sizes"] = torch.tensor([2] * ROWS)
        yield {"pixel_values": _random(patches, 3 * frames * patch**2), **grid}
        yield {"pixel_values": _random(patches, 3, patch, patch), **grid}
        yield {"pixel_values": _random(1, patches, 3, patch, patch), **grid}
    shapes = torch.tensor([[GRID, GRID]] * ROWS)
    if hasattr(vision, "num_patches"):  # of SigLIP 2
        flat = {"pixel_values": _random(ROWS, GRID**2, 3 * patch**2)}
        yield {**flat, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(ROWS, GRID**2, dtype=torch.long)}
    if hasattr(config, "merge_kernel_size"):  # of MiniCPM
        yield {"pixel_values": _random(1, 3, patch, patches * patch), "target_sizes": shapes}
    if "image_patches" in names:  # of Fuyu
        yield {"pixel_values": _random(ROWS, GRID**2, 3 * patch**2)}
    if "image_position_ids" in names:
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).repeat(ROWS, 1, 1)
        yield {"pixel_values": _random(ROWS, GRID**2, 3 * patch**2), "image_position_ids": places}
    if "flattened_patches" in names:
        yield {"flattened_patches": _random(ROWS, GRID**2, 3 * patch**2 + 2).abs()}
    if "high_res_pixel_values" in names:
        large = _one(getattr(config.high_res_vision_config, "image_size", None), SIDE)
        yield {"pixel_values": _random(ROWS, 3, side, side), "high_res_pixel_values": _random(ROWS, 3, large, large)}
    if "aspect_ratio_ids" in names:
        tiles = vision.max_num_tiles
        ratio = {"aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long)}
        mask = {"aspect_ratio_mask": (torch.arange(tiles) == 0).long().expand(ROWS, 1, tiles)}
        yield {"pixel_values": _random(ROWS, 1, tiles, 3, side, side), **ratio, **mask}
    for tiles in (3, 1, None):
        shape = (ROWS, 3, side, side) if tiles is None else (ROWS, tiles, 3, side, side)
        tiled = {"image_sizes": torch.tensor([[side, 2 * side]] * ROWS)} if tiles == 3 else {}
        yield {"pixel_values": _random(*shape), **tiled}
        if tiles is None:
            yield {"pixel_values": _random(*shape), "image_sizes": sizes}


def _reach_the_loss(model: Any, batch: dict[str, Any], images: dict[str, Any]) -> bool:
    leaves = {name: value.clone().requires_grad_() for name, value in images.items() if value.is_floating_point()}
    loss = model(**{**batch, **leaves}).loss
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return bool(torch.isfinite(loss)) and any(gradient is not None for gradient in found)


def _one(size: Any, default: int) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size or default)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _with_text(model: Any, images: dict[str, Any]) -> dict[str, Any]:
    """Batch of images and of text around the tokens of an image, as many as the model makes features of it."""
    names = set(inspect.signature(model.forward).parameters)
    count = _features(model, images)
    length = TEXT + count + count % 2  # ranks divide it
    ids = torch.randint(5, 80, (ROWS, length), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    ids[:, 2 : 2 + count] = IMAGE
    is_image = (ids == IMAGE).long()
    text = {"input_ids": ids, "labels": labels, "mm_token_type_ids": is_image, "token_type_ids": is_image}
    text |= {"image_embeds_position_mask": is_image, "bbox": torch.zeros(*ids.shape, 4, dtype=torch.long)}
    text |= {"qformer_input_ids": labels[:, :4], "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.long)}
    return {**images, **{name: value for name, value in text.items() if name in names}}


def _features(model: Any, images: dict[str, Any]) -> int:
    """Number of features of an image that take the place of tokens; 0 of a model that attends to them."""
    function = getattr(model, "get_image_features", None) or getattr(
        getattr(model, "model", None), "get_image_features", None
    )
    if function is None:
        return int(getattr(model.config, "latent_query_num", getattr(model.config, "num_query_tokens", 0)))
    names = inspect.signature(function).parameters
    questions = {"qformer_input_ids": torch.ones(ROWS, 4, dtype=torch.long)} if "qformer_input_ids" in names else {}
    output = function(**images, **questions)
    features = getattr(output, "pooler_output", None)
    features = getattr(output, "last_hidden_state", output) if features is None else features
    return _count(features) // ROWS


def _count(features: Any) -> int:
    if isinstance(features, list | tuple):
        return sum(_count(feature) for feature in features)
    return int(features.numel() // features.shape[-1])
