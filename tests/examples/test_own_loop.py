"""The loop that users copy: it runs alone and under torchrun, learns, and does not depend on the number of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "own_loop.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"]


def losses(*launcher: str) -> list[float]:
    """The losses that the script prints."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # two ranks need two of them, or none
    argv = [sys.executable, *launcher, str(SCRIPT)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step")]


def test_learns_the_same_on_one_and_two_ranks() -> None:
    alone = losses()
    assert len(alone) == 20
    assert alone == sorted(set(alone), reverse=True)  # each is below the one before
    assert losses(*TORCHRUN) == pytest.approx(alone, abs=2e-4)  # two ranks print what one rank prints, but for rounding
