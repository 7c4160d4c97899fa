"""A user's script for TRL, as it is today: knows nothing of Weft.

python trl_script.py KIND OUT BATCH [lora | dora | experts] [JSON]
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

kind, out, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
experts = "experts" in sys.argv
lora, settings = (
    "lora" in sys.argv or "dora" in sys.argv or experts,
    json.loads(sys.argv[-1]) if sys.argv[-1].startswith("{") else {},
)
resume = settings.pop("resume", None)
words = ["weft", "warp", "loom", "shuttle", "thread", "yarn", "cloth", "weave", "reed", "heddle"]
special = ["<pad>", "<s>", "</s>", "<unk>", "Say", ":"]
vocabulary = {word: index for index, word in enumerate(special + words + [str(number) for number in range(32)])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
set_seed(0)
config_class, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (LlamaConfig, LlamaForCausalLM)
sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12} if experts else {}
config = config_class(
    vocab_size=len(tokenizer),
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    **sizes,
)
start = Path(out).with_name("start-experts" if experts else "start")  # of which DPO loads its reference model
if not start.exists():
    with TemporaryDirectory(dir=start.parent) as made, suppress(OSError):
        model_class(config).save_pretrained(Path(made, "model"))
        Path(made, "model").rename(start)  # fails if another rank was faster
model = model_class.from_pretrained(start)
common = {
    "output_dir": out,
    "max_steps": 3,
    "per_device_train_batch_size": batch,
    "logging_steps": 1,
    "seed": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "learning_rate": 3e-3,
    "disable_tqdm": True,
    **settings,
}
more = {}
if lora:
    from peft import LoraConfig

    dora = "dora" in sys.argv
    targets = {"target_modules": "all-linear"}
    if experts:
        targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    more = {"peft_config": LoraConfig(r=4, init_lora_weights=False, use_dora=dora, **targets)}


def line(index):
    return " ".join(words[(index * 3 + offset) % 10] for offset in range(3 + index % 5))


pairs = [{"prompt": f"Say {i} :", "chosen": " " + line(i), "rejected": " " + line(i + 1)} for i in range(32)]
if kind == "sft":
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    arguments = SFTConfig(**{"max_length": 64, **common})
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more)
elif kind == "dpo":
    arguments = DPOConfig(max_length=64, **common)
    trainer = DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer, **more
    )
elif kind == "kto":
    # TRL gives each row the completion before it in its batch, for the KL term: in batches of two and of four the same one.
    rows = [
        {
            "prompt": pair["prompt"],
            "completion": pair["chosen"] if i % 2 == 0 else " " + line(i // 4),
            "label": i % 3 > 0,
        }
        for i, pair in enumerate(pairs)
    ]
    arguments = KTOConfig(max_length=64, **common)
    with arguments.main_process_first(local=False):  # a dataset on the disk: ranks share its precomputed columns
        if not Path(out, "rows").exists():
            Dataset.from_list(rows).save_to_disk(out + "/rows")
    trainer = KTOTrainer(
        model, args=arguments, train_dataset=load_from_disk(out + "/rows"), processing_class=tokenizer, **more
    )
else:
    config.num_labels = 1
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    arguments = RewardConfig(max_length=64, **common)
    trainer = RewardTrainer(model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(out + "/final")
if trainer.is_world_process_zero():
    Path(out, "result.json").write_text(json.dumps(trainer.state.log_history))
