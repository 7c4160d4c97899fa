"""Safetensors weights of a Hugging Face folder, checked before anything is loaded."""

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
LARGEST_INDEX = 2**28  # bytes; a weight takes about a hundred, so this is room for two million weights


def check_weight_files(folder: Path, named: str | None = None) -> None:
    """Refuse a folder whose weights are not safetensors files inside of it.

    Transformers opens whatever an index names, and unpickles what is not named `*.safetensors`: the index is read here first.
    Where peft is installed it also loads what an adapter_config.json names.

    Args:
        folder: of the model.
        named: name of the weights file, if the configuration has one (`transformers_weights`).

    Raises:
        CheckpointError: there are no safetensors, the index is damaged or names another kind of file, or there is an adapter.
    """
    if os.path.lexists(folder / ADAPTER):
        raise CheckpointError(
            f"{folder} has an {ADAPTER}: it is an adapter, or a model with one",
            where=str(folder),
            rule="weights are those of one whole model",
            fix="merge the adapter with peft (merge_and_unload) and save the model, or remove the file to train without it",
        )
    if named is not None:
        return _check_name(folder / "config.json", named)
    if (folder / WEIGHTS).is_file():  # Transformers takes it, and leaves an index aside
        return
    index = folder / INDEX
    if not os.path.lexists(index):
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        raise CheckpointError(
            f"the weights are in {pickles[0]}" if pickles else f"there is no {WEIGHTS} and no {INDEX}",
            where=str(folder),
            rule="weights are read from *.safetensors files; nothing is unpickled",
            fix="load and save them with Transformers 5 in a place you trust: save_pretrained writes safetensors",
        )
    for name in sorted(set(_read_index(index).values())):
        _check_name(index, name)


def is_plain_name(name: str) -> bool:
    """True for the name of a safetensors file without a folder."""
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\\0")


def _is_own_file(path: Path) -> bool:
    """True for a regular file, and for a link of the Hugging Face cache: snapshots/REVISION/NAME -> ../../blobs/DIGEST.

    Raises:
        OSError: there is no such file.
        ValueError: the name has a null character.
    """
    if stat.S_ISREG(os.lstat(path).st_mode):
        return True
    snapshots, target = path.absolute().parent.parent, path.resolve(strict=True)
    blobs = snapshots.parent / "blobs"
    return snapshots.name == "snapshots" and target.parent == blobs.resolve() and stat.S_ISREG(os.lstat(target).st_mode)


def _read_index(index: Path) -> dict[str, str]:
    """The file of each weight."""
    try:
        if not _is_own_file(index):
            _refuse(index, "it is a link, or no regular file")
        size = index.stat().st_size
        if size > LARGEST_INDEX:
            _refuse(index, f"it has {size} bytes, more than {LARGEST_INDEX}")
        fields: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(index, f"it cannot be read: {error}")
    table = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        _refuse(index, "it has no weight_map from names of weights to names of files")
    if not isinstance(fields.get("metadata", {}), dict):
        _refuse(index, "its metadata are no table")
    return table


def _check_name(index: Path, name: str) -> None:
    if not is_plain_name(name):
        _refuse(index, f"it names {name[:200]!r}")
    try:
        own = _is_own_file(index.with_name(name))
    except (OSError, ValueError):
        _refuse(index, f"it names {name[:200]!r}, and there is no such file")
    if not own:
        _refuse(index, f"it names {name[:200]!r}, which is a link, or no regular file")


def _refuse(index: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"the index of the weights is refused: {problem}",
        where=str(index),
        rule="an index names *.safetensors files in its own folder: no other folder, no links, no pickles",
        fix="copy the folder again, with the contents of links (cp -rL); save_pretrained of Transformers 5 writes safetensors",
    ) from None
