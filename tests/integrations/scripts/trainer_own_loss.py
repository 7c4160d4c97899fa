"""A user's Trainer with its own loss, which reads logits, and its own callback: knows nothing of Weft. OUT BATCH"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

out, batch = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
model = Qwen3ForCausalLM(config)
rows = [{"input_ids": (ids := (torch.arange(14) * (i % 5 + 1)) % 97), "labels": ids} for i in range(64)]


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), labels) + 1e-3 * logits.logsumexp(-1).square().mean()
        self.seen = tuple(outputs.logits.shape[1:])
        return (loss, outputs) if return_outputs else loss

    def save_model(self, *args, **kwargs):
        self.saves = getattr(self, "saves", 0) + 1
        super().save_model(*args, **kwargs)


class Watch(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


arguments = TrainingArguments(
    out,
    per_device_train_batch_size=batch,
    gradient_accumulation_steps=1,
    max_steps=4,
    learning_rate=5e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    gradient_checkpointing=True,
    optim="adamw_torch",
)
watch = Watch()
trainer = Own(model=model, args=arguments, train_dataset=rows, callbacks=[watch])
trainer.train()
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    assert (watch.steps, trainer.saves, trainer.seen) == (4, 1, (14, 97)), (watch.steps, trainer.saves, trainer.seen)
    Path(out, "result.json").write_text(json.dumps(trainer.state.log_history))
