"""GRPO and RLOO of TRL: knows nothing of Weft. python trl_grpo.py KIND MODEL OUT BATCH JSON

With "replay", the folder of a run before, the completions are those of that run instead of new ones.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

kind, start, out, batch, settings = [*sys.argv[1:3], Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])]
replay, lora, wanted = settings.pop("replay", None), settings.pop("lora", False), settings.pop("wanted", None)
nan = settings.pop("nan", False)
words = [f"w{number}" for number in range(28)]
vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
model = AutoModelForCausalLM.from_pretrained(start)
more = {}
if lora:
    from peft import LoraConfig

    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
rollouts = []


def reward(completion_ids, **_):
    rollouts.append(completion_ids)
    if wanted is not None:
        return [sum(token == wanted for token in row) / 8 for row in completion_ids]
    return [float("nan") if nan and row % 3 == 1 else float(sum(ids) % 7) for row, ids in enumerate(completion_ids)]


trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[kind]
if replay:  # the rows of data rank 0, then those of data rank 1
    recorded = [json.loads(path.read_text()) for path in sorted(Path(replay).glob("rollouts-*.json"))]

    class Replay(trainer_class):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            step = len(rollouts)
            rows = [row for rank in recorded for row in rank[step]]
            assert len(rows) == len(prompt_ids)
            return (rows, None) if kind == "grpo" else rows

    trainer_class = Replay
arguments = config_class(
    **{
        "output_dir": str(out),
        "max_steps": 3,
        "per_device_train_batch_size": batch,
        "num_generations": 4,
        "max_completion_length": 8,
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
)
prompts = Dataset.from_list([{"prompt": f"w{i % 28} w{i * 5 % 28}"} for i in range(64)])
trainer = trainer_class(model, reward, args=arguments, train_dataset=prompts, processing_class=tokenizer, **more)
trainer.train()
trainer.save_model(str(out / "final"))
rank, data_rank = trainer.args.process_index, trainer.accelerator.process_index
(out / f"rank-{rank}.json").write_text(json.dumps(rollouts))
(out / f"rollouts-{data_rank}.json").write_text(json.dumps(rollouts))  # ranks that share rows write the same
if trainer.is_world_process_zero():
    logs = {
        name: [len(column)] for name, column in trainer._logs.items() if name in ("prompt", "completion", "advantages")
    }
    (out / "result.json").write_text(json.dumps(trainer.state.log_history))
    (out / "logs.json").write_text(json.dumps([logs, [len(column) for column in trainer._logs["rewards"].values()]]))
