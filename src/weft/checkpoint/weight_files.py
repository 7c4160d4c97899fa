"""Weights of a Hugging Face folder: safetensors files in that folder, checked before anything is loaded."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from safetensors import SafetensorError, safe_open

from weft.errors import CheckpointError, ModelError, refuse_hub_id

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
MAX_INDEX_BYTES = 2**28  # enough for two million weights of about a hundred bytes each
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
PACKED = ".quant_state.bitsandbytes__nf4"
"""Name of the table of a weight in 4 bits, after the name of the weight; see `packed_folder.py`."""
FOR_PACKED = 'set adapter.kind = "qlora", which reads weights in 4 bits, or name the folder of the unquantized model'
QUANTIZED_DTYPES = ("I8", "F8", "F6", "F4")
"""First characters of dtypes that only quantized weights have; other integers are also indices and masks."""


class StoredTensor(NamedTuple):
    """Tensor in a file of a folder, as the header of the file describes it."""

    file: Path
    dtype: str
    """Name in safetensors, such as BF16."""
    shape: tuple[int, ...]


def check_model_folder(folder: Path, where: str, *, in_4_bits: bool = False) -> None:
    """Refuse a path that is no model folder with weights, before anything is computed.

    Args:
        folder: path that a user has given for a model folder.
        where: key that has it.
        in_4_bits: True if weights in 4 bits can be read.

    Raises:
        CheckpointError: its weights are refused, see `check_weight_files`.
        ModelError: there is no such folder, or it has no config.json or no weights.
    """
    refuse_hub_id(folder, where)
    table = read_config_file(folder, where)
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", *PICKLES)):
        raise ModelError(
            f"{folder} has a config.json, and no *.safetensors file",
            where=where,
            rule="training starts from the weights in the folder of model.path",
            fix="download the weights; for random weights, leave model.path out, and set "
            f'model.config = "{folder / "config.json"}"',
        )
    if "_class_name" not in table:  # files of Diffusers have other names
        stored_tensors(folder, table.get("transformers_weights"), in_4_bits=in_4_bits)


def read_config_file(folder: Path, where: str | None = None) -> dict[str, Any]:
    """Table in the config.json of a model folder.

    Args:
        folder: model folder.
        where: key that has the path; None: the path itself.

    Raises:
        ModelError: the file does not exist, or is no JSON object.
    """
    config, problem = folder / "config.json", "it has no JSON object"
    try:
        table: Any = json.loads(config.read_bytes())
        if isinstance(table, dict):
            return table
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ModelError(
        f"{config} cannot be read: {problem}",
        where=where or str(folder),
        rule="a model folder has config.json and *.safetensors files written by save_pretrained",
        fix="check the path; it is relative to the current folder",
    )


def check_described(folder: Path) -> None:
    """Refuse a folder with quantized weights that its configuration does not describe; Transformers would read integers.

    Raises:
        CheckpointError: names the tensor.
        ModelError: the configuration cannot be read.
    """
    is_described = "quantization_config" in read_config_file(folder) or os.path.lexists(folder / ADAPTER)
    if not is_described and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        stored_tensors(folder)


def check_weight_files(folder: Path, named: str | None = None) -> None:
    """Refuse a folder whose weights are not safetensors files in the folder.

    Transformers opens any file that an index names, and unpickles files not named `*.safetensors`; therefore the index is
    checked first. Where peft is installed, Transformers also loads the files that an adapter_config.json names.

    Args:
        folder: model folder.
        named: name of the weights file, if the configuration has one (`transformers_weights`).

    Raises:
        CheckpointError: the folder has no safetensors file or has an adapter, or the index is damaged or names any other file.
        ModelError: the folder does not exist, and its path reads as the id of a model on the Hub.
    """
    refuse_hub_id(folder, "path of the model")
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
            fix="if you trust the files, load and save them with Transformers 5: save_pretrained writes safetensors"
            if pickles
            else "download the weights, too",
        )
    for name in sorted(set(_read_index(index).values())):
        _check_name(index, name)


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """Files with the weights of a model folder; arguments and errors as of `check_weight_files`."""
    check_weight_files(folder, named)
    if named is not None or (folder / WEIGHTS).is_file():
        return [folder / (named or WEIGHTS)]
    return [folder / name for name in sorted(set(_read_index(folder / INDEX).values()))]


def stored_tensors(folder: Path, named: str | None = None, *, in_4_bits: bool = False) -> dict[str, StoredTensor]:
    """Tensors of a model folder by name. Reads the headers of the files alone.

    Args:
        folder: model folder.
        named: name of the weights file, if the configuration has one (`transformers_weights`).
        in_4_bits: True if the caller reads weights in 4 bits; their parts are in the result.

    Raises:
        CheckpointError: see `check_weight_files`; or a file is damaged, or has quantized weights, whose numbers mean nothing
            without their scales.
    """
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(folder, named):
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    tensor = file.get_slice(name)
                    stored[name] = StoredTensor(path, tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the weights cannot be read: {error}",
                where=str(path),
                rule="a model folder has config.json and *.safetensors files written by save_pretrained",
                fix="copy or download the folder again",
            ) from None
    packed = {key.removesuffix(PACKED) for key in stored if key.endswith(PACKED)}
    for name, (path, dtype, _) in stored.items():
        if in_4_bits and name in packed:
            continue
        is_weight = "weight" in name.rpartition(".")[2]
        if dtype not in PLAIN_DTYPES and (is_weight or dtype.startswith(QUANTIZED_DTYPES)):
            raise CheckpointError(
                f"{name} is stored as {dtype}",
                where=str(path),
                rule=f"weights are numbers in {', '.join(PLAIN_DTYPES)}: others have no meaning without their scales",
                fix=FOR_PACKED
                if name in packed
                else "name the folder of the unquantized model, or save it once with Transformers after model.dequantize()",
            )
    return stored


def plain_name(name: str) -> str:
    """Name in the unmodified model of a weight of a model with adapters: PEFT has a layer around that of the model."""
    return re.sub(r"\.base_layer(?=\.)", "", name)


def find_stored(name: str, stored: dict[str, StoredTensor]) -> str | None:
    """Name in the files of a weight by its name in the model; None if it is not there, or cannot be told from others.

    Published folders have names without the prefix of the base model, or with parts of it in another order.

    Args:
        name: name in the model.
        stored: tensors of the folder.
    """
    last = ".".join(name.split(".")[-2:])
    near = [key for key in stored if f".{key}".endswith(f".{last}")]
    whole = [key for key in near if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")]
    return name if name in stored else next((found[0] for found in (whole, near) if len(found) == 1), None)


def file_of(name: str, folder: Path) -> Path | None:
    """File in which a model folder has a weight, by its name in the model; None if it is not known.

    Args:
        name: name in the model.
        folder: path; it need not be a model folder.
    """
    try:
        stored = stored_tensors(folder)
    except (CheckpointError, ModelError):
        return None
    key = find_stored(plain_name(name), stored)
    return stored[key].file if key else None


def is_plain_name(name: str) -> bool:
    """True for the name of a safetensors file without a folder."""
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\\0")


def is_own_file(path: Path, folder: Path) -> bool:
    """True for a regular file of a folder; links inside the folder, and from a snapshot of a Hugging Face cache, are followed.

    Files of a snapshot are links to the blobs of its repository: snapshots/REVISION/NAME -> ../../blobs/DIGEST. Other links
    could point to any file of this machine.

    Args:
        path: path of the file in the folder.
        folder: model folder: any folder, a snapshot or a folder in one, or a link to such a folder.

    Raises:
        OSError: the file does not exist.
        ValueError: the name has a null character.
    """
    target, own = Path(os.path.realpath(path, strict=True)), Path(os.path.realpath(folder))
    blobs = [parent.with_name("blobs") for parent in own.parents if parent.name == "snapshots"]
    return stat.S_ISREG(os.lstat(target).st_mode) and any(target.is_relative_to(place) for place in (own, *blobs[:1]))


def _read_index(index: Path) -> dict[str, str]:
    """File name of each weight."""
    try:
        if not is_own_file(index, index.parent):
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
    path = index.with_name(name)
    try:
        own = is_own_file(path, index.parent) and os.path.splitext(os.path.realpath(path))[1] in ("", ".safetensors")
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
