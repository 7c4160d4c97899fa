"""Calibration of one accelerator, and the error of its predictions for twelve jobs.

    python benchmarks/gpu/calibrate.py
    python benchmarks/gpu/calibrate.py --small    # the same jobs with small models, also without an accelerator

A dense Llama and a Qwen3-MoE are trained for a few steps each, with short and long rows, few and many rows, and with memory
options. Seconds of a step are predicted twice, by formula and from operators timed on the device, and bytes by a dry run.
Measured are the median of the steps without the first two, and the peak of the allocator (without an accelerator: the memory
of the process, which is not scored).

Exit code 1 if predictions from operators are off by more than 10 % in the mean, or bytes by more than 5 %.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from systems import LLAMA_1B

from weft.device.detect import detect
from weft.job import Job
from weft.observe.prediction import WARM_UP
from weft.observe.record import read_run
from weft.planner.calibrate.calibrate import calibrate, formula
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.dryrun.trace import trace_stages
from weft.planner.train import train

MODELS: dict[str, dict[str, Any]] = {
    "Llama 1.2B": LLAMA_1B,
    "Qwen3-MoE 3.1B": {
        "model_type": "qwen3_moe",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 48,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
STEPS, SEQ_LEN = 8, 4096
SECONDS_OFF, BYTES_OFF = 0.10, 0.05
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
}
SMALL_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1 row": (1, 1, {}),
    "2 rows": (1, 2, {}),
    "4 half rows": (2, 4, {}),
    "2 rows, activation and norm recomputed": (1, 2, {"memory": {"recompute": ["activation", "norm"]}}),
    "2 rows, blocks recomputed": (1, 2, {"memory": {"recompute": ["block"]}}),
    "2 rows, split weights": (1, 2, {"precision": {"weights": "split"}}),
}
COLUMNS = ("by formula, s", "by operators, s", "measured, s", "predicted GiB", "measured GiB", "error")


def jobs(small: bool, folder: Path) -> dict[str, Job]:
    """Jobs of all models and plans, with two micro-batches per step."""
    found = {}
    seq_len = 256 if small else SEQ_LEN
    for model, full in MODELS.items():
        config = {**full, "num_hidden_layers": 2 if small else 8}
        if small:
            config |= SMALL | (SMALL_EXPERTS if "num_experts" in config else {})
        for name, (shorter, rows, plan) in PLANS.items():
            found[f"{model}, {name}"] = Job.parse(
                {
                    "model": {"config": config},
                    "data": {"source": "python", "vocab_size": 2048, "seq_len": seq_len // shorter, "packing": False},
                    "train": {
                        "steps": STEPS,
                        "global_batch_size": 2 * rows,
                        "micro_batch_size": rows,
                        "evaluate_every": 0,
                        "evaluate_rows": 2,
                    },
                    "plan": plan,
                    "optimizer": {"lr": 1e-5},
                    "out": str(folder / f"run-{len(found)}"),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    machine, missed = calibrate(1)
    print(f"matmul error {missed:.0%}:\n{machine.to_toml()}", flush=True)
    cluster = machine.cluster()
    table = Table("job", *(Column(name, justify="right") for name in COLUMNS))
    seconds_off, bytes_off = [], []
    with tempfile.TemporaryDirectory() as name:
        for title, job in jobs(small, Path(name)).items():
            by_formula = formula(job, 1, cluster)
            traces = trace_stages(job, 1, detect().type)
            by_operators = time_step(job, traces, cluster, by_formula).seconds * machine.operators_scalar
            rows = read_run(train(job, ranks=1, log=lambda line: None)).rows[WARM_UP:]
            measured = statistics.median(row.step_seconds for row in rows)
            peak, held = traces[0].count.peak, max(row.peak_memory_bytes for row in rows)
            seconds_off.append(abs(by_operators / measured - 1))
            bytes_off.append(abs(peak / held - 1))
            seconds = (by_formula.seconds * machine.scalar, by_operators, measured)
            cells = (*(f"{value:.3f}" for value in seconds), f"{peak / 2**30:.2f}", f"{held / 2**30:.2f}")
            table.add_row(title, *cells, f"{by_operators / measured - 1:+.1%}, {peak / held - 1:+.1%}")
    Console(width=170).print(table)
    time, memory = statistics.mean(seconds_off), statistics.mean(bytes_off)
    print(f"mean error: {time:.1%} in seconds, {memory:.1%} in bytes")
    bytes_count = torch.accelerator.is_available()
    raise SystemExit(1 if time > SECONDS_OFF or (bytes_count and memory > BYTES_OFF) else 0)


if __name__ == "__main__":
    main()
