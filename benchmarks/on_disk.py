"""Weights, gradients and optimizer states on disk under a memory limit of the kernel.

    python benchmarks/on_disk.py [--layers 16] [--hidden 768] [--limit 1.0]

Trains a Llama of random weights from a folder, four steps on one rank, as root: a limit is a control group of Linux (v1 or
v2). Memory is what the processes of the run, with the launcher, cannot give back: anonymous memory, read 20 times a second.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weft.device.detect import detect

GROUPS = Path("/sys/fs/cgroup")
IS_V2 = (GROUPS / "cgroup.controllers").exists()
ON_DISK = {"parameters_device": "disk", "optimizer_device": "disk"}


class Limited:
    """Control group with a memory limit, in bytes."""

    def __init__(self, limit: int | None):
        self.folder = (GROUPS if IS_V2 else GROUPS / "memory") / f"weft-{os.getpid()}"
        self.folder.mkdir()
        if limit is not None:
            (self.folder / ("memory.max" if IS_V2 else "memory.limit_in_bytes")).write_text(str(limit))

    def join(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def memory(self) -> int:
        """Bytes of anonymous memory."""
        name = "anon" if IS_V2 else "total_rss"
        rows = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return next(int(value) for key, value in rows if key == name)


def train(folder: Path, job: Path, limit: int | None, memory: dict[str, str]) -> tuple[float, int, list[float]]:
    """Run `weft train`; median seconds of steps 3 and 4, peak of memory in bytes, and losses."""
    group = Limited(limit)
    settings = [f"--set=plan.memory.{key}={value}" for key, value in memory.items()]
    command = [sys.executable, "-m", "weft", "train", str(job), "--nproc-per-node=1", "--out", str(folder), *settings]
    with (folder.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=group.join)
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, group.memory())
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            time.sleep(1)  # the forked server of ranks ends after it
            group.folder.rmdir()
    if process.returncode:
        raise SystemExit(folder.with_suffix(".log").read_text()[-2000:])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[2:]), peak, [row["loss"] for row in rows]


def write_job(folder: Path, hidden: int, layers: int) -> Path:
    """Write a model folder, and a job that trains it."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    print(f"{model.num_parameters() / 1e6:.0f} million parameters")
    job = folder / "job.toml"
    job.write_text(f"""
[model]
path = "{folder / "model"}"
[data]
source = "python"
tokenizer = "train"
vocab_size = 2048
seq_len = 256
[train]
steps = 4
global_batch_size = 2
micro_batch_size = 2
evaluate_every = 0
evaluate_rows = 2
[plan]
parallel.zero = 3
precision.param_dtype = "fp32"
memory.recompute = ["block"]
""")
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--limit", type=float, default=1.0, help="limit of the third run, GB")
    arguments = parser.parse_args()
    print(detect().name)
    os.environ |= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        folder = Path(scratch)
        job = write_job(folder, arguments.hidden, arguments.layers)
        runs = {
            "in memory": (None, {}),
            "on disk, no limit": (None, ON_DISK),
            f"on disk, limit of {arguments.limit} GB": (int(arguments.limit * 1e9), ON_DISK),
        }
        print("| | memory, GB | s a step | ratio | bits |\n|---|---|---|---|---|")
        first = 0.0, [0.0], b""
        for index, (name, (limit, memory)) in enumerate(runs.items()):
            out = folder / str(index)
            seconds, peak, losses = train(out, job, limit, memory)
            weights = (out / "export" / "model.safetensors").read_bytes()
            if not index:
                first = seconds, losses, weights
            same = "same" if (losses, weights) == first[1:] else "OTHER"
            print(f"| {name} | {peak / 1e9:.2f} | {seconds:.2f} | {seconds / first[0]:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
