"""A small model of every transformer of Diffusers, with a batch: its defaults, with sizes replaced by key name."""

import inspect
import re
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

ROWS, TEXT, PATCHES = 4, 6, 16  # rows, tokens of text, and patches of an image
HEADS, HEAD_DIM, WIDTH, CHANNELS = 2, 16, 32, 4
# Patterns of settings, and the small value that replaces a default above zero.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(?!mlp)\w*_?n?heads", HEADS),
    (r"\w*head_dim|cross_attn_dim_head", HEAD_DIM),
    (r"\w*(layers|blocks)|nlayers|\w*depth", 2),
    (r"(in|out|io|latent|cond_in|audio_in|audio_out|vace_in)_channels|latent_dim|(in|out)_visual_dim", CHANNELS),
    (r"hidden_size|dim|\w+_dim2?|caption_channels|\w*_attention_dim|\w*_hidden_size", WIDTH),
    (r"intermediate_size|\w*_intermediate_size|ff_dim|ffn_dim|ff_inner_dim|ffn_hidden_size", 2 * WIDTH),
    (r"sample_(size|width|height)", 8),
)
AXES: dict[int, tuple[int, ...]] = {2: (8, 8), 3: (4, 4, 8), 4: (4, 4, 4, 4)}
"""Features of a head that rotate with each axis of the positions, by number of axes."""
AXES_KEY = re.compile(r"axes_dims?(_rope)?|rope_(axes_)?dim(_list)?")


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(3))


def _grid(tokens: int, axes: int) -> Tensor:
    """Positions [tokens, axes] of the patches of a square image."""
    ids = torch.zeros(tokens, axes)
    ids[:, -2], ids[:, -1] = torch.arange(tokens) // 4, torch.arange(tokens) % 4
    return ids


