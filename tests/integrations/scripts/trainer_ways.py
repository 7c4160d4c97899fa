"""Ways to use a Trainer in users' scripts: knows nothing of Weft. trainer_ways.py WAY OUT BATCH"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler

way, out, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


rows = [{"input_ids": (ids := (torch.arange(16) * (i % 5 + 1)) % 96), "labels": ids} for i in range(64)]


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows


settings = {
    "two epochs": {"max_steps": -1, "num_train_epochs": 2},
    "workers": {"dataloader_num_workers": 1},
    "adafactor": {"optim": "adafactor"},
    "early stopping": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "max_steps": 6,
    },
    "neftune": {"neftune_noise_alpha": 5.0},
    "loss in fp32 accumulation": {"gradient_accumulation_steps": 4, "max_steps": 2},
}.get(way, {})
arguments = TrainingArguments(
    **{
        "output_dir": out,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "max_steps": 3,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
)
more = {}
model = make_model()
if "model_init" in way:
    model, more = None, {"model_init": make_model}
if way == "own optimizer":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    more = {"optimizers": (optimizer, get_scheduler("linear", optimizer, 0, 6))}
if way == "early stopping":
    more = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
trainer = Trainer(
    model=model, args=arguments, train_dataset=Stream() if way == "stream" else rows, eval_dataset=rows[:7], **more
)
before = trainer.evaluate() if way == "evaluate first" else {}
trainer.train()
if "again" in way:
    trainer.args.max_steps = 5
    trainer.train()
if way == "second trainer":
    trainer = Trainer(model=trainer.model, args=arguments, train_dataset=rows, eval_dataset=rows[:7])
    trainer.train()
held_out = trainer.evaluate() if "again" in way else {}
found = None if "without predict" in way else trainer.predict(rows[:7])
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    log = [*trainer.state.log_history, {"step": 0, "loss": before.get("eval_loss", 0.0)}]
    log.append({"step": 0, "eval_loss": held_out.get("eval_loss", 0.0)})
    if found is not None:
        log.append({"step": 0, "loss": float(abs(found.predictions).mean()), "eval_rows": len(found.predictions)})
    Path(out, "result.json").write_text(json.dumps(log))
