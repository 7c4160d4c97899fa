"""Transformers configuration of a model, read from a folder, a file or a table, and checked before the model is built."""

import dataclasses
import difflib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from weft.anatomy.classes import auto_class, diffusers_class
from weft.anatomy.roles import ROLES_KEY
from weft.checkpoint.packed_folder import is_packed
from weft.checkpoint.weight_files import FOR_PACKED, StoredTensor, find_stored, is_plain_name, stored_tensors
from weft.errors import CheckpointError, ModelError, nearest, refuse_hub_id
from weft.job import Model
from weft.own_code import load_module

SHOWN = 300  # characters of an error message of Transformers that are shown
# Keys that Transformers reads for every family, in addition to the fields of its configuration class.
COMMON_KEYS = {
    *("model_type", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "auto_map", "transformers_version"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("output_attentions", "tie_word_embeddings", "use_cache"),
}
MOST = {
    re.compile(r"\w*layers|(\w+_)?(n|num)_(\w+_)?(layer|blocks)|depth"): 10_000,
    re.compile(r"(\w+_)?(n|num)_(\w+_)?experts"): 100_000,
}
"""Largest values of keys of a configuration that count modules, of which each takes memory of the host."""
MIN_SIMILARITY = 0.75  # difflib ratio above which a known key is suggested


def read_config(source: Model, kind: str = "causal", classes: int | None = None, *, in_4_bits: bool = False) -> Any:
    """Configuration named by a job: from a model folder, a config.json, or a table in the job.

    It ties weights as Transformers does when it loads the folder: not those that the folder has with different values.

    Args:
        source: model table of the job.
        kind: `task.kind` of the job.
        classes: `task.classes` of the job.
        in_4_bits: True if the caller reads weights in 4 bits, see `packed_folder.py`.

    Returns:
        Configuration of Transformers; for a model of Diffusers its table, with _class_name.

    Raises:
        JobError: `model.package` cannot be imported.
        ModelError: the file does not exist, the model_type is unknown, the family does not know a key, or Transformers
            refuses a value.
    """
    if source.package:
        load_module(source.package, f"model.package = {source.package}")
    if not isinstance(source.config, dict):
        refuse_hub_id(str(source.path or source.config), "model.path" if source.path else "model.config")
    settings: dict[str, Any] = {}
    try:
        if isinstance(source.config, dict):
            settings = dict(source.config)
            if kind != "diffusion":
                _refuse_unknown_keys(settings)
        else:
            settings = _read_table(Path(source.path) / "config.json" if source.path else Path(str(source.config)))
        _refuse_counts(settings, _where(source))
        if kind == "diffusion":
            return _check_diffusers(settings, _where(source))
        _refuse_downloads(settings, _where(source))
        quantized = settings.pop("quantization_config", None)  # newly initialized weights are not quantized
        if quantized and source.path and not (in_4_bits and is_packed(quantized)):
            raise _refused_quantization(quantized, _where(source))
        return _make_config(settings, source, kind, classes)
    except FileNotFoundError as error:
        rule = "model.path is a folder with a config.json; model.config is a config.json"
        fix = "check the path; it is relative to the current folder"
        raise ModelError(f"there is no file {error.filename}", where="model", rule=rule, fix=fix) from None
    except KeyError as error:
        what = f"the model's configuration has no {error}" if error.args == ("model_type",) else str(error)
        raise ModelError(
            what,
            where="model.config",
            rule="model_type names the family, such as llama",
            fix='add it, for example model_type = "llama"',
        ) from None
    except ModelError:
        raise
    except Exception as error:  # families raise many types of exceptions; all messages are shown to the user
        raise _refused_config(source, error, settings) from None


def _make_config(settings: dict[str, Any], source: Model, kind: str, classes: int | None) -> Any:
    """Configuration of Transformers from a table; other arguments as of `read_config`."""
    names = settings.get("label2id")
    if isinstance(names, dict) and not settings.get("id2label"):  # Transformers would drop the names
        settings["id2label"] = {id_: name for name, id_ in names.items()}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if classes is not None:
        config.num_labels = classes
    if source.roles:
        setattr(config.get_text_config(), ROLES_KEY, dict(source.roles))
    if source.path:
        _untie(config, kind, Path(source.path))
    return config


def _refuse_counts(settings: dict[str, Any], where: str) -> None:
    """Refuse numbers of layers or experts that would fill the memory of the host, before a model is built."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _refuse_counts(value, where)
        most = next((most for keys, most in MOST.items() if keys.fullmatch(str(key))), None)  # labels have numbers
        if most and isinstance(value, int) and value > most:
            raise ModelError(f"{key} = {value}", where=where, rule=f"{key} is at most {most}", fix=f"correct {key}")


def _check_diffusers(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the class and the keys of a configuration of Diffusers, which would ignore an unknown key."""
    if "_class_name" not in settings:
        raise ModelError(
            "the model's configuration has no _class_name",
            where=where,
            rule="a configuration of Diffusers names the class of its model",
            fix='add it, for example _class_name = "DiTTransformer2DModel"',
        )
    known = list(inspect.signature(diffusers_class(str(settings["_class_name"])).__init__).parameters)
    for key in settings:
        if not key.startswith("_") and key not in known:
            similar = difflib.get_close_matches(key, known, 1, MIN_SIMILARITY)
            raise ModelError(
                f"{key} is no key of {settings['_class_name']}",
                where=where,
                rule="keys are the arguments of the class",
                fix=f"write {similar[0]!r}" if similar else "remove the key",
            )
    return settings


def _where(source: Model) -> str:
    return "model.config" if isinstance(source.config, dict) else f"model {source.path or source.config}"


def _refused_config(source: Model, error: Exception, settings: dict[str, Any]) -> ModelError:
    """Error for a configuration that Transformers refuses."""
    where = _where(source)
    unknown = re.match(r"Unrecognized model identifier: (.*?)\. ", str(error))  # followed by a list of all families
    if unknown and isinstance(code := settings.get("auto_map"), dict):
        files = sorted({f"{str(name).rpartition('--')[2].partition('.')[0]}.py" for name in code.values()})
        return ModelError(
            f"model_type {unknown[1]!r} is no family of Transformers: its code is {', '.join(files)} (auto_map)",
            where=where,
            rule="Weft runs no code of a model folder; model.package names a module that registers the classes of a model",
            fix="copy this code into a module of yours that calls AutoConfig.register and AutoModelForCausalLM.register, "
            'and set model.package to its name (docs/extending.md, "A model of your own")',
        )
    if unknown:
        what, rule = (
            f"no model_type is called {unknown[1]!r}",
            "model_type names a family of Transformers, such as llama",
        )
        return ModelError(what, where=where, rule=rule, fix=nearest(unknown[1], CONFIG_MAPPING))
    message = " ".join(str(error).split())
    return ModelError(
        f"the configuration is refused: {message[:SHOWN] + ' ...' * (len(message) > SHOWN)}",
        where=where,
        rule="a configuration is a table with model_type and keys of that family, whose values have the right types",
        fix="correct the value; a config.json written by save_pretrained of Transformers is accepted as it is",
    )


def _read_table(path: Path) -> dict[str, Any]:
    """Read a config.json with the reader of Transformers, which has a special notation for infinite values.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file is not JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(None, None, str(path))
    return PretrainedConfig.get_config_dict(str(path), local_files_only=True)[0]


def _refused_quantization(settings: Any, where: str) -> ModelError:
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
    return ModelError(
        f"the weights are quantized ({method})",
        where=where,
        rule="weights are trained and converted in fp32, bf16 or fp16",
        fix=FOR_PACKED
        if is_packed(settings)
        else "name the folder of the unquantized model, or save it once with Transformers after model.dequantize()",
    )


# Keys


def _refuse_unknown_keys(settings: dict[str, Any]) -> None:
    """Refuse a key of `model.config` that the code of the family never mentions; Transformers would silently ignore it.

    A config.json is not checked, because published models have keys of other libraries in it.
    """
    for family, table, prefix in _tables(settings):
        known = known_keys(family)
        for key in [key for key in table if key not in known]:
            if re.search(rf"\b{re.escape(key)}\b", _code_of(family)):
                continue
            similar = difflib.get_close_matches(key, known, 1, MIN_SIMILARITY)
            raise ModelError(
                f"{prefix}{key} is no key of {family.model_type}",
                where="model.config",
                rule="keys are those that the configuration or the code of the family reads; other keys have no effect",
                fix=f"write {similar[0]!r}" if similar else "remove the key",
            )


def _tables(settings: dict[str, Any]) -> list[tuple[type[PretrainedConfig], dict[str, Any], str]]:
    """Tables to check, as (configuration class, table, key prefix): the configuration and its language model part.

    Parts for other modalities are not checked: their defaults in Transformers contain keys that no code reads.
    """
    if settings.get("model_type") not in CONFIG_MAPPING:
        return []  # refused later by Transformers
    family = CONFIG_MAPPING[settings["model_type"]]
    tables = [(family, settings, "")]
    part, table = family.sub_configs.get("text_config"), settings.get("text_config")
    if part is not None and isinstance(table, dict):
        part = CONFIG_MAPPING[str(table["model_type"])] if table.get("model_type") in CONFIG_MAPPING else part
        if part is not AutoConfig:
            tables.append((part, table, "text_config."))
    return tables


def known_keys(family: type[PretrainedConfig]) -> set[str]:
    """Keys that a family accepts: fields, aliases and parts of its configuration class, and the common keys."""
    fields = {field.name for field in dataclasses.fields(family)}
    return COMMON_KEYS | fields | family.attribute_map.keys() | family.sub_configs.keys()


def _code_of(family: type[PretrainedConfig]) -> str:
    """Source code of a family's configuration and model, and of the base classes of its configuration."""
    files = {
        Path(str(inspect.getsourcefile(base))) for base in family.__mro__ if base.__module__.startswith("transformers")
    }
    own = Path(str(inspect.getsourcefile(family)))
    files |= {own, *own.parent.glob("modeling_*.py")}
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))


