"""A user's loop of Lightning Fabric. fabric_loop.py OUT BATCH PLAN [RESUME]; PLAN is the JSON of a plan, or "" for none."""

import json
import os
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

out, batch, plan = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resume = sys.argv[4] if len(sys.argv) > 4 else ""
strategy = "auto"
if plan:
    from weft.integrations.lightning import WeftStrategy
    from weft.plan import Plan

    strategy = WeftStrategy(Plan.model_validate_json(plan))
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy=strategy)
fabric.launch()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
rows = [{"input_ids": (ids := (torch.arange(12) * (i % 7 + 1)) % 97), "labels": ids} for i in range(24)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=batch))
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
if resume:
    fabric.load(resume, state)
losses, norms = [], []
for index, inputs in enumerate(loader):
    if index // 2 < state["step"]:
        continue
    accumulates = index % 2 == 0
    with fabric.no_backward_sync(model, enabled=accumulates):
        loss = model(**inputs).loss
        fabric.backward(loss / 2)
    losses.append(float(fabric.all_reduce(loss.detach())))
    if not accumulates:
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        if state["step"] == 1 and not resume:
            fabric.save(out / "state", state)
fabric.save(out / "weights.pt", {"model": model})
one = torch.ones(())
counts = [fabric.all_gather(one).numel(), int(fabric.all_reduce(one, reduce_op="sum"))]
decided = [fabric.strategy.reduce_boolean_decision(answer) for answer in (True, fabric.global_rank > 0)]
if fabric.is_global_zero:
    (out / "result.json").write_text(
        json.dumps({"losses": losses, "norms": norms, "counts": counts, "decided": decided})
    )
