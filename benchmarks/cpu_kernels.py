"""Attention by documents, the loss inside of the head and compiled blocks, on one CPU core: step time and peak activations.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py            # about twenty minutes
    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py --quick    # small models, half a minute

Each system trains the same packed rows, documents of about 300 tokens, in turn. Times are CPU seconds of the process, so that
other programs on the machine change them little. Ratios are of steps side by side, median (smallest to largest).
Activations are the live bytes at the peak of a step, counted by storage; not of compiled code, whose tensors are not seen. The
first step of compiled blocks is timed by the clock, once without and once with torch's cache of compiled code.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu.systems import System, random_batch, weft_trainer

from weft.device.detect import detect
from weft.launch.rank_entry import connect
from weft.memory.live_bytes import LiveBytes
from weft.plan import Compute, Kernels, Parallel, Plan, Precision

LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {  # configuration, rows, tokens a row
    "recipe: 8 layers of 256, 4,096 tokens of vocabulary": (
        {
            **LLAMA,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "vocab_size": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
        2,
        2048,
    ),
    "SmolLM2-135M, 10 of 30 layers": (
        {
            **LLAMA,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 10,
            "vocab_size": 49152,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
        1,
        2048,
    ),
}
COMPILED = "both, compiled blocks"
SYSTEMS = {
    "masks, logits": Compute(kernels=Kernels(linear_cross_entropy="reference"), attention="sdpa"),
    "loss in the head": Compute(attention="sdpa"),
    "attention by documents": Compute(kernels=Kernels(linear_cross_entropy="reference")),
    "both": Compute(),
    COMPILED: Compute(compile="blocks"),
}


def measure(config: dict[str, Any], rows: int, seq_len: int, dtype: Any, repeats: int) -> dict[str, Any]:
    """CPU seconds of each step by system, the same step of all systems one after the other; and peak activations."""
    cpu = torch.device("cpu")
    systems: dict[str, System] = {}
    peaks: dict[str, int] = {}
    batches = [random_batch(config["vocab_size"], rows, seq_len, cpu, seed, 300) for seed in range(repeats)]
    for name, compute in SYSTEMS.items():
        plan = Plan(parallel=Parallel(zero=3), precision=Precision(param_dtype=dtype), compute=compute)
        systems[name] = system = weft_trainer(config, plan, cpu)
        begin = time.perf_counter()
        system.step([batches[0]])
        if name == COMPILED:
            first = time.perf_counter() - begin
            torch._dynamo.reset()
            begin = time.perf_counter()
            weft_trainer(config, plan, cpu).step([batches[0]])
            print(
                f"first step compiled in {first:.0f} s, with the cache in {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            system.step([batches[0]])
            continue
        with LiveBytes() as live:
            system.optimizer.track(live)
            system.step([batches[0]])
        peaks[name] = live.at_peak.get("activations", 0)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for batch in batches:
        for name, system in systems.items():
            begin = time.process_time()
            system.step([batch])
            seconds[name].append(time.process_time() - begin)
    return {"seconds": seconds, "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    device = detect()
    connect(device)
    print(f"{device.instruction_set}, {torch.get_num_threads()} thread\n")
    print("| model | dtype | system | tokens/s | speed-up | activations, MiB |\n|---|---|---|---|---|---|")
    for title, (config, rows, seq_len) in MODELS.items():
        for dtype in ("fp32", "bf16") if device.supports("bf16") else ("fp32",):
            layers = 2 if quick else config["num_hidden_layers"]
            own = {**config, "num_hidden_layers": layers}
            found = measure(own, rows, 512 if quick else seq_len, dtype, 2 if quick else 3)
            tokens = rows * (512 if quick else seq_len)
            first = next(iter(found["seconds"].values()))
            for name, seconds in found["seconds"].items():
                ratios = [a / b for a, b in zip(first, seconds, strict=True)]
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                rate = tokens / statistics.median(seconds)
                peak = f"{found['peaks'][name] / 2**20:.0f}" if name in found["peaks"] else ""
                print(f"| {title} | {dtype} | {name} | {rate:.0f} | {spread} | {peak} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
