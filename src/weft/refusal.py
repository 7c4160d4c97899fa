"""Errors for unknown keys and invalid values of a job, each with its value, its rule and its fix. Imports no torch."""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from weft.errors import JobError
from weft.plan import Plan, Table

SHOWN_ERRORS, SHOWN_CHARACTERS = 5, 80  # maximum errors per message, and characters per value
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
RENAMED = {
    "train.global_batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "guard.patience_seconds": "guard.hang_timeout_seconds",
    "guard.rejoin_seconds": "guard.node_rejoin_seconds",
    "guard.replicas_every": "guard.sdc_check_interval",
    "plan.precision.forward": "plan.precision.param_dtype",
    "plan.precision.reduce": "plan.precision.reduce_dtype",
    "plan.precision.states": "plan.precision.optimizer_state_dtype",
    "plan.precision.float32": "plan.precision.fp32_modules",
    "plan.memory.recompute_every": "plan.memory.recompute_interval",
    "plan.memory.offload_ahead": "plan.memory.offload_prefetch",
    "plan.memory.optimizer": "plan.memory.optimizer_device",
    "plan.memory.folder": "plan.memory.offload_dir",
    "plan.comm.compress_level": "plan.comm.compress_scope",
    "plan.comm.head_groups": "plan.comm.ulysses_chunks",
    "--ranks": "--nproc-per-node",
    "--ranks-a": "--nproc-per-node-a",
    "--ranks-b": "--nproc-per-node-b",
    "--hosts": "--nnodes",
    "--host": "--node-rank",
    "--meet": "--rdzv-endpoint",
    "--world": "--world-size",
}
"""Current name of each key and command-line option that version 0.1 named differently."""
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def keys_of(table: type[Table], prefix: str = "") -> list[str]:
    """All dotted keys of a table, in order."""
    keys = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            keys += keys_of(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def explain(error: ValidationError, root: type[Table], tables: dict[str, Any], where: str) -> JobError:
    """Combine all errors of pydantic into one `JobError` that gives value, rule and fix of each key.

    Args:
        error: validation error of pydantic.
        root: class of the job.
        tables: input tables.
        where: file name for the message.
    """
    # By key, because a value that fits no branch of a union has one error per branch.
    found: dict[str, tuple[str, str, str]] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            path = [str(part) for part in item["loc"]]
            key = ".".join(path)
            found[key] = f"unknown key {key}", "", _fix_key(root, path, item["input"])
            continue
        key, field = _find_field(root, item["loc"])
        if key not in found:
            found[key] = _fix_value(key, field, item)
    lines, rules, fixes = ([part for part in parts if part] for parts in zip(*found.values(), strict=True))
    more = [f"and {len(lines) - SHOWN_ERRORS} more"] * (len(lines) > SHOWN_ERRORS)
    if set(tables) <= set(Plan.model_fields):
        fixes = [f'this file is a plan: write plan = "{where}" into a job, or pass a job with --set plan={where}']
    return JobError(
        "\n".join([*lines[:SHOWN_ERRORS], *more]),
        where=where,
        rule="; ".join(rules[:SHOWN_ERRORS]) or "`weft schema` lists all keys of a job",
        fix="; ".join(dict.fromkeys(fixes[:SHOWN_ERRORS])),
    )


def _rule(key: str, field: FieldInfo) -> str:
    """Rule of a key: its type and bounds, and its meaning if that is short."""
    words = f"{key} is {_in_words(field.annotation, field.metadata)}"
    meaning = field.description or ""
    return f"{words} ({meaning.rstrip('.')})" if 0 < len(meaning) <= SHOWN_CHARACTERS else words


def _find_field(root: type[Table], loc: tuple[int | str, ...]) -> tuple[str, FieldInfo]:
    """Dotted key, with an index for an element of a list, and field of a value that pydantic refused."""
    fields, key = root.model_fields, ""
    for depth, part in enumerate(loc):
        field = fields[str(part)]
        key = f"{key}.{part}" if key else str(part)
        inner = _table_of(field.annotation)
        if inner is None or depth == len(loc) - 1:
            break
        fields = inner.model_fields
    return key + "".join(f"[{part}]" for part in loc[depth + 1 :] if isinstance(part, int)), field


def _fix_value(key: str, field: FieldInfo, item: Any) -> tuple[str, str, str]:
    """Message, rule and fix for a value that breaks its rule."""
    value, name = item["input"], key.partition("[")[0]
    allowed = _choices(field.annotation)
    rule = _rule(name, field)
    if table := _table_of(field.annotation):
        return f"{key} = {_toml(value)}", rule, f"write [{key}], and its keys below: {', '.join(table.model_fields)}"
    example = _example(field)
    if item["type"] == "missing":
        if field.is_required():  # only keys of plan.prediction, which no user writes
            return f"{name} is missing", "", "remove plan.prediction, or copy the complete table that `weft plan` wrote"
        return f"{name} = {_toml(value)} has too few values", rule, f"for example {name} = {example}"
    near = difflib.get_close_matches(str(value).lower(), allowed, 1, 0.5)
    if near and get_origin(field.annotation) is tuple:
        fix = f'write {name} = ["{near[0]}"]'
    elif near:
        fix = f'did you mean {name} = "{near[0]}"?'
    elif item["type"] == "string_type" and isinstance(value, int | float):
        fix = f'write it in quotes: {name} = "{value}"'
    else:
        fix = f"for example {name} = {example}"
    return f"{key} = {_toml(value)}", rule, fix


def _fix_key(root: type[Table], path: list[str], value: Any) -> str:
    """Fix for an unknown key: the most similar known key or table, else the keys of its table."""
    if renamed := RENAMED.get(".".join(path)):
        return f"{'.'.join(path)} is now {renamed}"
    name = path[-1]
    table = root
    for part in path[:-1]:
        table = _table_of(table.model_fields[part].annotation) or table
    tables = {k: t for k, t in _tables(root) if k}
    known = [*keys_of(root), *tables]
    beside = difflib.get_close_matches(name, table.model_fields, 1, 0.65)
    # The last part decides: a right name in the wrong table is the usual slip.
    same = [k for k in known if k.rsplit(".", 1)[-1] == name]
    if same or beside:
        near = same[0] if same else ".".join([*path[:-1], *beside])
    elif isinstance(value, dict) and value:  # a table with an unknown name and known keys
        near = max(tables, key=lambda k: len(set(tables[k].model_fields) & set(value)))
        near = near if set(tables[near].model_fields) & set(value) else ""
    else:
        names = {k.rsplit(".", 1)[-1]: k for k in known}
        near = next((names[n] for n in difflib.get_close_matches(name, names, 1, 0.75)), "")
    if near:
        return f"did you mean {f'[{near}]' if near in tables else near}?"
    parent = f"[{'.'.join(path[:-1])}]" if path[1:] else "a job"
    return f"`weft schema` lists all keys; {parent} has {', '.join(table.model_fields)}"


def _tables(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """All tables of the job with their dotted keys; the key of the job itself is empty."""
    yield prefix, table
    for name, field in table.model_fields.items():
        if inner := _table_of(field.annotation):
            yield from _tables(inner, f"{prefix}.{name}" if prefix else name)


def _table_of(annotation: Any) -> type[Table] | None:
    """Class of the table that a field holds; None for a field without a table."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def _choices(annotation: Any) -> list[str]:
    """Allowed strings of a value, including strings inside lists and unions."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Type and bounds of a value in words, from the annotation of its field."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if words := [info for info in (*metadata, *(inner[1:] if origin is Annotated else ())) if isinstance(info, str)]:
        return words[0]
    if origin is Annotated:
        return _in_words(inner[0], [m for info in inner[1:] for m in getattr(info, "metadata", [info])])
    if origin is Literal:
        return _or([_toml(choice) for choice in inner])
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} values, each {_in_words(inner[0])}"
    if origin is tuple:
        return f"a list of values, each {_in_words(inner[0])}"
    if origin is dict or _table_of(annotation):
        return "a table"
    if inner:
        return _or([_in_words(kind) for kind in inner if kind is not type(None)])
    bounds = [
        f"{word} {value:g}"
        for bound in metadata
        for name, word in BOUNDS.items()
        if (value := getattr(bound, name, None)) is not None
    ]
    return " ".join([TYPES[annotation], " and ".join(bounds)]).strip()


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def _example(field: FieldInfo) -> str:
    """Valid example value: the default, or a value of the same type if the default is empty."""
    if field.default == {}:
        return "{}"
    if field.default not in (None, ()) and not field.is_required():
        return _toml(field.default)
    if choices := _choices(field.annotation):
        return _toml(choices[:1])
    return "[1]" if get_origin(field.annotation) is tuple else '"NAME"'


def _toml(value: Any) -> str:
    """TOML text of a value, shortened; a table is given by its keys."""
    if isinstance(value, dict):
        return f"a table of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(_toml, value))}]"
    elif value is None:
        text = "nothing"
    else:
        text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


def refuse_invalid_numbers(given: dict[str, Any], read: Table, where: str, prefix: str = "") -> None:
    """Refuse values that pydantic accepts as numbers: true, false, infinity, and NaN if the field has no bound.

    Args:
        given: input table.
        read: the same table, parsed by pydantic.
        where: file name for the message.
        prefix: dotted key of the table, with a final dot.
    """
    for name, value in given.items():
        found, field, key = getattr(read, name), type(read).model_fields[name], prefix + name
        if isinstance(found, Table) and isinstance(value, dict):
            refuse_invalid_numbers(value, found, where, f"{key}.")
            continue
        given_values, parsed_values = (part if isinstance(part, list | tuple) else [part] for part in (value, found))
        invalid = [number for number in given_values if _is_invalid(number)]
        invalid += [
            number for number in parsed_values if isinstance(number, float) and _is_invalid(number)
        ]  # the text "inf"
        if invalid and not isinstance(found, bool):
            rule = _rule(key, field) + ", and finite" * isinstance(invalid[0], float)
            fix = f"for example {key} = {_example(field)}"
            raise JobError(f"{key} = {_toml(value)}", where=where, rule=rule, fix=fix)


def _is_invalid(number: Any) -> bool:
    return isinstance(number, bool) or (isinstance(number, float) and not math.isfinite(number))
