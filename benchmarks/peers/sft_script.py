"""A user's fine-tuning script with TRL, as it is: knows nothing of Weft. sft_script.py RESULT.json STEPS [lora]"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

SEQ_LEN, ROWS, WARM_UP = 256, 2, 3
result, steps, lora = Path(sys.argv[1]), int(sys.argv[2]), "lora" in sys.argv
set_seed(0)
vocabulary = {f"w{index}": index for index in range(4096)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")), pad_token="w0", eos_token="w1"
)
config = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    pad_token_id=0,
    eos_token_id=1,
)
model = LlamaForCausalLM(config)
generator = torch.Generator().manual_seed(1)
rows = torch.randint(2, 4096, (4 * (steps + WARM_UP), SEQ_LEN), generator=generator).tolist()
times = []


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        times.append(time.perf_counter())


more = {}
if lora:
    from peft import LoraConfig

    more = {"peft_config": LoraConfig(r=8, target_modules="all-linear")}
arguments = SFTConfig(
    output_dir=str(result.parent),
    max_steps=steps + WARM_UP,
    per_device_train_batch_size=ROWS,
    max_length=SEQ_LEN,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
    learning_rate=1e-3,
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
    processing_class=tokenizer,
    callbacks=[Clock()],
    **more,
)
trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
if trainer.is_world_process_zero():
    seconds = (times[-1] - times[WARM_UP - 1]) / steps
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = {"tokens_per_second": 2 * ROWS * SEQ_LEN / seconds, "peak_mib": peak, "losses": losses}
    result.write_text(json.dumps(found))
