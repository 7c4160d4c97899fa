"""The measurements for one accelerator run on the CPU too, with small models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DAY = Path(__file__).parents[2] / "benchmarks" / "gpu" / "day.py"


@pytest.mark.slow("every stage of a day on an accelerator")
@pytest.mark.timeout(600)
def test_every_stage_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(DAY), "--small", "--out", str(tmp_path / "day.json")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    stages = [line.removeprefix("## ").split(" ")[0] for line in done.stdout.splitlines() if line.startswith("## ")]
    assert {"parity", "kernels", "memory", "snapshot", "experts", "fp8", "fp8_casts", "fp8_experts", "speed"} <= set(
        stages
    )
    assert "no time left" not in done.stdout
