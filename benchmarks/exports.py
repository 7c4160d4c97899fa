"""Files of an export that differ from those of the model that was trained, for twelve families.

    PYTHONPATH=. python benchmarks/exports.py               # of this checkout
    PYTHONPATH=.:OTHER/src python benchmarks/exports.py     # of another one
    PYTHONPATH=. python benchmarks/exports.py llama t5      # of two families

Each model is a small bf16 folder with files around its weights, and trains for one step of `weft train` on two ranks.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from examples.shapes import processor
from tests.lab.exports import GENERATION, differences
from tests.lab.families import FAMILIES, family
from tests.lab.jobs import write_job
from tests.lab.task_jobs import MODELS, task_job

from weft.anatomy.classes import auto_class
from weft.checkpoint.model_config import read_config
from weft.data.tokenizer import train_tokenizer
from weft.job import Job, Model

CAUSAL = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3", "mixtral", "deepseek_v3", "gpt_oss")
TASKS = {"bert": "masked", "t5": "seq2seq", "vit": "image classification", "llava": "vlm"}


def source_of(folder: Path, table: dict[str, Any], kind: str) -> Path:
    """Model of a configuration in bf16, with files around the weights."""
    config = read_config(Model(config=table), kind)
    torch.manual_seed(0)
    model = auto_class(kind, config).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if kind == "vlm":
        processor().save_pretrained(folder)
    elif kind != "classification":
        train_tokenizer(["The quick brown fox jumps. "] * 20, vocab_size=280, folder=folder, mask=kind == "masked")
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if model.can_generate():
        start = {"decoder_start_token_id": 0} if kind == "seq2seq" else {}
        (folder / "generation_config.json").write_text(json.dumps({**GENERATION, **start}))
    (folder / "LICENSE").write_text("free")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "note of the author": 1}))
    return folder


def job_of(name: str, folder: Path) -> Job:
    """Job of one step that trains the model in a folder."""
    if name in CAUSAL:
        job = Job.load(write_job(folder, train={"steps": 1, "global_batch_size": 4}))
        source = source_of(folder / "model", {**family(name), "vocab_size": 300}, "causal")
    else:
        own = {"tokenizer": str(folder / "model")} if name == "llava" else {}
        job = task_job(TASKS[name], folder, train={"steps": 1, "global_batch_size": 4}, data=own)
        source = source_of(folder / "model", MODELS[TASKS[name]], job.task.kind)
    return Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(source)}})


def main() -> None:
    """Print a line for each family."""
    assert set(CAUSAL) <= FAMILIES.keys()
    for name in sys.argv[1:] or (*CAUSAL, *TASKS):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            job = job_of(name, folder)
            (folder / "job.toml").write_text(job.to_toml())
            command = [sys.executable, "-m", "weft", "train", str(folder / "job.toml"), "--nproc-per-node", "2"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
            if done.returncode:
                print(f"{name:<12} {done.stderr.strip().splitlines()[-6:]}", flush=True)
                continue
            export = Path(job.out) / "export"
            files, keys = differences(folder / "model", export)
            lost = sorted(file for file in files if not (export / file).exists())
            print(
                f"{name:<12} files {sorted(files)}, of which lost {lost}; keys of config.json {sorted(keys)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
