"""Measurements on one accelerator: parity with the CPU, kernels, speed beside other systems, memory, killed runs.

    python benchmarks/gpu/day.py                       # all stages, a quarter of an hour on an H100
    python benchmarks/gpu/day.py --stages parity,waits
    python benchmarks/gpu/day.py --small               # every stage with small models, also without an accelerator

Each stage prints a Markdown table as soon as it is done, and its rows are added to the JSON file of --out. A stage that fails
prints its error, and the next one starts. A stage is not started when fewer than 30 of --seconds are left.

MFU = tokens/s x (6 N + 6 layers seq_len width) / published peak FLOP/s. N is the number of parameters of matmuls (the tied head
counts, the embedding does not), the second term is causal attention over whole rows; see src/weft/anatomy/flops.py. Packed rows
need less attention, which is not taken off.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import Bench, Rows, markdown
from kernel_stages import attention, ceilings, fp8_casts, fp8_grouped, kernels, matmuls, ring, updates
from run_stages import killed_run, memory, predict_memory, snapshot
from step_stages import compiled, experts, fp8, fp8_experts, fp8_losses, parity, profile, profile_experts, speed, waits

from weft.device.detect import detect
from weft.launch.rank_entry import connect

STAGES: dict[str, Callable[[Bench], Rows]] = {
    stage.__name__: stage
    for stage in (
        ceilings,
        parity,
        waits,
        kernels,
        updates,
        attention,
        ring,
        matmuls,
        fp8_casts,
        fp8_grouped,
        killed_run,
        memory,
        snapshot,
        profile,
        profile_experts,
        experts,
        compiled,
        fp8,
        fp8_experts,
        fp8_losses,
        speed,
    )
}
"""In this order: the last system of `speed` patches Transformers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    device = detect()
    if device.type == "cpu" and not arguments.small:
        raise SystemExit("no accelerator found; --small runs every stage on the CPU")
    predicted = predict_memory(device.type, arguments.small) if "memory" in arguments.stages.split(",") else {}
    _, _, local_rank = connect(device)
    bench = Bench(device, device.torch_device(local_rank), arguments.small, predicted)
    print(f"{device.name}, torch {torch.__version__}", flush=True)
    results: dict[str, Any] = {"device": device.name, "torch": torch.__version__}
    failed = []
    for name in arguments.stages.split(","):
        if arguments.seconds - (time.perf_counter() - began) < 30:
            print(f"\n## {name}: no time left", flush=True)
            continue
        start = time.perf_counter()
        try:
            results[name] = STAGES[name](bench)
            text = markdown(results[name])
        except Exception:  # the next stages still run
            text = results[name] = traceback.format_exc(limit=-6)
            failed.append(name)
        print(f"\n## {name} ({time.perf_counter() - start:.0f} s)\n\n{text}", flush=True)
        bench.free()
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()
    raise SystemExit(f"stages failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
