"""Safetensors weights of a Hugging Face folder, checked before anything is loaded."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
LARGEST_INDEX = 2**28  # bytes; a weight takes about a hundred, so this is room for two million weights


def check_weight_files(folder: Path) -> None:
    """Refuse a folder whose weights are not safetensors files inside of it.

    Transformers opens whatever an index names, and unpickles what is not named `*.safetensors`: the index is read here first.

    Raises:
        CheckpointError: there are no safetensors, or the index is damaged or names another kind of file.
    """
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


def _read_index(index: Path) -> dict[str, str]:
    """The file of each weight."""
    try:
        found = os.lstat(index)
        if not stat.S_ISREG(found.st_mode):
            _refuse(index, "it is a link, or no regular file")
        if found.st_size > LARGEST_INDEX:
            _refuse(index, f"it has {found.st_size} bytes, more than {LARGEST_INDEX}")
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
    plain = name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\\0")
    if not plain:
        _refuse(index, f"it names {name[:200]!r}")
    try:
        found = os.lstat(index.with_name(name))
    except (OSError, ValueError):
        _refuse(index, f"it names {name[:200]!r}, and there is no such file")
    if not stat.S_ISREG(found.st_mode):
        _refuse(index, f"it names {name[:200]!r}, which is a link, or no regular file")


def _refuse(index: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"the index of the weights is refused: {problem}",
        where=str(index),
        rule="an index names *.safetensors files in its own folder: no other folder, no links, no pickles",
        fix="copy the folder again, with the contents of links (cp -rL); save_pretrained of Transformers 5 writes safetensors",
    ) from None
