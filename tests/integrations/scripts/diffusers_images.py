"""A user's script for diffusers, as it is today: knows nothing of Weft. diffusers_images.py OUT BATCH KIND [ema] [alone]

In the form of examples/unconditional_image_generation/train_unconditional.py of diffusers. Noise and timesteps are drawn for
each image, not for each rank, so that any number of ranks trains on the same rows.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, SD3Transformer2DModel, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

out, batch, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
use_ema, alone = "ema" in sys.argv, "alone" in sys.argv
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
if kind == "unet":
    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
    )
else:
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
ema_model = (
    EMAModel(model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config) if use_ema else None
)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)


def image(index):
    generator = torch.Generator().manual_seed(index)
    drawn = {"input": (3, 8, 8), "noise": (3, 8, 8), "text": (4, 16), "pooled": (16,)}
    row = {name: torch.randn(shape, generator=generator) for name, shape in drawn.items()}
    return {**row, "timestep": torch.randint(100, (), generator=generator)}


def predict(batch):
    noisy_images = noise_scheduler.add_noise(batch["input"], batch["noise"], batch["timestep"])
    if kind == "unet":
        return model(noisy_images, batch["timestep"]).sample
    return model(noisy_images, batch["text"], batch["pooled"], batch["timestep"]).sample


train_dataloader = torch.utils.data.DataLoader([image(i) for i in range(24)], batch_size=batch)
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader))
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
losses, norms = [], []
model.train()
for batch in train_dataloader:
    with accelerator.accumulate(model):
        loss = F.mse_loss(predict(batch).float(), batch["noise"].float())
        accelerator.backward(loss)
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients and use_ema:
        ema_model.step(model.parameters())
accelerator.wait_for_everyone()
trained = accelerator.unwrap_model(model)
if use_ema:
    ema_model.copy_to(trained.parameters())
images = []
if kind == "unet" and (accelerator.is_main_process or not alone):
    pipeline = DDPMPipeline(unet=trained, scheduler=noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    sampled = pipeline(2, generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np")
    images = sampled.images.flatten().tolist()
    (pipeline if alone else trained).save_pretrained(out / "final")
elif accelerator.is_main_process or not alone:
    trained.save_pretrained(out / "final", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
accelerator.end_training()
if accelerator.is_main_process:
    (out / "result.json").write_text(json.dumps({"losses": losses, "norms": norms, "images": images}))
