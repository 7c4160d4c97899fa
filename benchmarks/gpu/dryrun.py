"""Dry run on one accelerator: predicted and measured peak memory, with and without full recompute.

    python benchmarks/gpu/dryrun.py            # about three minutes on an H200

A Llama of 1.2 billion parameters (the shape of Llama-3.2-1B) and a Qwen3-MoE of 3.1 billion train for a few steps at sequence
length 4096 in bf16 with float32 updates, by ZeRO stages 0 and 3 on one rank. Before that, `weft.planner.dryrun.trace` predicts
the peak of each without the device. Measured is the largest number of bytes allocated during a step after the first, as the
caching allocator counts it: with its rounding, and with the workspaces of libraries, which a dry run does not know. Recompute
is that of Transformers, switched on by `model.config.gradient_checkpointing = true`.

Exit code 1 if a prediction is off by more than 5 %.
"""

import argparse
import gc
from typing import Any

import torch
import torch.distributed as dist

from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import materialize
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.device.device import Device
from weft.job import Job
from weft.launch.rank_entry import connect
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.planner.dryrun.trace import assumed_batches, trace
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

TOLERANCE = 0.05
MODELS: dict[str, dict[str, Any]] = {
    "Llama 1.2B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
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


def job_for(model: dict[str, Any], recompute: bool, zero: int, rows: int, seq_len: int) -> Job:
    """Job with one micro-batch per step and full rows."""
    return Job.parse(
        {
            "model": {"config": {**model, "gradient_checkpointing": recompute}},
            "data": {"source": "tokens", "seq_len": seq_len},
            "train": {"global_batch_size": rows, "micro_batch_size": rows},
            "plan": {"parallel": {"zero": zero}},
        }
    )


def measure(job: Job, device: Device, torch_device: torch.device, steps: int) -> int:
    """Largest number of bytes allocated during steps after the first."""
    plan = job.plan.resolve(1)
    mesh = build_mesh(plan, torch_device.type, 1)
    model = build_on_meta(read_config(job.model), DTYPES[plan.precision.update])
    parallelize(model, plan, mesh)
    materialize(model, job.model, torch_device)
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, job.optimizer), model, detect())
    batches = assumed_batches(job.model_copy(update={"plan": plan}), torch_device)
    for step in range(1 + steps):
        if step == 1:
            device.reset_peak_memory()
        train_step(model, optimizer, batches, job.optimizer.clip_norm)
    device.synchronize()
    return device.peak_memory_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    device = detect()
    if device.type == "cpu":
        raise SystemExit("no accelerator found; this benchmark needs one")
    jobs = {
        (name, zero, recompute): job_for(config, recompute, zero, arguments.rows, arguments.seq_len)
        for name, config in MODELS.items()
        for zero, recompute in ((0, False), (3, False), (3, True))
    }
    # Predictions run in separate processes, before this one uses the device.
    predictions = {key: trace(job, 1, [0], device.type)[0] for key, job in jobs.items()}
    _, _, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    print(f"{arguments.rows} x {arguments.seq_len} tokens a step, on {device.name}")
    print(
        f"{'model':16} {'zero':>4} {'recompute':>9} {'predicted GiB':>13} {'measured GiB':>12} {'off by':>7}  dry run"
    )
    worst = 0.0
    for (name, zero, recompute), job in jobs.items():
        found = predictions[name, zero, recompute]
        measured = measure(job, device, torch_device, arguments.steps)
        gc.collect()
        torch.accelerator.empty_cache()
        off = found.count.peak / measured - 1
        worst = max(worst, abs(off))
        sizes = f"{found.count.peak / 2**30:13.3f} {measured / 2**30:12.3f} {off:7.1%}"
        print(f"{name:16} {zero:4} {'full' if recompute else 'none':>9} {sizes}  {found.seconds:.1f} s")
    dist.destroy_process_group()
    raise SystemExit(1 if worst > TOLERANCE else 0)


if __name__ == "__main__":
    main()
