"""Triton's interpreter: kernels run on CPU tensors, in a process of their own, because the choice is made at import."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
MARK = "errors: "
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(*checks: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """Run functions of a test module with Triton's interpreter; returns their results together."""
    calls = "; ".join(f"errors.update(module.{check.__name__}())" for check in checks)
    code = (
        f"import json, {checks[0].__module__} as module; errors = {{}}; {calls}; print({MARK!r} + json.dumps(errors))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    return json.loads(line.removeprefix(MARK))


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    assert result.shape == expected.shape
    assert bool(torch.isfinite(result).all())
    return float((result.double() - expected.double()).abs().max() / expected.abs().max().clamp_min(1e-30))


def assert_within(errors: dict[str, float]) -> None:
    """Check that all errors, relative to their tolerances, are below 1; the message has the largest ones."""
    worst = sorted(errors.items(), key=lambda entry: -entry[1])[:5]
    assert worst[0][1] < 1, worst
