"""diffusers' training examples under a plan: losses, norms, images and weights of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.scripts_in_pool import plain, under
from tests.integrations.test_trainer import BATCH, plan_of
from tests.lab.pool import RankError, run_ranks

diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers, of the extra dev")
from tests.integrations.diffusers_models import MODELS, losses_and_norms  # noqa: E402

KINDS = {"unet": "UNet2DModel", "sd3": "SD3Transformer2DModel"}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of plain runs by kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        plain("diffusers_images.py", folder, BATCH, kind)
    return folders


def assert_same_results(found: Path, expected: Path, kind: str) -> None:
    now, then = (json.loads((folder / "result.json").read_text()) for folder in (found, expected))
    assert len(now["losses"]) == 6
    assert now["losses"] == pytest.approx(then["losses"], rel=1e-5)
    assert now["norms"] == pytest.approx(then["norms"], rel=1e-4)
    assert now["images"] == pytest.approx(then["images"], abs=1e-4)
    weights, saved = (
        getattr(diffusers, KINDS[kind]).from_pretrained(folder / "final").state_dict() for folder in (found, expected)
    )
    assert weights.keys() == saved.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.must("parity: script of Diffusers", case="sd3-zero 0")
@pytest.mark.parametrize("layout", ["zero 0", "zero 2", "zero 3"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unmodified_script_equals_one_process(
    kind: str, layout: str, references: dict[str, Path], tmp_path: Path
) -> None:
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "diffusers_images.py", tmp_path, batch, kind)
    assert_same_results(tmp_path, references[kind], kind)


@pytest.mark.parametrize("layout", ["zero 0", "zero 2", "zero 3"])
def test_the_main_process_samples_and_saves_alone(layout: str, references: dict[str, Path], tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "diffusers_images.py", tmp_path, batch, "unet", "alone")
    pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path / "final")
    pipeline.unet.save_pretrained(tmp_path / "final")
    assert_same_results(tmp_path, references["unet"], "unet")


@pytest.mark.parametrize("layout", ["zero 2", "zero 3"])
@pytest.mark.parametrize("kind", MODELS)
def test_other_models_equal_one_process(kind: str, layout: str) -> None:
    (expected,) = run_ranks(1, losses_and_norms, kind, None)
    for found in run_ranks(2, losses_and_norms, kind, plan_of(layout)[1]):
        assert found[::2] == pytest.approx(expected[::2], rel=1e-5)
        assert found[1::2] == pytest.approx(expected[1::2], rel=1e-4)


def test_averaged_weights_equal_one_process_under_zero_0(tmp_path: Path) -> None:
    (tmp_path / "weft").mkdir()
    plain("diffusers_images.py", tmp_path, BATCH, "unet", "ema")
    ranks, plan, batch = plan_of("zero 0")
    under(plan, ranks, "diffusers_images.py", tmp_path / "weft", batch, "unet", "ema")
    assert_same_results(tmp_path / "weft", tmp_path, "unet")


def test_averaged_weights_of_shards_are_refused_by_torch(tmp_path: Path) -> None:
    ranks, plan, batch = plan_of("zero 2")
    with pytest.raises(RankError, match=r"mixed torch\.Tensor and DTensor"):
        under(plan, ranks, "diffusers_images.py", tmp_path, batch, "unet", "ema")
