"""Training on a stand-in for an NPU, whose collectives send no float64 and which has no grouped matmul."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with StoreServer(path):
        ranks = [
            subprocess.Popen(command, cwd=root, env=common | {"RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
            for rank in range(RANKS)
        ]
        answers = [process.communicate(timeout=500) for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, answers[0][1] + answers[1][1]
    return json.loads(answers[0][0])


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


@pytest.mark.parametrize("layout", ["data parallel", "context parallel"])
def test_documents_are_computed_by_the_operator_of_the_npu(layout: str, results: dict[str, Any]) -> None:
    calls = results[f"{layout}: calls"]
    assert calls["forward"] > calls["backward"] > 0  # the evaluation has no backward
