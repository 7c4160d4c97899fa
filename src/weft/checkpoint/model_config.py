"""The Transformers configuration of a model: read from a folder, a file or a table, and checked before anything is built."""

import dataclasses
import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from weft.checkpoint.weight_files import is_plain_name
from weft.errors import ModelError, nearest
from weft.job import Model

SHOWN = 300  # characters of what Transformers says of a configuration
# Keys that Transformers reads for every family, beside the fields of its configuration class.
COMMON_KEYS = {
    *("model_type", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "auto_map", "transformers_version"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("output_attentions", "tie_word_embeddings", "use_cache"),
}
ALIKE = 0.75  # ratio of difflib above which a known key is suggested


def read_config(source: Model) -> PretrainedConfig:
    """The Transformers configuration that a job names: of its folder, of a config.json, or of a table.

    Raises:
        ModelError: no such file, no such model_type, a key that the family does not know, or a value that it refuses.
    """
    try:
        if isinstance(source.config, dict):
            settings = dict(source.config)
            _refuse_unknown_keys(settings)
        else:
            settings = _read_table(Path(source.path) / "config.json" if source.path else Path(str(source.config)))
        _refuse_downloads(settings, _where(source))
        quantized = settings.pop("quantization_config", None)  # of published weights: fresh ones are not quantized
        if quantized and source.path:
            raise _refused_quantization(quantized, _where(source))
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except FileNotFoundError as error:
        rule = "model.path is a folder with a config.json, model.config such a file"
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
    except Exception as error:  # each family validates in its own way: whatever it says goes to the user
        raise _refused_config(source, error) from None


def _where(source: Model) -> str:
    return "model.config" if isinstance(source.config, dict) else f"model {source.path or source.config}"


def _refused_config(source: Model, error: Exception) -> ModelError:
    """The error about a configuration that Transformers, or its own class, refuses."""
    where = _where(source)
    unknown = re.match(r"Unrecognized model identifier: (.*?)\. ", str(error))  # a list of all that there are follows
    if unknown:
        what, rule = (
            f"no model_type is called {unknown[1]!r}",
            "model_type names a family of Transformers, such as llama",
        )
        return ModelError(what, where=where, rule=rule, fix=nearest(unknown[1], CONFIG_MAPPING))
    said = " ".join(str(error).split())
    return ModelError(
        f"the configuration is refused: {said[:SHOWN] + ' ...' * (len(said) > SHOWN)}",
        where=where,
        rule="a configuration is a table with model_type and the keys of that family, each with a value of its type",
        fix="correct the value; a config.json that Transformers' save_pretrained wrote is accepted as it is",
    )


def _read_table(path: Path) -> dict[str, Any]:
    """The table of a config.json, by Transformers' own reader: it writes infinite numbers in a way of its own.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is no JSON.
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
        fix="name the folder of the unquantized model, or save it once with Transformers after model.dequantize()",
    )


# Keys


def _refuse_unknown_keys(settings: dict[str, Any]) -> None:
    """Refuse a key of `model.config` that the code of the family never mentions: Transformers would keep and ignore it.

    A config.json is not checked: those of published models have keys of other libraries.
    """
    for family, table, prefix in _tables(settings):
        known = known_keys(family)
        for key in [key for key in table if key not in known]:
            if re.search(rf"\b{re.escape(key)}\b", _code_of(family)):
                continue
            near = difflib.get_close_matches(key, known, 1, ALIKE)
            raise ModelError(
                f"{prefix}{key} is no key of {family.model_type}",
                where="model.config",
                rule="a key is one that the configuration or the code of the family reads; any other would have no effect",
                fix=f"write {near[0]!r}" if near else "leave it out",
            )


def _tables(settings: dict[str, Any]) -> list[tuple[type[PretrainedConfig], dict[str, Any], str]]:
    """The table of a configuration and that of its language model, with the class of each.

    Parts for other kinds of data are not checked: their defaults in Transformers have keys that nothing reads.
    """
    if settings.get("model_type") not in CONFIG_MAPPING:
        return []  # refused by Transformers
    family = CONFIG_MAPPING[settings["model_type"]]
    found = [(family, settings, "")]
    part, table = family.sub_configs.get("text_config"), settings.get("text_config")
    if part is not None and isinstance(table, dict):
        part = CONFIG_MAPPING[str(table["model_type"])] if table.get("model_type") in CONFIG_MAPPING else part
        if part is not AutoConfig:
            found.append((part, table, "text_config."))
    return found


def known_keys(family: type[PretrainedConfig]) -> set[str]:
    """Keys of a family's configuration class, its aliases and parts, and those of every configuration."""
    fields = {field.name for field in dataclasses.fields(family)}
    return COMMON_KEYS | fields | family.attribute_map.keys() | family.sub_configs.keys()


def _code_of(family: type[PretrainedConfig]) -> str:
    """Source of a family's configuration and model, and of the classes that its configuration inherits from."""
    files = {
        Path(str(inspect.getsourcefile(base))) for base in family.__mro__ if base.__module__.startswith("transformers")
    }
    files |= set(Path(str(inspect.getsourcefile(family))).parent.glob("modeling_*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))


# What would be fetched, or read from elsewhere


def _refuse_downloads(settings: dict[str, Any], where: str) -> None:
    """Refuse kernels from a hub, and weights outside of the model's folder.

    Raises:
        ModelError: the configuration names one of the two.
    """
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        chosen = settings.get(key)
        for name in chosen.values() if isinstance(chosen, dict) else [chosen]:
            if isinstance(name, str) and "/" in name:
                raise ModelError(
                    f"{key} = {name!r} names a kernel on a hub",
                    where=where,
                    rule="no code is fetched: an implementation is one that Transformers brings",
                    fix='leave the key out, or write "sdpa" or "eager"',
                )
    named = settings.get("transformers_weights")
    if named is not None and not (isinstance(named, str) and is_plain_name(named)):
        raise ModelError(
            f"transformers_weights = {named!r}",
            where=where,
            rule="weights are a *.safetensors file in the folder of the model",
            fix="leave the key out, and name the file model.safetensors",
        )