# Downloads and files outside the model folder


def _refuse_downloads(settings: dict[str, Any], where: str) -> None:
    """Refuse a configuration that names kernels on a hub, or weights outside the model folder.

    Raises:
        ModelError: the configuration names a kernel on a hub, or a weights file that is not in the model folder.
    """
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        chosen = settings.get(key)
        for name in chosen.values() if isinstance(chosen, dict) else [chosen]:
            if isinstance(name, str) and "/" in name:
                raise ModelError(
                    f"{key} = {name!r} names a kernel on a hub",
                    where=where,
                    rule="Weft downloads no code; an implementation must be part of Transformers",
                    fix='remove the key, or set it to "sdpa" or "eager"',
                )
    named = settings.get("transformers_weights")
    if named is not None and not (isinstance(named, str) and is_plain_name(named)):
        raise ModelError(
            f"transformers_weights = {named!r}",
            where=where,
            rule="weights are a *.safetensors file in the folder of the model",
            fix="remove the key, and rename the file to model.safetensors",
        )


# Tied weights


def _untie(config: Any, kind: str, folder: Path) -> None:
    """Set `tie_word_embeddings` of a configuration to false if the folder has the tied weights with different values.

    Transformers 5 loads them as they are, and ties only those that are equal or missing.

    Raises:
        ModelError: the folder has some tied weights with different values, and not all.
    """
    model: Any = auto_class(kind, config)._model_mapping.get(type(config), None)
    tied = getattr(model, "_tied_weights_keys", None)
    if not getattr(config, "tie_word_embeddings", False) or not isinstance(tied, dict):
        return
    try:
        stored = stored_tensors(folder, getattr(config, "transformers_weights", None))
    except CheckpointError:
        return  # refused when the weights are loaded; a plan needs none
    apart = [(name, first) for name, first in tied.items() if _differ(name, first, stored)]
    if apart and len(apart) < len(tied):
        raise differing_ties(*apart[0], str(folder))
    if apart:
        config.tie_word_embeddings = False


