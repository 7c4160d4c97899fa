"""Check that the weights of a Hugging Face folder are safetensors files in that folder, before anything is loaded."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
MAX_INDEX_BYTES = 2**28  # enough for two million weights of about a hundred bytes each


def check_weight_files(folder: Path, named: str | None = None) -> None:
    """Refuse a folder whose weights are not safetensors files in the folder.

    Transformers opens any file that an index names, and unpickles files not named `*.safetensors`; therefore the index is
    checked first. Where peft is installed, Transformers also loads the files that an adapter_config.json names.

    Args:
        folder: model folder.
        named: name of the weights file, if the configuration has one (`transformers_weights`).

    Raises:
        CheckpointError: the folder has no safetensors file or has an adapter, or the index is damaged or names any other file.
    """
    if os.path.lexists(folder / ADAPTER):
        raise CheckpointError(
            f"{folder} has an {ADAPTER}: it is an adapter, or a model with an adapter",
            where=str(folder),
            rule="a model folder has the full weights of one model, without adapters",
            fix="merge the adapter with peft (merge_and_unload) and save the model, or remove the file to train without it",
        )
    if named is not None:
        return _check_name(folder / "config.json", named)
    if (folder / WEIGHTS).is_file():  # Transformers loads this file and ignores an index
        return
    index = folder / INDEX
    if not os.path.lexists(index):
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        raise CheckpointError(
            f"the weights are in {pickles[0]}" if pickles else f"there is no {WEIGHTS} and no {INDEX}",
            where=str(folder),
            rule="weights are read from *.safetensors files; nothing is unpickled",
            fix="if you trust the files, load and save them with Transformers 5: save_pretrained writes safetensors",
        )
    for name in sorted(set(_read_index(index).values())):
        _check_name(index, name)


def is_plain_name(name: str) -> bool:
    """True for the name of a safetensors file without a folder."""
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\\0")


def _is_own_file(path: Path) -> bool:
    """True for a regular file, and for a link of the Hugging Face cache: snapshots/REVISION/NAME -> ../../blobs/DIGEST.

    Raises:
        OSError: the file does not exist.
        ValueError: the name has a null character.
    """
    if stat.S_ISREG(os.lstat(path).st_mode):
        return True
    snapshots, target = path.absolute().parent.parent, path.resolve(strict=True)
    blobs = snapshots.parent / "blobs"
    return snapshots.name == "snapshots" and target.parent == blobs.resolve() and stat.S_ISREG(os.lstat(target).st_mode)


def _read_index(index: Path) -> dict[str, str]:
    """File name of each weight."""
    try:
        if not _is_own_file(index):
            _refuse(index, "it is a link, or no regular file")
        size = index.stat().st_size
        if size > MAX_INDEX_BYTES:
            _refuse(index, f"it has {size} bytes, at most {MAX_INDEX_BYTES} are allowed")
        fields: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(index, f"it cannot be read: {error}")
    table = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        _refuse(index, "it has no weight_map from weight names to file names")
    if not isinstance(fields.get("metadata", {}), dict):
        _refuse(index, "its metadata is not a JSON object")
    return table


def _check_name(index: Path, name: str) -> None:
    if not is_plain_name(name):
        _refuse(index, f"it names {name[:200]!r}")
    try:
        own = _is_own_file(index.with_name(name))
    except (OSError, ValueError):
        _refuse(index, f"it names {name[:200]!r}, which does not exist")
    if not own:
        _refuse(index, f"it names {name[:200]!r}, which is a link, or no regular file")


def _refuse(index: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"the index of the weights is refused: {problem}",
        where=str(index),
        rule="an index names *.safetensors files in its own folder: no other folders, links or pickles",
        fix="copy the folder again and follow links (cp -rL); save_pretrained of Transformers 5 writes safetensors",
    ) from None
