"""A user's script for TRL's SFTTrainer on chats: python trl_chat.py MODEL CHATS OUT {JSON settings}"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, chats, out, settings = sys.argv[1:]
arguments = SFTConfig(
    output_dir=out,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    train_sampling_strategy="sequential",
    gradient_checkpointing=False,
    **json.loads(settings),
)
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(model),
    arguments,
    train_dataset=Dataset.from_list([json.loads(line) for line in Path(chats).read_text().splitlines()]),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
rows = [{"ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
Path(out, "result.json").write_text(json.dumps({"rows": rows, "log": trainer.state.log_history}))
