"""Training on a stand-in for an NPU, whose collectives send no float64 and which has no grouped matmul."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import npu
from tests.lab.pool import DEVICE_VARIABLE
from weft.launch.store import STORE_VARIABLE, StoreServer

RANKS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two ranks, in processes of their own: the stand-in changes the global state of torch."""
    path = tmp_path_factory.mktemp("npu") / "store"
    common = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        STORE_VARIABLE: str(path),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "tests.lab.npu_rank"]
    with StoreServer(path):
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], env=common, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.must("parity: ranks of an NPU")
def test_an_npu_is_detected_with_gloo_beside_hccl(results: dict[str, Any]) -> None:
    assert results["device"] == ["npu", "cpu:gloo,npu:hccl", 1]


def test_axes_of_one_rank_exist_on_an_npu(results: dict[str, Any]) -> None:
    assert results["axis of one rank"] == [1.0, 1.0]


def test_float64_is_reduced_without_loss_by_collectives_without_float64(results: dict[str, Any]) -> None:
    tiny = 2.0**-40
    sums, maxima = [2 + 3 * tiny, -(2.0**61) - 1024, 3.0], [1 + 2 * tiny, -(2.0**60), 3.0]
    norm = ((3 * 2.0**2 + 3 * 3.0**2) / RANKS) ** 0.5  # copies of a gradient count once
    for where in ("device", "host"):
        *found, found_norm = results[f"float64 on the {where}"]
        assert found == [sums, maxima, sums[0]]
        assert found_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(
    "layout", ["data parallel", "ZeRO 3", "tensor parallel", "expert parallel", "context parallel", "pipeline"]
)
def test_training_on_an_npu_equals_the_untouched_model(layout: str, results: dict[str, Any]) -> None:
    found, expected = results[layout]
    assert found == pytest.approx(expected, rel=1e-5)


SUITES = {
    "parallel/test_axes.py": "",
    "parallel/test_context.py": "",
    "parallel/test_expert.py": "",
    "parallel/test_fsdp.py": "not fp64 and not do_not_divide",
    "parallel/test_hot_experts.py": "parity_of_models",
    "parallel/test_joint.py": "",
    "parallel/test_overlap.py": "families or techniques",
    "parallel/pipeline/test_pipeline.py": "not float64",
    "memory/test_pairs.py": "",
}
"""Files with tests of parity, and which of their tests: HCCL reduces no float64, and live bytes are counted on a CPU."""


@pytest.mark.skipif(not npu.HAS_COMPILER, reason="compiles a device guard with g++")
@pytest.mark.parametrize("file", SUITES)
def test_parity_on_ranks_with_npu_tensors(file: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/{file}"]
    environment = os.environ | {DEVICE_VARIABLE: "npu"}
    done = subprocess.run([*command, "-k", SUITES[file]], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("layout", ["data parallel", "context parallel"])
def test_documents_are_computed_by_the_operator_of_the_npu(layout: str, results: dict[str, Any]) -> None:
    calls = results[f"{layout}: calls"]
    assert calls["forward"] > calls["backward"] > 0  # the evaluation has no backward
