"""Align a chat model with preferences by TRL's DPOTrainer; knows nothing of Weft.

weft run --plan examples/plans/zero2.toml --nproc-per-node 2 examples/dpo.py runs/sft/export data/chat/dpo.jsonl runs/dpo
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser(description="Align a chat model with preferences.")
parser.add_argument("model", help="folder of a chat model")
parser.add_argument("pairs", help="JSON lines with prompt, chosen and rejected")
parser.add_argument("out", help="folder of the result")
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()

pairs = load_dataset("json", data_files=arguments.pairs, split="train").train_test_split(test_size=40, seed=0)
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(arguments.model),
    args=DPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        max_length=384,
        learning_rate=1e-4,
        warmup_steps=3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=arguments.steps,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=pairs["train"],
    eval_dataset=pairs["test"],
    processing_class=AutoTokenizer.from_pretrained(arguments.model),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),  # the reference is the model without it
)
trainer.train()
trainer.save_model()
