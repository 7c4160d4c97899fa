"""Files around the weights of an export: those of the folder that the model came from, but for what training has changed."""

import json
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import GenerationConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from weft.checkpoint.folders import replace_folder, sync_tree
from weft.checkpoint.weight_files import is_own_file
from weft.data import Prepared
from weft.data.labels import name_outputs, targets_of
from weft.errors import CheckpointError
from weft.inputs import check_new
from weft.job import Model
from weft.launch.scratch import part_folder

GENERATION = "generation_config.json"
OF_MODEL = (GENERATION, "LICENSE*", "NOTICE*")
"""Files that belong to the weights."""
OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tokenizer.model.v*", "sentencepiece.bpe.model", "spiece.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "normalizer.json"),
    *("sentencepiece.model", "spm.model", "spm_char.model", "bpe.codes", "dict.txt", "byte_maps.json", "emoji.json"),
    *("source.spm", "target.spm", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"),
    *("word_shape.json", "word_pronunciation.json", "prophetnet.tokenizer"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "scheduler_config.json", "additional_chat_templates/*.jinja"),
)
"""Files of tokenizers, processors and schedulers, which make the inputs of the model."""
EXPORTED = (*OF_MODEL, *OF_TOKENIZER)
"""Files that an export copies, besides Python files that an `auto_map` names."""
NOT_COMPARED = ("_name_or_path", "transformers_version", "use_cache", "dtype")
"""Keys of a configuration that training does not change: training switches the cache off, and dtypes are set apart."""


def source_of(model: Any) -> Path | None:
    """Folder from which a library has loaded a model, according to its configuration; None if there is none on this machine.

    Of a model that was loaded by its id on the Hub, it is the snapshot in the Hugging Face cache.
    """
    config = getattr(model, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else getattr(config, "name_or_path", None)
    if not name or (Path(name) / "config.json").is_file():
        return Path(name) if name else None
    with suppress(HFValidationError):  # the path of a folder that is no longer there
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        return Path(cached).parent if isinstance(cached, str) else None
    return None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context with an empty folder next to a new one, which is removed at the end if it has not been renamed.

    Args:
        folder: final name.

    Raises:
        CheckpointError: the folder exists, or a file cannot be written, as on a full disk.
    """
    check_new(folder)
    with explain_writes(folder), part_folder(folder) as part:
        yield part


@contextmanager
def explain_writes(folder: Path) -> Iterator[None]:
    """Context that refuses a folder whose files cannot be written.

    Raises:
        CheckpointError: names the folder and the problem, such as a full disk.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} could not be written: {error}",
            rule="an export writes a new folder, which appears complete or not at all",
            fix="name a writable folder on a disk with enough space",
        ) from None


def finish_folder(part: Path, config: str, tokenizer: Path | None, folder: Path, source: Path | None = None) -> None:
    """Copy the files around the weights into a new folder, and give the folder its final name.

    Args:
        part: new folder next to `folder`.
        config: name of a file in it whose permissions follow the umask.
        tokenizer: folder whose tokenizer files are copied; None for those of `source`.
        folder: final name; an existing folder is replaced.
        source: model folder that the model came from, whose other files are copied; None for none.
    """
    mode = stat.S_IMODE((part / config).stat().st_mode)
    for file in part.glob("*.safetensors"):  # safetensors creates files that only the owner can read
        file.chmod(mode)
    copy_files(part, source, tokenizer)
    sync_tree(part)
    replace_folder(part, folder)


