"""`weft train` with and without compiled blocks: steps per second, and compiled regions of a step.

    python benchmarks/compiled_run.py            # the default job, ten minutes on two cores

Runs of both kinds take turns. The figure of a run is its median step after the first ones, in which blocks are compiled.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.device.detect import detect

FIRST_STEP = 6


def run(folder: str, ranks: int, zero: int, compile: str, steps: int) -> list[dict[str, Any]]:
    """Train; return the metrics of the steps."""
    settings = {
        "train.steps": steps,
        "plan.parallel.zero": zero,
        "plan.compute.compile": compile,
        "train.evaluate_rows": 8,
    }
    command = [str(Path(sys.executable).with_name("weft")), "train", "--out", f"{folder}/run"]
    command += ["--nproc-per-node", str(ranks), *(f"--set={key}={value}" for key, value in settings.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{detect().instruction_set}; default job, {options.repeats} pairs of runs of {options.steps} steps")
    print("| ranks | zero | regions a step | first step, s | steps/s, off | steps/s, blocks | ratio |")
    print("|---|---|---|---|---|---|---|")
    for ranks in (1, 2):
        for zero in (0, 3):
            speeds: dict[str, list[float]] = {"off": [], "blocks": []}
            regions, first = set(), []
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(options.repeats):
                    for compile, found in speeds.items():
                        rows = run(folder, ranks, zero, compile, options.steps)
                        seconds = [row["step_seconds"] for row in rows if row["step"] >= FIRST_STEP]
                        found.append(1 / statistics.median(seconds))
                        if compile == "blocks":
                            regions |= {row["compiled_regions"] for row in rows}
                            first.append(rows[0]["step_seconds"])
            ratios = sorted(b / a for a, b in zip(speeds["off"], speeds["blocks"], strict=True))
            off, blocks = (statistics.median(speeds[kind]) for kind in speeds)
            print(
                f"| {ranks} | {zero} | {', '.join(map(str, sorted(regions)))} | {first[0]:.1f}, then {first[-1]:.1f} "
                f"| {off:.2f} | {blocks:.2f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