def explain_ties(source: Model, config: Any) -> list[str]:
    """Line that says that tied weights of a folder differ, and are trained as they are; empty for all other models.

    Args:
        source: model table of a job.
        config: its configuration, see `read_config`.
    """
    if source.path is None or getattr(config, "tie_word_embeddings", True):
        return []
    written = type(config).from_dict(_read_table(Path(source.path) / "config.json"))
    what = f"tie_word_embeddings is true in {source.path}, and its tied weights differ: they are trained as two weights"
    return [f"{'weights':<12}{what}"] if written.tie_word_embeddings else []


def differing_ties(name: str, first: str, folder: str) -> ModelError:
    """Error for a folder in which tied weights differ, for a model that has them as one.

    Args:
        name: name of a weight that is tied to another one.
        first: name of the other weight.
        folder: folder of the model.
    """
    return ModelError(
        f"{name} and {first} differ, and are one weight in the model",
        where=folder,
        rule="tie_word_embeddings of the configuration says for all tied weights of a model whether they are one",
        fix="set tie_word_embeddings to false in the config.json, and store every weight; or remove the copy that is wrong",
    )


def _differ(name: str, first: str, stored: dict[str, StoredTensor]) -> bool:
    """True if the files have two weights with different values."""
    keys = [key for key in (find_stored(name, stored), find_stored(first, stored)) if key is not None]
    if len(set(keys)) < 2:
        return False
    tensors = []
    for key in keys:
        with safe_open(stored[key].file, "pt") as file:
            tensors.append(file.get_tensor(key))
    return not torch.equal(*tensors)
