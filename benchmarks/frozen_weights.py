"""Frozen weights in 4 bits beside whole ones under LoRA: bytes of a rank and seconds of a step of `weft train`.

    python benchmarks/frozen_weights.py [--layers 8] [--hidden 1024] [--repeats 3]

The runs of a row alternate; a run has 10 steps, of which the median counts from the fourth on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from on_disk import write_job

from weft.device.detect import detect

STEPS, FIRST = 10, 3
LAYOUTS = {"one rank": (1, 0), "two ranks, zero 2": (2, 2), "two ranks, zero 3": (2, 3)}


def train(out: Path, job: Path, ranks: int, zero: int, frozen: str) -> tuple[float, int]:
    """Run `weft train`; seconds of a step, and bytes of the parameters of rank 0 between steps."""
    settings = {
        "train.steps": STEPS,
        "adapter.kind": "lora",
        "plan.parallel.zero": zero,
        "plan.memory.recompute": "[]",
        "plan.precision.frozen_weights": frozen,
    }
    command = [sys.executable, "-m", "weft", "train", str(job), f"--nproc-per-node={ranks}", "--out", str(out)]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    memory = json.loads((out / "run.json").read_text())["memory"]["measured"]
    return statistics.median(row["step_seconds"] for row in rows[FIRST:]), memory["parameters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(detect().name, detect().instruction_set)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        folder = Path(scratch)
        job = write_job(folder, arguments.hidden, arguments.layers)
        print(
            "| | MB of parameters, whole | nf4 | s a step, whole | nf4 | ratio (least to most) |\n|---|---|---|---|---|---|"
        )
        for name, (ranks, zero) in LAYOUTS.items():
            found: dict[str, list[tuple[float, int]]] = {"whole": [], "nf4": []}
            for repeat in range(arguments.repeats):
                for frozen, runs in found.items():
                    runs.append(train(folder / f"{ranks}-{zero}-{frozen}-{repeat}", job, ranks, zero, frozen))
            whole, packed = ([seconds for seconds, _ in runs] for runs in found.values())
            ratios = sorted(second / first for first, second in zip(whole, packed, strict=True))
            sizes = " | ".join(f"{runs[0][1] / 1e6:.1f}" for runs in found.values())
            times = " | ".join(f"{statistics.median(seconds):.2f}" for seconds in (whole, packed))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            print(f"| {name} | {sizes} | {times} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
