"""Loop of `weft train` beside its training step: share of the time of a step that `train_step` takes.

    python benchmarks/loop.py            # the default job on two ranks, two minutes
    python benchmarks/loop.py --set plan.parallel.zero=0 --set plan.compute.compile=blocks

Runs the command `weft train`. On rank 0 a callback times `train_step` inside of the loop, and each period from the end of a
step to that of the next: data, metrics, clocks and reductions of the loop are in the period alone. The ratio of both is the
speed of the loop relative to a bare `train_step`, which the other benchmarks time. The first measured steps of a process,
evaluations and checkpoints are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.device.detect import detect
from weft.training import measured_steps

FIRST_STEP = 6
RESULT = "loop.json"


class Clock:
    """Callback of a job that times the loop and its training steps."""

    def __init__(self, job: Any):
        self.inside = 0.0
        self.last = 0.0
        self.periods: list[tuple[float, float]] = []
        self.measured: list[float] = []
        step = measured_steps.train_step

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                self.inside = time.perf_counter() - start

        measured_steps.train_step = timed

    def on_step(self, metrics: Any) -> None:
        """Add the period of a step; the first one after an evaluation has no start."""
        now = time.perf_counter()
        if self.last and metrics.step >= FIRST_STEP:
            self.periods.append((self.inside, now - self.last))
        if metrics.step <= 2:
            self.measured.append(metrics.step_seconds)
        self.last = now

    def on_evaluation(self, evaluation: Any) -> None:
        """Leave out the period that an evaluation is in."""
        self.last = 0.0

    def on_end(self, folder: Path) -> None:
        """Write periods and measured steps beside the export."""
        (folder / RESULT).write_text(json.dumps([self.periods, self.measured]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], help="key=value of the job, as of weft train")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.steps={options.steps}", f'train.callbacks=["{Path(__file__).stem}:Clock"]', *options.set]
        command = [str(Path(sys.executable).with_name("weft")), "train", "--out", f"{folder}/run"]
        command += ["--nproc-per-node", str(options.ranks), *(f"--set={setting}" for setting in settings)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        periods, measured = json.loads(Path(folder, "run", RESULT).read_text())
    ratios = [inside / period for inside, period in periods]
    low, _, high = statistics.quantiles(ratios, n=4)
    total = sum(inside for inside, _ in periods) / sum(period for _, period in periods)
    print(
        f"{detect().instruction_set}, {options.ranks} ranks, {len(ratios)} steps, {' '.join(options.set) or 'default job'}"
    )
    print(f"loop / train_step: {total:.3f}; by step {statistics.median(ratios):.3f} (quartiles {low:.3f}-{high:.3f})")
    print(f"median step {statistics.median(period for _, period in periods) * 1e3:.1f} ms")
    print(f"measured steps 1 and 2: {', '.join(f'{seconds * 1e3:.1f} ms' for seconds in measured)}")


if __name__ == "__main__":
    main()
