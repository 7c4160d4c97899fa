"""Training speed of two checkouts of Weft, in turns: seconds of a step, and memory of a rank.

    git worktree add /tmp/before v0.1 && python benchmarks/against.py /tmp/before
    python benchmarks/against.py /tmp/before --job job.toml --set train.steps=100 --pairs 5

The command `weft train` runs in a process of its own, from the sources of a checkout and with the installed packages. The first
steps of a run are left out. Ratios are those of neighbouring runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.device.detect import detect

FIRST_STEP = 11
HERE = Path(__file__).parents[1]


def run(checkout: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Train from a checkout: median seconds of a step, and peak MiB of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "weft",
            "train",
            *([options.job] if options.job else []),
            "--out",
            f"{folder}/run",
        ]
        command += [f"--set={each}" for each in ("train.steps=100", "train.evaluate_rows=8", *options.set)]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(step["step_seconds"] for step in steps[FIRST_STEP - 1 :])
    return seconds, steps[-1]["peak_memory_bytes"] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout of Weft")
    parser.add_argument("--job", help="job file; default: the first run")
    parser.add_argument("--set", action="append", default=[], help="key=value of the job, as of weft train")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    pairs = [(run(options.before, options), run(HERE, options)) for _ in range(options.pairs)]
    print(f"{detect().instruction_set}, {' '.join([options.job or 'the first run', *options.set])}")
    print("| before, ms a step | here | before / here | before, MiB a rank | here |\n|---|---|---|---|---|")
    for (seconds, memory), (own, own_memory) in pairs:
        print(f"| {seconds * 1e3:.0f} | {own * 1e3:.0f} | {seconds / own:.2f} | {memory:.0f} | {own_memory:.0f} |")
    print(f"median ratio {statistics.median(before[0] / own[0] for before, own in pairs):.2f}")


if __name__ == "__main__":
    main()
