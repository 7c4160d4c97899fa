"""Training on a stand-in for an NPU, whose collectives send no float64 and which has no grouped matmul."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import npu
from tests.lab.npu_rank import LAYOUTS
from tests.lab.pool import DEVICE_VARIABLE
from weft.launch.store import STORE_VARIABLE, StoreServer

RANKS = 2


def results_of(folder: Path, *layouts: str) -> dict[str, Any]:
    """Results of two ranks, in processes of their own: the stand-in changes the global state of torch."""
    path = folder / "store"
    variables = {"GLOO_SOCKET_IFNAME": "lo", STORE_VARIABLE: str(path), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "tests.lab.npu_rank", *layouts]
    root = Path(__file__).parents[2]
    with StoreServer(path):
        done = subprocess.run(
            command, cwd=root, env=os.environ | variables, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for layout in layouts:
        found, expected = results[layout]
        assert found == pytest.approx(expected, rel=1e-5), layout
    return results


@pytest.mark.must("parity: ranks of an NPU")
def test_ranks_of_an_npu_reduce_and_train_as_the_untouched_model(tmp_path: Path) -> None:
    """Gloo is beside HCCL, an axis may have one rank, and collectives without float64 reduce it without loss."""
    results = results_of(tmp_path, "data parallel")
    assert results["device"] == ["npu", "cpu:gloo,npu:hccl", 1]
    assert results["axis of one rank"] == [1.0, 1.0]
    tiny = 2.0**-40
    sums, maxima = [2 + 3 * tiny, -(2.0**61) - 1024, 3.0], [1 + 2 * tiny, -(2.0**60), 3.0]
    norm = ((3 * 2.0**2 + 3 * 3.0**2) / RANKS) ** 0.5  # copies of a gradient count once
    for where in ("device", "host"):
        *found, found_norm = results[f"float64 on the {where}"]
        assert found == [sums, maxima, sums[0]]
        assert found_norm == pytest.approx(norm, rel=1e-6)
    assert_documents_are_computed_by_the_operator_of_the_npu(results["data parallel: calls"])


def test_training_in_every_layout_equals_the_untouched_model(tmp_path: Path) -> None:
    others = [name for name in LAYOUTS if name != "data parallel"]
    results = results_of(tmp_path, *others)
    assert_documents_are_computed_by_the_operator_of_the_npu(results["context parallel: calls"])


def assert_documents_are_computed_by_the_operator_of_the_npu(calls: dict[str, int]) -> None:
    assert calls["forward"] > calls["backward"] > 0  # the evaluation has no backward


SUITES = {
    "parallel/test_axes.py": "",
    "parallel/test_context.py": "",
    "parallel/test_expert.py": "",
    "parallel/test_fsdp.py": "not do_not_divide",
    "parallel/test_hot_experts.py": "parity_of_models",
    "parallel/test_joint.py": "",
    "parallel/test_overlap.py": "(families or techniques)",
    "parallel/pipeline/test_pipeline.py": "",
    "memory/test_pairs.py": "",
}
"""Files with tests of parity, and which of their tests."""
NOT_ON_NPU = "not float64 and not fp64"  # HCCL reduces neither


SUITE_SECONDS = 10
"""Recorded seconds of the tests of a file, which take several times as long on the stand-in."""


@pytest.mark.skipif(not npu.HAS_COMPILER, reason="compiles a device guard with g++")
@pytest.mark.parametrize("file", SUITES)
def test_parity_on_ranks_with_npu_tensors(file: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["--budget", str(SUITE_SECONDS)]
    environment = os.environ | {DEVICE_VARIABLE: "npu"}
    chosen = " and ".join(filter(None, (NOT_ON_NPU, SUITES[file])))
    done = subprocess.run([*command, "-k", chosen], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
