"""A folder with small files at the paths that README and docs print, so that printed jobs and commands run in it."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from tests.data.chats import chats, save_tokenizer, write_jsonl
from tests.lab.families import family
from tests.lab.printed import ROOT

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "max_position_embeddings": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}


def make_workplace(folder: Path) -> None:
    """Write models, data and a job."""
    _write_models(folder / "models")
    _write_data(folder)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("packages", "__pycache__"))
    (folder / "plan.toml").write_text(tomli_w.dumps({"parallel": {"zero": 2}}))
    (folder / "job.toml").write_text(tomli_w.dumps(small_job("smollm2")))


def small_job(model: str) -> dict[str, Any]:
    """Job of four steps on a model of the workplace."""
    return {
        "out": "runs/mine",
        "model": {"path": f"models/{model}"},
        "data": {"source": "text", "path": "books/*.txt", "seq_len": 64},
        "train": {"steps": 4, "global_batch_size": 8, "evaluate_rows": 8},
    }


def _write_models(folder: Path) -> None:
    """Llama as models/smollm2, small and my-model; experts, an encoder-decoder and a vision transformer."""
    folder.mkdir()
    save_tokenizer(folder / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    for name, config in (
        ("smollm2", LlamaConfig(**SIZE, **HEADS, **tokens)),
        ("biased", AutoConfig.for_model(**{**family("deepseek_v3"), **tokens})),
        ("experts", Qwen3MoeConfig(**{**SIZE, **HEADS, **tokens, **EXPERTS})),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(folder / "smollm2", folder.parent / "small")
    shutil.copytree(folder / "smollm2", folder.parent / "my-model")
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(vocab_size=100, **t5)).save_pretrained(folder / "t5")
    vit = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(**vit, image_size=16, patch_size=4, num_labels=2)).save_pretrained(
        folder / "vit-small"
    )
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit-small")


def _write_data(folder: Path) -> None:
    """Texts, chats, preferences, prompts, questions and photos."""
    for name in ("books", "data/chat", "data/photos"):
        (folder / name).mkdir(parents=True)
    for index in range(20):
        (folder / "books" / f"{index}.txt").write_text(f"The quick brown fox number {index} jumps. " * 60)
    for name in ("chats", "general", "identity", "code", "data/chat/alpaca", "data/chat/identity"):
        write_jsonl(folder / f"{name}.jsonl", chats(40))
    pairs = [{"prompt": f"Say {n}.", "chosen": f" {n}", "rejected": f" {n + 1}"} for n in range(40)]
    write_jsonl(folder / "data/chat/dpo.jsonl", pairs)
    questions = [
        {"question": "The capital of France is", "choices": ["Paris", "Rome"], "answer": "Paris"},
        {"question": "The capital of Japan is", "choices": ["Seoul", "Tokyo"], "answer": 1},
    ]
    (folder / "capitals.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    _write_photos(folder / "data/photos/0.parquet")


def _write_photos(path: Path) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    rows = []
    for index in range(40):
        data = io.BytesIO()
        Image.new("RGB", (16, 16), ("red", "blue")[index % 2]).save(data, "png")
        rows.append({"image": {"bytes": data.getvalue(), "path": None}, "label": ("red", "blue")[index % 2]})
    features = Features({"image": ImageColumn(), "label": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(path)