def copy_files(folder: Path, source: Path | None, tokenizer: Path | None) -> None:
    """Copy the files around the weights into the folder of an export, byte for byte. Files that it has are kept.

    Links are followed as by `is_own_file`, so that the export has plain files; a warning names those that are left out.

    Args:
        folder: folder of the export.
        source: model folder that the model came from; None for a new model, and for adapters.
        tokenizer: folder whose tokenizer files are copied; None for those of `source`.
    """
    origins = ((source, OF_MODEL), (tokenizer or source, OF_TOKENIZER))
    for origin, patterns in ((path, patterns) for path, patterns in origins if path is not None):
        if not origin.is_dir():  # the weights are worth more than what is around them
            warnings.warn(f"{origin} is no longer there: its files are not in the export {folder}", stacklevel=2)
            continue
        for file in _files(origin, patterns):
            target = folder / file.relative_to(origin)
            if _is_own(file, origin):
                if not target.exists():
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
            elif file.is_file() or file.is_symlink():
                warnings.warn(f"{file} is a link out of its folder: it is not in the export", stacklevel=2)


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Files of a folder that match one of some patterns, and the code of the folder that its configurations name."""
    code = _code_files(folder)
    for file in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        name = file.relative_to(folder).as_posix()
        if name in code or any(fnmatchcase(name, pattern) for pattern in patterns):
            yield file


def _is_own(file: Path, folder: Path) -> bool:
    with suppress(OSError):  # a link to nowhere
        return is_own_file(file, folder)
    return False


def _code_files(folder: Path) -> set[str]:
    """Names of the Python files that an `auto_map` in a folder names, and of those that they import from it."""
    modules: set[str] = set()
    for file in folder.glob("*config.json"):
        with suppress(AttributeError, KeyError, OSError, TypeError, ValueError):  # no table, or none with an auto_map
            table = json.loads(file.read_bytes()) if _is_own(file, folder) else {}
            for entry in table["auto_map"].values():
                modules |= {str(name).partition(".")[0] for name in (entry if isinstance(entry, list) else [entry])}
    found = {folder / f"{name}.py" for name in modules if name.isidentifier()}  # others are of another repository
    with suppress(OSError):  # code with an import that is not there cannot run
        found |= {Path(path) for file in found for path in get_relative_import_files(file)}
    return {file.name for file in found if file.parent == folder}


def write_config(config: Any, folder: Path, source: Path | None, dtype: torch.dtype | None = None) -> None:
    """Write the configuration of an export: that of its source, with the values that training has changed.

    Args:
        config: configuration of the export; it gets the dtype.
        folder: existing folder.
        source: model folder that the model came from; None for a new model, whose configuration is written as it is.
        dtype: dtype of the weights; None: that of the source.
    """
    file = folder / "config.json"
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)) if dtype else ():
        if part is not None:
            part.dtype = dtype
    if source is not None:
        # The source may have changed since, or have keys that contradict the new values; families raise all types of errors.
        with suppress(Exception):
            file.write_bytes(_changed_file(config, source, dtype))
            if _values(type(config).from_dict(_read(folder))) == _values(config):
                return
    config.to_json_file(file)


def _changed_file(config: PretrainedConfig, source: Path, dtype: torch.dtype | None) -> bytes:
    """Contents of the config.json of a source with the values of a configuration; the same bytes if none differs."""
    contents = (source / "config.json").read_bytes()
    table = json.loads(contents)
    if table["model_type"] != config.model_type:
        raise ValueError(f"{source} has another model")
    merged = _with_changes(table, _values(type(config).from_dict(_read(source))), _values(config))
    for part in (merged, *(merged.get(key) for key in config.sub_configs)) if dtype else ():
        if isinstance(part, dict):
            part |= dict.fromkeys({"dtype", "torch_dtype"} & part.keys(), str(dtype).removeprefix("torch."))
    return contents if merged == table else f"{json.dumps(merged, indent=2, ensure_ascii=False)}\n".encode()


def _read(folder: Path) -> dict[str, Any]:
    """Table of a config.json, with infinite values as numbers."""
    table: dict[str, Any] = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)[0]
    return table


def _values(config: PretrainedConfig) -> dict[str, Any]:
    """All values of a configuration, with those of its parts, as they are written."""

    def strip(table: dict[str, Any]) -> dict[str, Any]:
        return {
            key: strip(value) if isinstance(value, dict) else value
            for key, value in table.items()
            if key not in NOT_COMPARED
        }

    return strip(json.loads(config.to_json_string(use_diff=False)))


def _with_changes(table: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Table of a configuration file with the values that differ between two configurations.

    Args:
        table: as it is in the file.
        before: all values that the file stands for.
        after: all values of the export.
    """
    merged = {key: value for key, value in table.items() if key in after or key not in before}
    for key, value in after.items():
        if key not in before or before[key] != value:
            own: tuple[Any, Any] = table.get(key), before.get(key)
            parts = all(isinstance(part, dict) for part in (value, *own))
            merged[key] = _with_changes(*own, value) if parts else value
    return merged


def set_end_of_text(model: Any, token: int | None) -> None:
    """Give a new model the end-of-text token of its tokenizer, in its configuration and in its settings of generation.

    Args:
        model: causal language model of Transformers.
        token: id of the token; None without a tokenizer.
    """
    for settings in (model.config, model.generation_config) if model.can_generate() else (model.config,):
        settings.bos_token_id = settings.eos_token_id = token


def describe_task(model: Any, source: Model, prepared: Prepared) -> None:
    """Give a trained model what its data has decided, in place: names of classes, or the tokens around its answers.

    Args:
        model: model of Transformers or Diffusers.
        source: model table of the job.
    """
    if prepared.labels is not None and isinstance(model.config, PretrainedConfig):
        name_outputs(model.config, targets_of(prepared.labels, source, model.config))
    if prepared.generation and source.path is not None:  # the file has more settings than a model built without it
        with suppress(OSError, ValueError):
            model.generation_config = GenerationConfig.from_pretrained(source.path, local_files_only=True)
    for key, token in prepared.generation.items():
        setattr(model.generation_config, key, token)


class SavedAsIs(GenerationConfig):
    """Settings of generation that `save_pretrained` writes as they are.

    Otherwise it would refuse settings that are published, such as a temperature without sampling, once one of them has changed.
    """

    @classmethod
    def of(cls, settings: GenerationConfig) -> "SavedAsIs":
        """Copy of some settings."""
        made = cls()
        vars(made).update(vars(settings))
        return made

    def validate(self, *_: Any, **__: Any) -> None:
        """Accept all settings."""


def drop_same_generation(folder: Path, config: PretrainedConfig, source: Path | None) -> None:
    """Remove the settings of generation that a library has saved if they are those of the source, whose file is copied.

    Args:
        folder: folder of the export.
        source: model folder that the model came from; None for a new model.
    """
    if source is None or not (folder / GENERATION).is_file():
        return
    known = [GenerationConfig.from_model_config(config)]  # of a model that was built without reading the file
    with suppress(OSError, ValueError):  # a source without the file, or with one that no library reads
        known.append(GenerationConfig.from_pretrained(source, local_files_only=True))
    if _settings(GenerationConfig.from_pretrained(folder, local_files_only=True)) in map(_settings, known):
        (folder / GENERATION).unlink()


def _settings(generation: GenerationConfig) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(generation.to_json_string(ignore_metadata=True))
    return {key: value for key, value in table.items() if key != "use_cache"}
