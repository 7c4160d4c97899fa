"""Loops of Lightning Fabric under a plan: losses, norms and weights of one process."""

import json
from pathlib import Path

import pytest
import torch

from tests.integrations.scripts_in_pool import plain, under
from tests.integrations.test_trainer import BATCH, LAYOUTS, plan_of

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_equals_one_process(layout: str, reference: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(None, ranks, "fabric_loop.py", tmp_path, batch, plan.model_dump_json())
    assert_same_results(tmp_path, reference)
    assert json.loads((tmp_path / "result.json").read_text())["gathered"] == BATCH // batch


def test_a_loop_resumes_under_another_plan(reference: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    for layout, folder, resume in (("zero 3", tmp_path, []), ("tp2", tmp_path / "again", [tmp_path / "state"])):
        ranks, plan, batch = plan_of(layout)
        under(None, ranks, "fabric_loop.py", folder, batch, plan.model_dump_json(), *resume)
        assert_same_results(folder, reference)
