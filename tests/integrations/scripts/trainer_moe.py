"""A user's Trainer script for a Mixture-of-Experts model, as it is today: knows nothing of Weft. OUT BATCH"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

out, batch = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
)
rows = [{"input_ids": (ids := (torch.arange(16) * (i % 5 + 1)) % 96), "labels": ids} for i in range(64)]
arguments = TrainingArguments(
    out,
    per_device_train_batch_size=batch,
    max_steps=3,
    learning_rate=0.1,
    optim="sgd",
    logging_steps=1,
    save_steps=2,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=Qwen3MoeForCausalLM(config), args=arguments, train_dataset=rows)
trainer.train()
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    Path(out, "result.json").write_text(json.dumps(trainer.state.log_history))
