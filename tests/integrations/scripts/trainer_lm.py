"""A user's script for transformers.Trainer, as it is today: knows nothing of Weft. python trainer_lm.py OUT [options]"""

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--resume")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--loss-only", action="store_true")
options, rest = parser.parse_known_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
generator = torch.Generator().manual_seed(1)


def row(index):
    length = int(torch.randint(9, 25, (1,), generator=generator))
    ids = (torch.arange(24) * (index % 7 + 1)) % 131
    labels = ids.clone()
    labels[length:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(24, dtype=torch.long)}


rows = [row(index) for index in range(96)]
arguments = TrainingArguments(
    options.out,
    per_device_train_batch_size=options.batch,
    per_device_eval_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulate,
    max_steps=options.steps,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=2,
    report_to="none",
    seed=3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    disable_tqdm=True,
    eval_strategy="steps",
    eval_steps=2,
    **json.loads(rest[0] if rest else "{}"),
)


def accuracy(prediction):
    found, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    kept = labels != -100
    return {"accuracy": float((found == labels)[kept].mean()), "rows": len(labels)}


trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=rows,
    eval_dataset=rows[:11],
    compute_metrics=None if options.loss_only else accuracy,
)
trainer.train(resume_from_checkpoint=True if options.resume == "last" else options.resume)
trainer.save_model(options.out + "/final")
if trainer.is_world_process_zero():
    Path(options.out, "result.json").write_text(json.dumps(trainer.state.log_history))
