"""Weft on one accelerator: parity with the CPU, and speed and memory beside plain Transformers.

    python benchmarks/gpu/foundation.py            # about five minutes on an H100

Part 1 trains a tiny Llama and a tiny Qwen3-MoE for three steps on the accelerator and on the CPU, in float32 without TF32, and
prints the differences of losses and weights. Part 2 trains a Llama of 1.2 billion parameters (the shape of Llama-3.2-1B) at
sequence length 4096 in bf16, in turn with Weft and the plain model, and prints tokens/s, MFU and peak memory, with the spread
over the repeats.

MFU = tokens/s x (6 N + 6 layers seq_len width) / peak FLOP/s. N is the number of parameters of matmuls (the tied head counts,
the embedding does not), the second term is causal attention; see src/weft/anatomy/flops.py.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.anatomy.build import build_on_meta
from weft.anatomy.flops import training_flops_per_token
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_plain, gather_weights, materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.device.device import Device
from weft.job import Model, Optimizer
from weft.launch.rank_entry import connect
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {
    "llama": {"model_type": "llama", **SMALL, **HEADS},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **HEADS, "num_experts": 8, "moe_intermediate_size": 64},
}
LLAMA_1B = {
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
}
SETTINGS = Optimizer(lr=1e-4, eps=1e-6)
Step = Callable[[MicroBatch], float]


def random_batch(vocab_size: int, rows: int, seq_len: int, torch_device: torch.device, seed: int) -> MicroBatch:
    tokens = torch.randint(vocab_size, (rows, seq_len + 1), generator=torch.Generator().manual_seed(seed)).to(
        torch_device
    )
    positions = torch.arange(seq_len, device=torch_device).repeat(rows, 1)
    return MicroBatch(tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous())


def weft_trainer(source: Model, precision: Precision, torch_device: torch.device) -> tuple[Step, Any]:
    """Training step of Weft on one rank, and the model."""
    plan = Plan(precision=precision).resolve(1)
    mesh = build_mesh(plan, torch_device.type, 1)
    model = build_on_meta(read_config(source), DTYPES[precision.update])
    parallelize(model, plan, mesh)
    materialize(model, source, torch_device)
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())

    def step(batch: MicroBatch) -> float:
        return train_step(model, optimizer, [batch], SETTINGS.clip_norm).loss

    return step, model


def plain_trainer(source: Model, weights: torch.dtype, autocast: bool, torch_device: torch.device) -> tuple[Step, Any]:
    """Training step of plain Transformers, and the model: SDPA, the model's own loss, fused AdamW, clipping."""
    model = build_plain(source, read_config(source), weights).to(torch_device)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True
    )

    def step(batch: MicroBatch) -> float:
        with torch.autocast(torch_device.type, torch.bfloat16, enabled=autocast):
            loss = model(
                input_ids=batch.input_ids, labels=batch.input_ids, shift_labels=batch.targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, model


def parity(device: Device, torch_device: torch.device) -> None:
    """Part 1: compare three steps on both devices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{'model':10} {'loss':>10} {'weights':>10}   largest difference to the CPU, relative")
    for name, config in TINY.items():
        results = []
        for where in (torch.device("cpu"), torch_device):
            step, model = weft_trainer(Model(config=config), Precision(param_dtype="fp32"), where)
            losses = torch.tensor([step(random_batch(512, 4, 64, where, seed)) for seed in range(3)])
            results.append((losses, gather_weights(model)))
        (losses, weights), (device_losses, device_weights) = results
        loss_error = ((device_losses - losses).abs() / losses).max().item()
        error = max(((device_weights[k].cpu() - w).abs().max() / w.abs().max()).item() for k, w in weights.items())
        print(f"{name:10} {loss_error:10.1e} {error:10.1e}")
        assert loss_error < 1e-5, "the accelerator's loss differs from the CPU's"


def speed(device: Device, torch_device: torch.device, rows: int, seq_len: int, repeats: int, steps: int) -> None:
    """Part 2: time a few steps of each system in turn, with only one system on the device."""
    source = Model(config=LLAMA_1B)
    config = read_config(source)
    flops = training_flops_per_token(read_anatomy(build_on_meta(config, torch.float32)), config, seq_len)
    peak = device.peak_flops(torch.bfloat16)
    systems: dict[str, Callable[[], tuple[Step, Any]]] = {
        "Weft, bf16 forward, fp32 update": lambda: weft_trainer(source, Precision(), torch_device),
        "plain, fp32 weights, bf16 autocast": lambda: plain_trainer(source, torch.float32, True, torch_device),
        "plain, bf16 weights and moments": lambda: plain_trainer(source, torch.bfloat16, False, torch_device),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    memory: dict[str, int] = {}
    batches = [random_batch(config.vocab_size, rows, seq_len, torch_device, seed) for seed in range(steps)]
    for _ in range(repeats):
        for name, make in systems.items():
            step, model = make()
            step(batches[0])
            step(batches[1])
            device.reset_peak_memory()
            device.synchronize()
            begin = time.perf_counter()
            for batch in batches:
                step(batch)
            device.synchronize()
            rates[name].append(rows * seq_len * steps / (time.perf_counter() - begin))
            memory[name] = device.peak_memory_bytes()
            del step, model
            torch.accelerator.empty_cache()
    first = next(iter(systems))
    print(f"\n{rows} x {seq_len} tokens a step, {steps} steps a repeat, {repeats} repeats, on {device.name}")
    print(f"{'system':36} {'tokens/s':>26} {'MFU':>6} {'peak GiB':>9} {'Weft / system':>20}")
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(rates[first], found, strict=True)]
        median = statistics.median(found)
        mfu = f"{flops * median / peak:6.1%}" if peak else "     -"
        spread = f"{median:10.0f} ({min(found):.0f}-{max(found):.0f})"
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        print(f"{name:36} {spread:>26} {mfu} {memory[name] / 2**30:9.2f} {ratio:>20}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    device = detect()
    if device.type == "cpu":
        raise SystemExit("no accelerator found; this benchmark needs one")
    _, _, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    parity(device, torch_device)
    speed(device, torch_device, arguments.rows, arguments.seq_len, arguments.repeats, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
