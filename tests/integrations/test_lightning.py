"""Loops of Lightning Fabric under a plan: losses, norms and weights of one process."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from tests.integrations.scripts_in_pool import plain, under, variables_of
from tests.integrations.test_trainer import BATCH, LAYOUTS, plan_of
from tests.lab.pool import run_ranks
from weft.errors import WeftError

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric, of the extra dev")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("fabric_loop.py", folder, BATCH, "")
    return folder


def assert_same_results(found: Path, expected: Path) -> None:
    now, then = (json.loads((folder / "result.json").read_text()) for folder in (found, expected))
    assert len(now["losses"]) >= 4
    assert now["losses"] == pytest.approx(then["losses"][-len(now["losses"]) :], rel=1e-5)
    assert now["norms"] == pytest.approx(then["norms"][-len(now["norms"]) :], rel=1e-4)
    weights, saved = (torch.load(folder / "weights.pt")["model"] for folder in (found, expected))
    assert weights.keys() == saved.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.must("parity: script of Lightning", case="tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_equals_one_process(layout: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(None, ranks, "fabric_loop.py", tmp_path, batch, plan.model_dump_json())
    assert_same_results(tmp_path, reference)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["counts"] == [BATCH // batch] * 2
    assert result["decided"] == [True, False]


def test_a_loop_resumes_under_another_plan(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    for layout, folder, resume in (("zero 3", tmp_path, []), ("tp2", tmp_path / "again", [tmp_path / "state"])):
        ranks, plan, batch = plan_of(layout)
        under(None, ranks, "fabric_loop.py", folder, batch, plan.model_dump_json(), *resume)
        assert_same_results(folder, reference)


def refused(rank: int, ranks: int, what: str) -> str:
    from lightning_fabric import Fabric

    from weft.integrations.lightning import WeftStrategy

    settings: dict[str, Any] = {"precision": "bf16-mixed"} if what == "precision" else {}
    try:
        with mock.patch.dict(os.environ, variables_of(rank, ranks)):
            fabric = Fabric(
                accelerator="cpu", devices=2 * ranks if what == "ranks" else ranks, strategy=WeftStrategy(), **settings
            )
            fabric.launch()
        model = torch.nn.Linear(2, 2)
        if what == "optimizer":
            fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        if what == "reduction":
            fabric.all_reduce(torch.ones(1), reduce_op="max")
        fabric.load("nothing", {})
    except WeftError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return "nothing"


@pytest.mark.must("refusal: script of Lightning")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("precision", "Fabric(precision='bf16-mixed') with WeftStrategy"),
        ("ranks", "2 ranks have joined, and Fabric has 4"),
        ("optimizer", "fabric.setup_optimizers with WeftStrategy"),
        ("reduction", "fabric.all_reduce with reduce_op = max"),
        ("checkpoint", "a checkpoint without the training state of Weft"),
    ],
)
def test_what_would_be_wrong_is_refused(what: str, said: str) -> None:
    assert all(said in text for text in run_ranks(2, refused, what))
