"""Manifests with a correct digest and invalid content."""

import os
from pathlib import Path
from typing import Any

import pytest

from weft.checkpoint import manifest as manifest_module
from weft.checkpoint.manifest import NAME, Manifest, Position, read_manifest, write_manifest
from weft.errors import CheckpointError
from weft.precision.scaling import LossScale


def write(folder: Path, step: int = 3, **position: Any) -> Path:
    """Write a manifest with a correct digest."""
    folder.mkdir()
    facts = {"next_batch": step, "loss_scale": LossScale(), **position}
    versions = {"weft-train": "0"}
    made = Manifest(
        position=Position(step=step, **facts), world_size=1, job={}, versions=versions, files={}, tensors={}
    )
    write_manifest(made, folder)
    return folder


@pytest.mark.must("format: checkpoint, manifest.json and shards")
def test_a_valid_manifest_is_read(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path / "step-00000003")).position.step == 3
    assert read_manifest(write(tmp_path / "converted")).position.step == 3  # a folder without a step in its name


def test_a_step_that_differs_from_the_folder_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its step is 3, but its folder is named after step 4"):
        read_manifest(write(tmp_path / "step-00000004"))


@pytest.mark.parametrize("scale", [float("inf"), 0.0, -1.0])
def test_an_invalid_loss_scale_is_refused(scale: float, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the manifest is refused: "):
        read_manifest(write(tmp_path / "step-00000003", loss_scale=LossScale(scale)))


def test_links_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000003")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointError, match="its folder is a link"):
        read_manifest(tmp_path / "link")
    (folder / NAME).rename(tmp_path / "elsewhere")
    (folder / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="it cannot be read: Too many levels of symbolic links"):
        read_manifest(folder)


def test_a_fifo_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_manifest(tmp_path)


def test_a_manifest_above_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(manifest_module.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointError, match="are allowed"):
        read_manifest(tmp_path)
