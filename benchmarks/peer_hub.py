"""Local hub for TRL's own tests: the tiny models and the dataset that they load by name, made here.

The models have the sizes of TRL's `scripts/generate_tiny_models`, and a tokenizer that is trained on the texts of the
dataset. The dataset is that of TRL's `scripts/generate_zen_dataset.py`, which has its rows as text.
"""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

ORGANIZATION = "trl-internal-testing"
REVISION = "0" * 40
TEMPLATES = {"Qwen2": "qwen2_5.jinja", "Qwen3": "qwen3.jinja"}


def make_hub(hub: Path, trl: Path) -> None:
    """Make the models and the dataset, once.

    Args:
        hub: folder that HF_HOME names.
        trl: checkout of TRL; nothing is made without it.
    """
    if hub.exists() or not trl.exists():
        return
    rows = make_dataset(hub / "datasets", trl)
    texts = [json.dumps(rows)]
    for kind, template in TEMPLATES.items():
        tokenizer = make_tokenizer(texts, (trl / "trl" / "chat_templates" / template).read_text())
        make_models(hub / "hub", kind, tokenizer)


def make_dataset(folder: Path, trl: Path) -> list[Any]:
    """Write the dataset as the cache of `datasets` has it; returns its rows."""
    from datasets import Dataset, DatasetDict, load_dataset

    pushed: dict[str, DatasetDict] = {}

    def keep(self: DatasetDict, repository: str, config_name: str) -> None:
        pushed[config_name] = self

    script = runpy.run_path(str(trl / "scripts" / "generate_zen_dataset.py"))
    with mock.patch.object(DatasetDict, "push_to_hub", keep), mock.patch.object(Dataset, "push_to_hub", keep):
        script["main"](0.1, True, "zen")
    for config, splits in pushed.items():
        made = folder / f"draft-{config}"
        files = {}
        for split, dataset in splits.items():
            files[split] = str(made / f"{split}.parquet")
            dataset.to_parquet(files[split])
        load_dataset("parquet", data_files=files, cache_dir=str(made / "cache"))
        built = next((made / "cache").glob("parquet/*/*/*/dataset_info.json")).parent
        target = folder / f"{ORGANIZATION}___zen" / config / "0.0.0" / REVISION
        shutil.copytree(built, target)
        for file in target.glob("parquet-*.arrow"):
            file.rename(target / file.name.replace("parquet", "zen", 1))
        info = json.loads((target / "dataset_info.json").read_text())
        info |= {"dataset_name": "zen", "config_name": config}
        (target / "dataset_info.json").write_text(json.dumps(info))
        shutil.rmtree(made)
    return [row for splits in pushed.values() for dataset in splits.values() for row in dataset]


def make_tokenizer(texts: list[str], template: str) -> Any:
    """Byte-level tokenizer with the special tokens and the chat template of Qwen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


def make_models(folder: Path, kind: str, tokenizer: Any) -> None:
    """Write a causal language model and a classifier as the cache of the hub has them."""
    import torch
    import transformers

    suffix = "-2.5" if kind == "Qwen2" else ""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    for task, hidden in (("ForCausalLM", 8), ("ForSequenceClassification", 16)):
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=32,
            **({"num_labels": 1} if task != "ForCausalLM" else {}),
            **ids,
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}{task}")(config).to(torch.bfloat16)
        repository = folder / f"models--{ORGANIZATION}--tiny-{kind}{task}{suffix}"
        snapshot = repository / "snapshots" / REVISION
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)
