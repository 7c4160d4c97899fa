"""A user's loop of accelerate for a model of another kind: knows nothing of Weft. kinds_script.py RESULT.json STEPS vlm|dit"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from diffusers import DiTTransformer2DModel
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, set_seed

ROWS, WARM_UP, IMAGE_TOKENS, TOKENS = 2, 3, 64, 192
result, steps, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
set_seed(0)
# The last norm of the encoder of images is not used.
accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=kind == "vlm")])
if kind == "vlm":
    sizes = {"num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 1408}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=4, image_size=128, patch_size=16),
        text_config=LlamaConfig(**sizes, vocab_size=4096, num_hidden_layers=4, num_key_value_heads=4),
        image_token_index=4095,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
else:
    model = DiTTransformer2DModel(
        num_attention_heads=8, attention_head_dim=64, num_layers=8, in_channels=4, out_channels=4, sample_size=32
    )


def batch(step):
    chance = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
    if kind == "vlm":
        ids = torch.randint(0, 4095, (ROWS, IMAGE_TOKENS + TOKENS), generator=chance)
        labels = ids.clone()
        ids[:, :IMAGE_TOKENS], labels[:, :IMAGE_TOKENS] = 4095, -100
        pixels = torch.randn(ROWS, 3, 128, 128, generator=chance)
        return {"input_ids": ids, "pixel_values": pixels, "labels": labels}
    return {
        "hidden_states": torch.randn(ROWS, 4, 32, 32, generator=chance),
        "timestep": torch.randint(0, 1000, (ROWS,), generator=chance),
        "class_labels": torch.randint(0, 1000, (ROWS,), generator=chance),
    }


def loss_of(inputs):
    if kind == "vlm":
        return model(**inputs).loss
    return (model(**inputs).sample - inputs["hidden_states"]).square().mean()


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
model.train()
times, losses = [], []
for step in range(steps + WARM_UP):
    loss = loss_of(batch(step))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    times.append(time.perf_counter())
if accelerator.is_main_process:
    seconds = (times[-1] - times[WARM_UP - 1]) / steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    tokens = 2 * ROWS * (IMAGE_TOKENS + TOKENS if kind == "vlm" else 256)
    result.write_text(json.dumps({"tokens_per_second": tokens / seconds, "peak_mib": peak, "losses": losses}))
