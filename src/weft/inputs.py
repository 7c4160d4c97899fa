"""Files and folders that a command reads, checked before it imports torch."""

import glob
import os
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

from weft.errors import CheckpointError, DataError, refuse_hub_id
from weft.job import Data

FOLDER_PATTERNS = {
    "text": "*",
    "jsonl": "*.jsonl",
    "parquet": "*.parquet",
    "datasets": "data-*.arrow",
    "tokens": "*.npy",
}
EXPORTED = ("config.json", "adapter_config.json")
"""Configurations of exported weights, one of which an export has."""
ACCELERATORS = ("nvidia[0-9]*", "davinci[0-9]*", "dri/render*", "kfd", "dxg", "accel*")
"""Files below /dev of accelerators: CUDA, NPU, XPU, ROCm, CUDA in Windows, and others."""


def find_files(data: Data) -> list[Path]:
    """Find the files of a data source, sorted by path.

    `data.path` is a file, a folder (searched recursively, without hidden files and folders) or a glob.

    Raises:
        DataError: data.path is missing, or no file matches it.
    """
    if data.source == "python":
        library = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        return sorted(p for p in library.rglob("*.py") if excluded.isdisjoint(p.relative_to(library).parts))
    if not data.path:
        raise DataError(
            f"source {data.source} has no path",
            where="data.path",
            rule='every source except "python" needs a path',
            fix="set data.path to a file, a folder or a glob",
        )
    path = Path(data.path).expanduser()
    if path.is_dir():
        pattern = FOLDER_PATTERNS[data.source]
        if data.source == "datasets" and (path / "dataset_dict.json").exists():
            raise DataError(
                f"{path} has several splits",
                where="data.path",
                rule="a run trains on one split, and the others are often there to test it",
                fix=f"name the folder of a split, such as {path / 'train'}",
            )
        below = [p for p in path.rglob(pattern) if not any(part[0] == "." for part in p.relative_to(path).parts)]
    else:
        pattern = str(path)
        below = [path] if path.exists() else [Path(p) for p in glob.glob(pattern, recursive=True)]
    files = sorted(p for p in below if p.is_file())
    if not files:
        what = f"no file matches {pattern} below {path}" if path.is_dir() else f"there is no file at {path}"
        fix = "check the path; it is relative to the current folder"
        raise DataError(what, where="data.path", rule="data.path is a file, a folder or a glob", fix=fix)
    return files


def check_tokenizer_folder(folder: Path) -> None:
    """Refuse a path that is no folder for data.tokenizer.

    Raises:
        DataError: there is no such folder.
    """
    if not folder.is_dir():
        rule = 'data.tokenizer is a folder, or "train"'
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise DataError(what, where="data.tokenizer", rule=rule, fix='check the path, or set it to "train"')


def check_source(source: Path, step: int | None = None) -> None:
    """Refuse a path that is neither a run folder nor a model folder.

    Args:
        source: path that a user has given for the one or the other.
        step: step of a checkpoint, which only a run has; None: the newest weights.

    Raises:
        CheckpointError: the folder is neither.
        ModelError: there is no such folder, and its path reads as the id of a model on the Hub.
    """
    check_folder(source)
    if not (source / "job.toml").is_file() and (step is not None or not (source / "config.json").is_file()):
        raise CheckpointError(
            f"{source} is no run folder" + ("" if step is not None else " and no model folder"),
            where=str(source) if step is None else f"--step {step}",
            rule="a run folder has a job.toml, a Hugging Face folder a config.json; only a run has checkpoints",
            fix="name the folder that `weft train` or save_pretrained wrote",
        )


def check_folder(folder: Path) -> None:
    """Refuse a path that is no folder.

    Raises:
        CheckpointError: there is no such folder.
        ModelError: its path reads as the id of a model on the Hub.
    """
    refuse_hub_id(folder, str(folder))
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file" if folder.exists() else f"there is no folder {folder}",
            rule="the command reads a run folder, a checkpoint or a model folder",
            fix="check the path; it is relative to the current folder",
        )


def check_exported(run: Path) -> None:
    """Refuse a run without an export.

    Raises:
        CheckpointError: the run has no weights, or there is no such folder.
    """
    check_folder(run)
    if not any((run / "export" / name).is_file() for name in EXPORTED):
        raise CheckpointError(
            f"there are no weights in {run / 'export'}",
            rule="a finished run has its weights in the folder export",
            fix="name a finished run, or choose one of its checkpoints with --step",
        )


def check_new(target: Path) -> None:
    """Refuse to overwrite.

    Raises:
        CheckpointError: the target of an export exists.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists", rule="an export never overwrites", fix="name another folder")


def ranks_on_cpu() -> int | None:
    """Default number of ranks of a host without accelerators; None if it may have one, which torch tells."""
    if any(glob.glob(f"/dev/{files}") for files in ACCELERATORS) or entry_points(group="weft.devices"):
        return None
    return min(2, os.cpu_count() or 1)