def _turns(side: int) -> Tensor:
    """Rotations [side, side, features] of the queries and keys at each patch, as complex numbers."""
    angles = torch.arange(side * side).view(side, side, 1) / (1 + torch.arange(HEAD_DIM // 2))
    return torch.polar(torch.ones_like(angles), angles)


def _of_rows(ids: Tensor) -> Tensor:
    return ids.expand(ROWS, *ids.shape).clone()


IMAGE, VIDEO = _random(ROWS, CHANNELS, 8, 8), _random(ROWS, CHANNELS, 2, 8, 8)
FRAMES = VIDEO.transpose(1, 2)  # [rows, frames, channels, height, width]
SEQUENCE, PROMPT = _random(ROWS, PATCHES, CHANNELS), _random(ROWS, TEXT, WIDTH)
AUDIO = SEQUENCE.transpose(1, 2)
POOLED, MASK = _random(ROWS, WIDTH), torch.ones(ROWS, TEXT, dtype=torch.bool)
TIMES = torch.tensor([1.0, 20.0, 30.0, 77.0])
FRAME_TIMES = TIMES[:, None].repeat(1, 2)
# Inputs by name of the argument, for all models whose forward has it.
INPUTS: dict[str, Any] = {
    "timestep": TIMES,
    "timesteps": TIMES,
    "encoder_hidden_states": PROMPT,
    "pooled_projections": POOLED,
    "img_ids": _grid(PATCHES, 3),
    "txt_ids": _grid(TEXT, 3),
    "img_shapes": [[(1, 4, 4)]],
}
# Inputs of arguments without a default.
NEEDED: dict[str, Any] = {
    "timestep_r": TIMES / 2,
    "r_timestep": TIMES / 2,
    "encoder_attention_mask": MASK,
    "original_size": torch.full((ROWS, 2), 64.0),
    "target_size": torch.full((ROWS, 2), 64.0),
    "crop_coords": torch.zeros(ROWS, 2),
    "global_hidden_states": POOLED,
    "audio_hidden_states": SEQUENCE,
    "audio_encoder_hidden_states": PROMPT,
    "proj_embedding": POOLED,
}
SHARED = (
    *("img_ids", "txt_ids", "position_ids", "visual_rope_pos", "text_rope_pos", "image_rotary_emb"),
    *("indices_latents", "indices_latents_clean", "indices_latents_history_2x", "indices_latents_history_4x"),
)
"""Inputs that are the same for all rows, unless their first dim is that of the rows."""
VIDEO_CAPTION = {"num_frames": 1, "height": 4, "width": 4}
UNET = {"in_channels": WIDTH, "norm_num_groups": 4, "cross_attention_dim": WIDTH}  # blocks of convolutional networks
# Settings and inputs that do not follow from names; None leaves an input out.
SETTINGS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {"in_channels": 12, "audio_acoustic_hidden_dim": 4, "sliding_window": 8},
    "BriaFibo2Transformer2DModel": {
        "injection_layer_ids": (1,),
        "axes_lens": (64, 64, 64),
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
    },
    "BriaFiboTransformer2DModel": {"text_encoder_dim": 16, "pooled_projection_dim": None},
    "CogVideoXTransformer3DModel": {"sample_frames": 5, "max_text_seq_length": TEXT},
    "ConsisIDTransformer3DModel": {"sample_frames": 5, "max_text_seq_length": TEXT},
    "CosmosTransformer3DModel": {"concat_padding_mask": False, "max_size": (4, 8, 8)},
    "DiTTransformer2DModel": {"num_embeds_ada_norm": 9},
    "DreamLiteTransformer2DModel": UNET,
    "EasyAnimateTransformer3DModel": {"in_channels": CHANNELS, "out_channels": CHANNELS, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "caption_channels": [WIDTH] * 2, "llama_layers": [0, 1, 0, 1]}
    | {"axes_dims_rope": AXES[3]},
    "HunyuanDiT2DModel": {
        "in_channels": CHANNELS,
        "patch_size": 2,
        "text_len": TEXT,
        "text_len_t5": TEXT,
        "num_layers": 4,
    }
    | {"cross_attention_dim_t5": WIDTH},
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": True, "has_clean_x_embedder": True},
    "HunyuanVideo15Transformer3DModel": {"target_size": 64},
    "Ideogram4Transformer2DModel": {"mrope_section": (4, 2, 2)},
    "Kandinsky6Transformer3DModel": {"visual_cond": False},
    "LatteTransformer3DModel": {"in_channels": CHANNELS, "patch_size": 2, "video_length": 2, "caption_channels": WIDTH}
    | {"norm_type": "ada_norm_single", "num_embeds_ada_norm": 9, "norm_elementwise_affine": False},
    "LuminaNextDiT2DModel": {"num_kv_heads": HEADS},
    "MiniMaxMusic3Transformer1DModel": {"rotary_dim": 8},
    "MochiTransformer3DModel": {"attention_head_dim": 24},  # as in Z-Image
    "NucleusMoEImageTransformer2DModel": {"mlp_ratio": 6.0},  # hidden units are rounded down to a multiple of 128
    "OmniGenTransformer2DModel": {"vocab_size": 96, "pad_token_id": 0, "pos_embed_max_size": 8}
    | {"rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "SanaWMTransformer3DModel": {"linear_head_dim": HEAD_DIM, "mlp_ratio": 2.0},
    "StableAudio3DiTModel": {"num_memory_tokens": 4, "local_add_cond_dim": 4},
    "Transformer2DModel": UNET,
    "TransformerTemporalModel": UNET,
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "ZImageTransformer2DModel": {"axes_lens": [64, 64, 64], "in_channels": 2 * CHANNELS}
    | {"dim": 48, "axes_dims": [8, 8, 8]},  # 8 / 3 times as many hidden units as features
}
OWN_INPUTS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {"context_latents": _random(ROWS, PATCHES, 8)},
    "AnyFlowTransformer3DModel": {"hidden_states": FRAMES, "timestep": FRAME_TIMES, "r_timestep": FRAME_TIMES / 2},
    "BriaFibo2Transformer2DModel": {"encoder_hidden_states": _random(ROWS, 2, TEXT, WIDTH)},
    "BriaFiboTransformer2DModel": {"text_encoder_layers": [_random(ROWS, TEXT, 16)] * 4},
    "CogVideoXTransformer3DModel": {"hidden_states": FRAMES},
    "ConsisIDTransformer3DModel": {"hidden_states": FRAMES},
    "DiTTransformer2DModel": {"class_labels": torch.arange(ROWS) % 3},
    "DreamLiteTransformer2DModel": {"hidden_states": _random(ROWS, WIDTH, 4, 4), "timestep": None},
    "ErnieImageTransformer2DModel": {
        "text_bth": PROMPT,
        "text_lens": torch.full((ROWS,), TEXT),
        "encoder_hidden_states": None,
    },
    "Flux2Transformer2DModel": {"img_ids": _grid(PATCHES, 4), "txt_ids": _grid(TEXT, 4), "guidance": TIMES},
    "Flux3Transformer2DModel": {"img_ids": _grid(PATCHES, 4), "txt_ids": _grid(TEXT, 4)},
    "GlmImageTransformer2DModel": {
        "prior_token_id": _ids(32, ROWS, PATCHES),
        "prior_token_drop": torch.zeros(ROWS, dtype=torch.bool),
    },
    "HiDreamImageTransformer2DModel": {
        "hidden_states": IMAGE,
        "img_ids": None,
        "encoder_hidden_states_t5": PROMPT,
        "encoder_hidden_states_llama3": [PROMPT, PROMPT],
        "pooled_embeds": POOLED,
    },
    "HunyuanDiT2DModel": {
        "text_embedding_mask": MASK,
        "text_embedding_mask_t5": MASK,
        "encoder_hidden_states_t5": PROMPT,
        "image_meta_size": torch.full((ROWS, 6), 64.0),
        "style": torch.zeros(ROWS, dtype=torch.long),
    },
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": PROMPT,
        "encoder_attention_mask_2": MASK,
        "image_embeds": PROMPT,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        "image_embeds": PROMPT,
        "indices_latents": torch.arange(2),
        "latents_clean": VIDEO,
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": VIDEO,
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": VIDEO.repeat(1, 1, 2, 1, 1),
        "indices_latents_history_4x": torch.arange(4),
        "guidance": TIMES,
    },
    "HunyuanVideoTransformer3DModel": {"guidance": TIMES},
    "Ideogram4Transformer2DModel": {
        "encoder_hidden_states": _random(ROWS, PATCHES, WIDTH),
        "position_ids": _of_rows(_grid(PATCHES, 3)).long(),
        "segment_ids": torch.zeros(ROWS, PATCHES, dtype=torch.long),
        "indicator": _of_rows(torch.tensor([3] * 6 + [2] * 10)),
    },
    "JoyImageEditPlusTransformer3DModel": {
        "hidden_states": _random(ROWS, PATCHES, CHANNELS, 1, 2, 2),
        "shape_list": [[(1, 4, 4)]] * ROWS,
    },
    "Kandinsky5Transformer3DModel": {
        "hidden_states": VIDEO.permute(0, 2, 3, 4, 1),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(TEXT),
    },
    "Kandinsky6Transformer3DModel": {
        "hidden_states": VIDEO.permute(0, 2, 3, 4, 1),
        "audio_hidden_states": _random(ROWS, PATCHES, WIDTH),
    },
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": _random(ROWS, TEXT, 2, WIDTH),
        "position_ids": torch.cat([_grid(TEXT, 3), _grid(PATCHES, 3)]),
    },
    "LTX2VideoTransformer3DModel": {
        **VIDEO_CAPTION,
        "hidden_states": SEQUENCE,
        "timestep": TIMES[:, None].repeat(1, PATCHES),
        "audio_num_frames": PATCHES,
    },
    "LTXVideoTransformer3DModel": {**VIDEO_CAPTION, "hidden_states": SEQUENCE},
    "LuminaNextDiT2DModel": {"encoder_mask": MASK, "image_rotary_emb": _turns(8), "cross_attention_kwargs": {}},
    "MiniMaxMusic3Transformer1DModel": {"hidden_states": AUDIO, "encoder_hidden_states": _random(ROWS, PATCHES, WIDTH)},
    "OmniGenTransformer2DModel": {
        "hidden_states": IMAGE,
        "encoder_hidden_states": None,
        "input_ids": _ids(96, ROWS, TEXT),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(ROWS, TEXT + 1 + PATCHES, TEXT + 1 + PATCHES),
        "position_ids": _of_rows(torch.arange(TEXT + 1 + PATCHES)),
    },
    "PixArtTransformer2DModel": {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    "PriorTransformer": {"hidden_states": POOLED, "encoder_hidden_states": _random(ROWS, 77, WIDTH)},
    "QwenImage21Transformer2DModel": {
        "hidden_states": SEQUENCE,
        "img_mask": _of_rows(torch.tensor([False] * TEXT + [True] * 4)),
    },
    "SanaWMTransformer3DModel": {"mask": MASK, "timestep": TIMES[:, None, None].repeat(1, 1, 2)},
    "StableAudio3DiTModel": {"hidden_states": AUDIO},
    "StableAudioDiTModel": {"hidden_states": AUDIO, "global_hidden_states": _random(ROWS, 1, WIDTH)},
    "Transformer2DModel": {"hidden_states": _random(ROWS, WIDTH, 4, 4), "timestep": None},
    "TransformerTemporalModel": {
        "hidden_states": _random(2 * ROWS, WIDTH, 4, 4),
        "num_frames": 2,
        "encoder_hidden_states": None,
        "timestep": None,
    },
    "WanVACETransformer3DModel": {"control_hidden_states": _random(ROWS, CHANNELS, 2, 8, 8)},
    "ZImageTransformer2DModel": {
        "x": [_random(2 * CHANNELS, 1, 8, 8) + row for row in range(ROWS)],
        "t": TIMES / 100,
        "cap_feats": [_random(TEXT, WIDTH) + row for row in range(ROWS)],
        "hidden_states": None,
    },
}


