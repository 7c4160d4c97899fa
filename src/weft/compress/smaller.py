"""Smaller configurations: counts that are left, the keys that hold them, and the model that they make."""

import copy
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from weft.anatomy.build import build_on_meta
from weft.compress.source import Source
from weft.errors import ModelError

POSITION = re.compile(r"((layer|block)_?)?(idx|id|index|number)")
"""Attributes of a module that say where its block is."""


def kept_count(count: int, fraction: float, what: str, multiple: int = 1) -> int:
    """Number that is left, at least one."""
    kept = round(count * (1 - fraction) / multiple) * multiple
    if not 0 < kept < count:
        raise ModelError(
            f"{fraction:g} of {count} {what}" + (f", in multiples of {multiple}" if multiple > 1 else ""),
            where="recipe",
            rule="a pruning removes at least one, and not all",
            fix="choose another fraction, or leave this part out of prune_parts",
        )
    return kept


def text_keys(config: Any) -> dict[str, Any]:
    """Keys of the configuration of a model's text part; those of all, in a model of text alone."""
    table: dict[str, Any] = config.get_text_config().to_dict()
    return table


def changed(config: Any, keys: dict[str, Any]) -> Any:
    """Copy of a configuration with other values in its text part.

    Raises:
        ModelError: the family refuses them.
    """
    text, table = config.get_text_config(), config.to_dict()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), "")
    (table[part] if part else table).update(keys)
    try:
        return type(config).from_dict(table)
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(
            f"{config.model_type} refuses the smaller configuration: {str(error).strip().splitlines()[-1].strip()}",
            where=", ".join(f"{key} = {value}" for key, value in keys.items()),
            rule="a pruned model has a valid configuration of its family",
            fix="choose another fraction, or other parts",
        ) from None


def keys_of(config: Any, names: tuple[str, ...], value: int) -> list[str]:
    """Keys of a configuration that hold a number, among the known ones."""
    table, own = text_keys(config), config.get_text_config().attribute_map
    return list(dict.fromkeys(key for name in names if table.get(key := own.get(name, name)) == value))


def key_of(config: Any, names: tuple[str, ...], value: int, what: str) -> str:
    """Key of a configuration that holds a number.

    Raises:
        ModelError: there is none.
    """
    found = keys_of(config, names, value)
    if not found:
        raise ModelError(
            f"no key of the configuration has the number of {what}, {value}",
            where=f"model_type {config.model_type}",
            rule=f"one of {', '.join(names)} is the number of {what}",
            fix="prune other parts, or a model of another family",
        )
    return found[0]


def shapes_of(config: Any) -> dict[str, torch.Size]:
    """Shapes of the weights and saved buffers of a configuration's model.

    Raises:
        ModelError: the library cannot build it.
    """
    model = build_on_meta(copy.deepcopy(config), torch.float32)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_shapes(config: Any, own: set[str], shapes: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """Check that the model of a smaller configuration has the weights that are left.

    Args:
        config: smaller configuration.
        own: names of the weights and saved buffers that the model had before.
        shapes: of all tensors that are left, by name.
        expected: of those of the model; a tied weight may be missing in `shapes`.

    Raises:
        ModelError: names the first weight that has another shape, or no place in the model.
    """
    for name in (*expected, *(name for name in shapes if name in own and name not in expected)):
        found, wanted = shapes.get(name), expected.get(name)
        if found != wanted and (found is not None or name in own):
            raise ModelError(
                f"{name} would have the shape {_text(found)}, and in a model of the smaller configuration {_text(wanted)}",
                where=f"model_type {config.model_type}",
                rule="the sizes of all weights follow from the configuration",
                fix="choose other parts or another fraction, or a model of another family",
            )


def _text(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def difference(before: nn.Module, after: nn.Module) -> str:
    """First difference between a block and the one that takes its place in a smaller model; "" if they compute the same.

    Compares the modules, the shapes of their tensors, and their numbers and names, such as a window or a kind of attention.
    """
    old, new = dict(before.named_modules()), dict(after.named_modules())
    for name in (*old, *(name for name in new if name not in old)):
        found, wanted = old.get(name), new.get(name)
        if type(found) is not type(wanted):
            return f"{name} is a {type(found).__name__}, and would be a {type(wanted).__name__}"
        for key, value in _settings(found).items():
            if (other := _settings(wanted).get(key)) != value:
                return f"{name}.{key}".lstrip(".") + f" is {value}, and would be {other}"
    return ""


def _settings(module: Any) -> dict[str, Any]:
    """Plain attributes of a module and shapes of its tensors, without its place."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and not key.startswith("_")
        and not POSITION.fullmatch(key)
    }
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return plain | {key: tuple(tensor.shape) for key, tensor in own}


def not_streamed(model: Source, done: str, fix: str) -> ModelError:
    """Error for a model that cannot be read block by block.

    Args:
        done: what needs it, such as "blocks are dropped".
        fix: what to do instead.
    """
    return ModelError(
        f"the weights of {model.anatomy.family} are not stored as the model has them",
        where=f"model_type {model.anatomy.family}",
        rule=f"{done} in models that are read block by block: stored tensors are weights, or rows of one weight",
        fix=fix,
    )
