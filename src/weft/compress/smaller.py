"""Smaller configurations: counts that are left, and the keys that hold them."""

from typing import Any

from weft.compress.source import Source
from weft.errors import ModelError


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


def changed(config: Any, keys: dict[str, Any]) -> Any:
    """Copy of a configuration with other values."""
    return type(config).from_dict({**config.to_dict(), **keys})


def key_of(config: Any, names: tuple[str, ...], value: int, what: str) -> str:
    """Key of a configuration that holds a number."""
    table = config.to_dict()
    known = [type(config).attribute_map.get(name, name) for name in names]
    found = next((name for name in known if table.get(name) == value), None)
    if found is None:
        raise ModelError(
            f"no key of the configuration has the number of {what}, {value}",
            where=f"model_type {config.model_type}",
            rule=f"one of {', '.join(known)} is the number of {what}",
            fix="leave this part out of prune_parts",
        )
    return found


def not_streamed(model: Source, done: str, fix: str) -> ModelError:
    """Error for a model that cannot be read block by block.

    Args:
        model: the model.
        done: what needs it, such as "blocks are dropped".
        fix: what to do instead.
    """
    return ModelError(
        f"the weights of {model.anatomy.family} are not stored as the model has them",
        where=f"model_type {model.anatomy.family}",
        rule=f"{done} in models that are read block by block: stored tensors are weights, or rows of one weight",
        fix=fix,
    )