def _families() -> list[str]:
    """Names of the public transformers of Diffusers."""
    found = [name for name in dir(diffusers) if "Transformer" in name or "DiT" in name]
    classes = [(name, getattr(diffusers, name)) for name in found]
    modules = {name: made.__module__ for name, made in classes if isinstance(made, type)}
    return sorted(name for name, module in modules.items() if module.startswith("diffusers.models.transformers."))


FAMILIES = _families()


def build(family: str) -> tuple[nn.Module, dict[str, Any]]:
    """Model of a class of Diffusers, and its batch of `ROWS` rows; raises what the library raises."""
    torch.manual_seed(0)
    made = getattr(diffusers, family)
    settings = _shrunk(made) | SETTINGS.get(family, {})
    return made(**settings), _batch(made, settings)


def _defaults(function: Any) -> dict[str, Any]:
    return {name: value.default for name, value in inspect.signature(function).parameters.items() if name != "self"}


def _shrunk(made: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in _defaults(made.__init__).items():
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
        if AXES_KEY.fullmatch(key) and isinstance(value, tuple | list):
            settings[key] = AXES[len(value)]
        elif size is not None and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            settings[key] = size
    return settings


def _batch(made: Any, settings: dict[str, Any]) -> dict[str, Any]:
    arguments, own = _defaults(made.forward), OWN_INPUTS.get(made.__name__, {})
    packed = bool({"img_ids", "img_shapes", "position_ids"} & arguments.keys())
    noise = {
        "hidden_states": VIDEO if "3D" in made.__name__ else IMAGE if "2D" in made.__name__ and not packed else SEQUENCE
    }
    guidance = {"guidance": TIMES} if settings.get("guidance_embeds") else {}
    known = NEEDED | INPUTS
    batch = {
        name: known[name]
        for name, default in arguments.items()
        if name in INPUTS or (name in NEEDED and default is inspect.Parameter.empty)
    }
    return {name: value for name, value in (noise | batch | guidance | own).items() if value is not None}


def mean_square(output: Any) -> Tensor:
    """Mean of squares of all tensors of an output, some of which are lists with a tensor for each row."""
    values = [item for value in output.to_tuple() for item in (value if isinstance(value, list) else [value])]
    return torch.cat([value.flatten() for value in values if isinstance(value, Tensor)]).square().mean()


def part_of(name: str, value: Any, part: int, parts: int) -> Any:
    """Rows of one of `parts` equal parts: of a tensor, of a list with a tensor for each layer, or of a list of rows."""
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    if isinstance(value, Tensor) and len(value) == 1 and value.ndim > 1:  # patches of all images in one row (MiniCPM)
        return value.chunk(parts, -1)[part]
    if isinstance(value, Tensor):
        return value[rows] if len(value) == ROWS else value if name in SHARED else value.chunk(parts)[part]
    if isinstance(value, list) and name not in SHARED:
        if all(isinstance(item, Tensor) and len(item) == ROWS for item in value):
            return [item[rows] for item in value]
        return value[rows] if len(value) == ROWS else value
    return value
