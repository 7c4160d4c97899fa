"""Small models of diffusers, one loss of each, and three updates with and without a plan."""

import os
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from tests.integrations.scripts_in_pool import variables_of
from weft.integrations.accelerator import WeftAccelerator
from weft.plan import Plan

IMAGES, STEPS = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 20, 30, 77])
TEXT = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(2))
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CHANNELS = {"in_channels": 4, "out_channels": 4}
UNET = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}

MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        **UNET,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    },
    "AutoencoderKL": {
        **CHANNELS,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
    },
    "PixArtTransformer2DModel": {
        **HEADS,
        **CHANNELS,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "use_additional_conditions": False,
    },
    "FluxTransformer2DModel": {
        **HEADS,
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    },
    "DiTTransformer2DModel": {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 9},
    "WanTransformer3DModel": {
        **HEADS,
        **CHANNELS,
        "patch_size": (1, 2, 2),
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
    },
}


def inputs_of(kind: str, rows: slice) -> dict[str, Any]:
    """Arguments of a forward for some rows of the batch."""
    images, steps, text = IMAGES[rows], STEPS[rows], TEXT[rows]
    if kind == "AutoencoderKL":
        return {"sample": images}
    if kind == "UNet2DConditionModel":
        return {"sample": images, "timestep": steps, "encoder_hidden_states": text}
    if kind == "DiTTransformer2DModel":
        return {"hidden_states": images, "timestep": steps, "class_labels": torch.zeros(len(images), dtype=torch.long)}
    common = {"hidden_states": images, "timestep": steps, "encoder_hidden_states": text}
    if kind == "PixArtTransformer2DModel":
        return {**common, "added_cond_kwargs": {}}
    if kind == "WanTransformer3DModel":
        return {**common, "hidden_states": images[:, :, None]}
    places = {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(5, 3), "pooled_projections": text[:, 0]}
    return {**common, **places, "hidden_states": images.flatten(2).transpose(1, 2), "timestep": steps / 100}


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).sample.square().mean()


def losses_and_norms(rank: int, ranks: int, kind: str, plan: Plan | None) -> list[float]:
    """Losses and gradient norms of three updates of SGD on the rows of this rank."""
    torch.manual_seed(0)
    model: Any = getattr(diffusers, kind)(**MODELS[kind]).eval()  # without dropout of classes
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    if plan is None:
        for _ in range(3):
            loss = loss_of(model, inputs_of(kind, slice(None)))
            loss.backward()
            found += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
            optimizer.step()
            optimizer.zero_grad()
        return found
    try:
        with mock.patch.dict(os.environ, variables_of(rank, ranks)):
            accelerator = WeftAccelerator(cpu=True, plan=plan)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = loss_of(model, inputs_of(kind, slice(rank, None, ranks)))
            accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            found += [accelerator.reduce(loss.detach(), "mean").item(), norm]
            optimizer.step()
            optimizer.zero_grad()
        return found
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
