"""A user's training loop with accelerate, as it is today: knows nothing of Weft. accelerate_loop.py OUT BATCH [RESUME]"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

out, batch = Path(sys.argv[1]), int(sys.argv[2])
resume = sys.argv[3] if len(sys.argv) > 3 else None
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
config = LlamaConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
rows = [{"input_ids": (ids := (torch.arange(24) * (i % 7 + 1)) % 131), "labels": ids} for i in range(64)]
loader = DataLoader(rows, batch_size=batch, shuffle=False)
held_out = DataLoader(rows[:11], batch_size=batch)
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in model.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ],
    lr=1e-2,
)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader) // 2)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
losses, norms, start = [], [], 0
if resume:
    accelerator.load_state(resume)
    start = 2
for index, inputs in enumerate(loader):
    if index >= 8:
        break
    if index // 2 < start:
        continue
    with accelerator.accumulate(model):
        loss = model(**inputs).loss
        accelerator.backward(loss)
        losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean().item())
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if index == 3:
        accelerator.save_state(str(out / "state"))
model.eval()
found = []
for inputs in held_out:
    with torch.no_grad():
        logits = model(**inputs).logits
    found.append(accelerator.gather_for_metrics(logits[:, :-1].argmax(-1).eq(inputs["labels"][:, 1:]).float().mean(-1)))
rows_found = torch.cat(found)
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(
    out / "final",
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
)
accelerator.end_training()
if accelerator.is_main_process:
    rates = scheduler.get_last_lr()
    result = {"losses": losses, "norms": norms, "rows": len(rows_found), "accuracy": rows_found.mean().item()}
    (out / "result.json").write_text(json.dumps({**result, "rates": rates}))
