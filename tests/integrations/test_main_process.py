"""Scripts whose main process evaluates and saves alone: the same results as in one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from tests.integrations.scripts_in_pool import plain, under
from tests.integrations.test_trainer import BATCH, assert_same_weights, plan_of
from tests.lab.pool import RankError, run_ranks
from weft.errors import WeftError
from weft.integrations.accelerator import WeftAccelerator
from weft.plan import Plan


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("saves_alone.py", folder, BATCH, "evaluate")
    return folder


def assert_same_results(found: Path, expected: Path) -> None:
    now, then = (json.loads((folder / "result.json").read_text()) for folder in (found, expected))
    assert now["losses"] == pytest.approx(then["losses"][-len(now["losses"]) :], rel=1e-5)
    assert now["held_out"] == pytest.approx(then["held_out"][-len(now["held_out"]) or 6 :], rel=1e-5)
    assert_same_weights(found / "final", expected / "final")


@pytest.mark.parametrize("layout", ["zero 0", "zero 2", "zero 3", "tp2", "cp2"])
def test_the_main_process_saves_alone(layout: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    evaluate = ["evaluate"] if layout.startswith("zero") else []
    under(plan, ranks, "saves_alone.py", tmp_path, batch, *evaluate)
    assert_same_results(tmp_path, reference)
    ranks, plan, batch = plan_of("zero 2")
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "state", resumed / "state")
    under(plan, ranks, "saves_alone.py", resumed, batch, "evaluate", "resume")
    assert_same_results(resumed, reference)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_forward_on_the_main_process_alone_is_refused_under_tp_and_cp(layout: str, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    with pytest.raises(RankError, match=rf"on rank 0 alone, with plan\.parallel\.{layout[:2]} = 2"):
        under(plan, ranks, "saves_alone.py", tmp_path, batch, "evaluate")


def different_calls(rank: int, ranks: int) -> str:
    try:
        accelerator = WeftAccelerator(cpu=True, plan=Plan())
        accelerator.prepare_model(torch.nn.Linear(2, 2))
        if rank == 0:
            accelerator.wait_for_everyone()
        else:
            accelerator.gather(torch.ones(1))
    except WeftError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return "nothing"


def test_different_calls_are_refused() -> None:
    assert "rank 1 calls gather, and rank 0 calls wait_for_everyone" in run_ranks(2, different_calls)[1]
