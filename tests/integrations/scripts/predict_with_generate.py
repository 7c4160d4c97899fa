"""Seq2SeqTrainer that generates in its evaluation, on rows that no batch divides: OUT BATCH."""

import json
import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

out, batch = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
model = T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=0.0, initializer_factor=3.0))
generator = torch.Generator().manual_seed(1)
rows = []
for number in range(7):
    ids = torch.randint(2, 64, (8,), generator=generator)
    labels = torch.full((8,), -100)
    labels[: 1 + number] = ids[: 1 + number]
    rows.append({"input_ids": ids, "labels": labels})
arguments = Seq2SeqTrainingArguments(
    str(out / "trainer"),
    per_device_train_batch_size=batch,
    per_device_eval_batch_size=batch,
    max_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    predict_with_generate=True,
    generation_max_length=9,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=arguments,
    train_dataset=rows[:4],
    eval_dataset=rows,
    compute_metrics=lambda found: {"rows": len(found.predictions)},
)
before = trainer.evaluate()
predicted = trainer.predict(rows[:5]).predictions
trainer.train()  # with shards that an evaluation has gathered
after = trainer.evaluate()
if trainer.is_world_process_zero():
    (out / "result.json").write_text(json.dumps([[before["eval_rows"], after["eval_rows"]], predicted.tolist()]))
