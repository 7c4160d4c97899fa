"""Trainer of T5, of a classifier, or of tied weights: knows nothing of Weft. trainer_kinds.py KIND OUT BATCH"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

kind, out, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
tokens = [(torch.arange(16) * (i % 5 + 1)) % 90 + 3 for i in range(64)]
if kind == "t5":
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.flip(0)[:9]} for row in tokens]
elif kind == "tied decoder":
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, tie_word_embeddings=True))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
else:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, **dropout, vocab_size=96, num_labels=3))
    rows = [
        {"input_ids": row, "token_type_ids": (torch.arange(16) > 7).long(), "labels": index % 3}
        for index, row in enumerate(tokens)
    ]
arguments = TrainingArguments(
    output_dir=out,
    per_device_train_batch_size=batch,
    per_device_eval_batch_size=batch,
    max_steps=3,
    learning_rate=5e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    eval_on_start=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:7])
trainer.train()
held_out = trainer.evaluate()
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    log = [*trainer.state.log_history, {"step": 0, "eval_loss": held_out["eval_loss"]}]
    Path(out, "result.json").write_text(json.dumps(log))
