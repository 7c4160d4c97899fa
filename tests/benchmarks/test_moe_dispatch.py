"""The benchmark of dispatch runs, with every form of Weft and every installed system beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "moe_dispatch.py"


@pytest.mark.timeout(300)
def test_all_systems_have_the_results_of_one_process() -> None:
    """The script ends with an error where an output or a gradient differs."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    names = {line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")}
    assert {"plain", "weights at home", "one gather back", "operator", "Weft"} <= names
    assert {"Transformers, one process", "Transformers, expert parallelism"} <= names
    for system in ("torchtitan's dispatcher", "Megatron-Core's dispatcher"):
        assert system in names or f"{system}: not installed" in done.stdout
